"""Served rows of the native engine on one H200 (native_rows.yaml), their predictions, the fit of its constants."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import serve_http

from llmb.config.native.request_lengths import Lengths
from llmb.formats.yaml_file import load_yaml
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.serving_time.native_step import NativeStep
from llmb.perfmodel.serving_time.serving_constants import calibrated_serving, serving_constants
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import serving_rates
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.cluster_fabric import device
from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.measured_device import measured_device
from prediction.log_fit import least_squares

FIGURES = Path(__file__).with_name("native_rows.yaml")
SECTIONS = ("serving", "decode", "deepseek", "sweep")
FORMATS = ("model", "fp8_recipe", "attention_dtype", "kv_dtype")
SWEEP_LENGTH, SWEEP_BATCH, SWEEP_WAVES = 1000, 1024, 2
OFFLINE_FRACTION = 0.95  # of the memory, for the KV cache
CONTEXT = 752  # cached tokens of the decode rows
DEEPSEEK_LAYERS, DEEPSEEK_CONTEXT = 5, 1030  # one dense layer; cached tokens in the middle of the timed steps
FITTED_MODEL = "Llama-3.1-8B"
NOISE, TTFT_NOISE = 0.02, 0.3  # log standard deviation: chips differ by 2 to 3 %


@dataclass(frozen=True)
class NativeRow:
    """A measured row: its setup and the seconds that it is compared by."""

    title: str
    pool: str
    setup: ServingSetup
    measured_s: float  # TPOT, or the duration of a whole run over its output tokens
    ttft_s: float | None = None
    kernels: Constants = field(default_factory=dict)  # rates of kernels that have been replaced since
    step: dict[str, float] = field(default_factory=dict)  # of a single step, in place of a run
    whole_run: bool = False  # compared by its output tokens/s, not by its TPOT

    @property
    def is_fitted(self) -> bool:
        """Whether constants are fitted to it: other rows check those of kernels that were measured alone."""
        setup = self.setup
        plain = not (setup.has_block_scales or setup.attention_dtype or setup.lengths)
        return plain and setup.shape.model.name == FITTED_MODEL


def _setup(dtype: str, model: str = "llama3.1-8b", **fields: Any) -> ServingSetup:
    fields = {"kv_dtype": dtype} | fields
    return ServingSetup(shape=find_model(model), gpu="h200", dtype=dtype, engine="native", **fields)


def _deepseek_row(figure: Mapping[str, Any]) -> NativeRow:
    """Return a step of a few layers of true width."""
    requests, prompt = figure.get("requests", 0), figure.get("prompt", 0)
    setup = _setup("fp8", "deepseek-v3-671b", isl=1000, osl=128, concurrency=max(1, requests), max_batch_size=256)
    experts = setup.shape.model.experts
    assert experts is not None
    model = replace(setup.shape.model, layers=DEEPSEEK_LAYERS, experts=replace(experts, dense_layers=1))
    setup = replace(setup, shape=replace(setup.shape, model=model, mtp_depth=0))
    step: dict[str, float] = {"decodes": requests, "context": DEEPSEEK_CONTEXT}
    if prompt:
        step = {"decodes": 0, "context": 0, "prefill": prompt, "prompts": 1, "pairs": prompt**2 / 2}
    title = f"DeepSeek-R1 fp8, {DEEPSEEK_LAYERS} layers, " + (
        f"prefill of {prompt}" if prompt else f"decode of {requests}"
    )
    return NativeRow(title, figure["pool"], setup, figure["step_ms"] / 1e3, step=step)


def _http_lengths(isl: int, osl: int, requests: int) -> Lengths:
    """Return the lengths of a load of bench/serve_http.py, as it draws them: outputs of 0.5 to 1.5 times `osl`."""
    load = next(row for row in serve_http.ROWS if (row.isl, row.osl, row.requests) == (isl, osl, requests))
    vocab = find_model("llama3.1-8b").model.vocab
    return tuple((len(p), n) for p, n in serve_http.requests(load, vocab, requests, serve_http.SEED, osl))


def _row(section: str, figure: Mapping[str, Any]) -> NativeRow:
    pool = figure["pool"]
    if section == "deepseek":
        return _deepseek_row(figure)
    if section == "serving":
        dtype, isl, osl, requests = (figure[name] for name in ("dtype", "isl", "osl", "requests"))
        of_model = {
            name: figure[name] for name in ("model", "fp8_recipe", "attention_dtype", "kv_dtype") if name in figure
        }
        clients = figure.get("clients", requests)
        setup = _setup(
            dtype, isl=isl, osl=osl, concurrency=clients, waves=requests // clients, max_batch_size=figure["batch"],
            max_num_tokens=figure["budget"], memory_fraction=OFFLINE_FRACTION,
            lengths=_http_lengths(isl, osl, requests) if figure.get("varied") else (), **of_model,
        )  # fmt: skip
        attention = f", {figure['attention_dtype']} attention" if "attention_dtype" in figure else ""
        varied = f", {osl // 2} to {osl * 3 // 2} tokens of output" if setup.lengths else ""
        title = f"{figure.get('model', '')} {dtype} {isl}/{osl}{attention}{varied}, {requests} requests".strip()
        kernels = figure.get("kernels", {})
        return NativeRow(title, pool, setup, 1 / figure["tokens_per_s"], kernels=kernels, whole_run=True)
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
    on, c = device(row.setup.gpu) if rates is None else measured_device(rates), c | row.kernels
    if row.step:
        work = serving_work(row.setup)
        steps = NativeStep.of(row.setup, work, serving_rates(row.setup, on, c), on, c)
        return sum(steps.terms(**row.step).values()), 0.0
    p = predict_serving(row.setup, on, c)
    return (1 / p.output_tokens_per_s if row.whole_run else p.tpot_ms / 1e3), p.ttft_ms / 1e3


def with_native(c: Constants) -> Constants:
    """Return the constants with those of the native engine fitted to its plain rows of one model."""
    native = {name: constant for name, constant in serving_constants().items() if name.endswith("_native")}
    rows = [row for row in native_rows() if row.is_fitted]

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
        if row.whole_run:
            values = (f"{1 / row.measured_s:,.0f} tokens/s", f"{1 / time:,.0f}", 1 / time * row.measured_s)
        else:
            values = (f"{1e3 * row.measured_s:.3f} ms", f"{1e3 * time:.3f}", time / row.measured_s)
        error = f"{100 * (values[2] - 1):+.1f}"
        first = (f"{1e3 * row.ttft_s:,.0f}", f"{1e3 * ttft:,.0f}") if row.ttft_s is not None else ("", "")
        cells.append((row.title, row.pool, *values[:2], error, *first))
    return cells
