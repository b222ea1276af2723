"""Served rows of the native engine on one H200 (native_rows.yaml), their predictions, the fit of its constants."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from log_fit import least_squares

from llmb.config.recipe import load_yaml
from llmb.perfmodel.model_catalog import find_model
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.serving_time.serving_constants import calibrated_serving, serving_constants
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.step_time.cluster_fabric import device
from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.measured_device import measured_device

FIGURES = Path(__file__).with_name("native_rows.yaml")
SECTIONS = ("serving", "decode", "sweep")
SWEEP_LENGTH, SWEEP_BATCH, SWEEP_WAVES = 1000, 1024, 2
OFFLINE_FRACTION = 0.95  # of the memory, for the KV cache
CONTEXT = 752  # cached tokens of the decode rows
NOISE, TTFT_NOISE = 0.02, 0.3  # log standard deviation: chips differ by 2 to 3 %


@dataclass(frozen=True)
class NativeRow:
    """A measured row: its setup and the seconds that it is compared by."""

    title: str
    pool: str
    setup: ServingSetup
    measured_s: float  # TPOT, or the duration of a whole run over its output tokens
    ttft_s: float | None = None


def _setup(dtype: str, model: str = "llama3.1-8b", **fields: Any) -> ServingSetup:
    return ServingSetup(shape=find_model(model), gpu="h200", dtype=dtype, kv_dtype=dtype, engine="native", **fields)


def _row(section: str, figure: Mapping[str, Any]) -> NativeRow:
    pool = figure["pool"]
    if section == "serving":
        dtype, isl, osl, requests = (figure[name] for name in ("dtype", "isl", "osl", "requests"))
        of_model = {name: figure[name] for name in ("model", "fp8_recipe") if name in figure}
        setup = _setup(
            dtype, isl=isl, osl=osl, concurrency=requests, waves=1, max_batch_size=figure["batch"],
            max_num_tokens=figure["budget"], memory_fraction=OFFLINE_FRACTION, **of_model,
        )  # fmt: skip
        title = f"{figure.get('model', '')} {dtype} {isl}/{osl}, {requests} requests".strip()
        return NativeRow(title, pool, setup, 1 / figure["tokens_per_s"])
    if section == "decode":
        setup = _setup(figure["dtype"], isl=CONTEXT, osl=2, concurrency=1, waves=1)
        return NativeRow(f"{figure['dtype']} decode after {CONTEXT} tokens", pool, setup, figure["tpot_ms"] / 1e3)
    clients = figure["concurrency"]
    setup = _setup(
        "fp8", isl=SWEEP_LENGTH, osl=SWEEP_LENGTH, concurrency=clients, waves=SWEEP_WAVES, max_batch_size=SWEEP_BATCH
    )
    title = f"fp8 {SWEEP_LENGTH}/{SWEEP_LENGTH} over HTTP, {clients} client{'s' if clients > 1 else ''}: TPOT"
    return NativeRow(title, pool, setup, figure["tpot_ms"] / 1e3, figure["ttft_ms"] / 1e3)


@cache
def native_rows() -> tuple[NativeRow, ...]:
    """Return all rows."""
    figures: dict[str, Any] = load_yaml(FIGURES, f"sections {', '.join(SECTIONS)}")
    return tuple(_row(section, figure) for section in SECTIONS for figure in figures[section])


def predicted(row: NativeRow, c: Constants, rates: Rates | None = None) -> tuple[float, float]:
    """Return the predicted seconds of a row, and its TTFT; `rates`: those of a probe."""
    on = device(row.setup.gpu) if rates is None else measured_device(rates)
    p = predict_serving(row.setup, on, c)
    whole_run = row.setup.waves == 1 and row.setup.osl > 2
    return (1 / p.output_tokens_per_s if whole_run else p.tpot_ms / 1e3), p.ttft_ms / 1e3


def with_native(c: Constants) -> Constants:
    """Return the constants with those of the native engine fitted to its own rows."""
    native = {name: constant for name, constant in serving_constants().items() if name.endswith("_native")}
    rows = native_rows()

    def errors_of(values: Constants) -> np.ndarray:
        times = [predicted(row, c | values) for row in rows]
        errors = [time / row.measured_s for row, (time, _) in zip(rows, times, strict=True)]
        first = [ttft / row.ttft_s for row, (_, ttft) in zip(rows, times, strict=True) if row.ttft_s is not None]
        return np.log([*errors, *first])

    noise = np.array([NOISE] * len(rows) + [TTFT_NOISE for row in rows if row.ttft_s is not None])
    start = {name: constant.prior for name, constant in native.items()}
    return c | least_squares(errors_of, noise, np.ones(len(noise)), native, start)


def native_cells() -> list[tuple[str, ...]]:
    """Return measured and predicted times of all rows, as text: seconds of a token, and TTFT where it was measured."""
    c, cells = calibrated_serving(), []
    for row in native_rows():
        time, ttft = predicted(row, c)
        if row.setup.waves == 1 and row.setup.osl > 2:
            values = (f"{1 / row.measured_s:,.0f} tokens/s", f"{1 / time:,.0f}", 1 / time * row.measured_s)
        else:
            values = (f"{1e3 * row.measured_s:.3f} ms", f"{1e3 * time:.3f}", time / row.measured_s)
        error = f"{100 * (values[2] - 1):+.1f}"
        first = (f"{1e3 * row.ttft_s:,.0f}", f"{1e3 * ttft:,.0f}") if row.ttft_s is not None else ("", "")
        cells.append((row.title, row.pool, *values[:2], error, *first))
    return cells
