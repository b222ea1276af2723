"""Predicted against measured maximum throughput: TensorRT-LLM's published tables, and the native engine on one H200."""

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from accuracy import table
from log_fit import least_squares

from llmb.errors import LlmbError
from llmb.perfmodel.model_catalog import find_model
from llmb.perfmodel.serving_time.cache_slots import cache_slots
from llmb.perfmodel.serving_time.serving_constants import calibrated_serving, serving_constants
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.serving_time.serving_rows import find_served_model
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.step_time.cluster_fabric import FABRICS
from llmb.perfmodel.step_time.fitted_constants import Constants

CLIENTS = 3000  # requests of most of TensorRT-LLM's tables
DTYPES = {"fp16": "bf16", "bf16": "bf16", "fp8": "fp8", "fp4": "nvfp4"}
NATIVE_NOISE = 0.05


def offline_table(path: Path) -> str:
    """Return the errors of TensorRT-LLM's maximum throughput by model, GPU and dtype."""
    errors: dict[tuple[str, ...], list[float]] = defaultdict(list)
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            setup = _offline_setup(cells)
            if setup is None:
                continue
            try:
                predicted = predict_serving(setup).output_tokens_per_s
            except LlmbError:
                continue
            key = (setup.shape.model.name, setup.gpu, setup.dtype)
            errors[key].append(np.log(predicted / float(cells["output_tok_s"])))
    rows = [(*key, *_summary(values)) for key, values in sorted(errors.items())]
    everything = [error for values in errors.values() for error in values]
    header = ("model", "GPU", "dtype", "rows", "median %", "p90 %", "bias %")
    return table(header, [*rows, ("all", "", "", *_summary(everything))])


def _summary(errors: Sequence[float]) -> tuple[object, ...]:
    absolute = 100 * np.abs(np.expm1(errors))
    return (
        len(errors), f"{np.median(absolute):.1f}", f"{np.percentile(absolute, 90):.0f}",
        f"{100 * np.expm1(np.median(errors)):+.1f}",
    )  # fmt: skip


def _offline_setup(cells: dict[str, str]) -> ServingSetup | None:
    """Return the setup of a row of TensorRT-LLM's tables with a PyTorch backend; None for others."""
    gpu, dtype = cells["gpu"].lower(), DTYPES.get(cells["dtype"].lower())
    if not cells["source"].startswith("TensorRT-LLM perf-overview") or gpu not in FABRICS or gpu == "a100":
        return None
    if dtype is None or not cells["output_tok_s"] or "PyTorch" not in cells["engine"]:
        return None
    tp, replicas = int(cells["tp"] or 1), 1
    if re.search(r"DEP|attention", cells["parallel"]):
        tp, replicas = 1, int(cells["gpus"])
    try:
        shape = find_served_model(cells["model"].replace(" ", "-"))
        experts = shape.model.experts is not None
        dtype = "nvfp4" if shape.checkpoint == "nvfp4" else dtype
        return ServingSetup(
            shape=shape, gpu=gpu, dtype=dtype, kv_dtype="bf16" if dtype == "bf16" else "fp8", isl=int(cells["isl"]),
            osl=int(cells["osl"]), concurrency=CLIENTS, tp=tp, attention_dp=replicas, moe_tp=1 if replicas > 1 else tp,
            ep=replicas if experts else 1, engine="trtllm", engine_version=cells["engine_version"], waves=1,
            max_batch_size=4096,
        )  # fmt: skip
    except LlmbError:
        return None


@dataclass(frozen=True)
class NativeRow:
    """A row of bench/RESULTS.md: Llama 3.1 8B on one H200."""

    dtype: str
    isl: int
    osl: int
    requests: int  # at once
    tokens_per_s: float


NATIVE_ROWS = (
    NativeRow("fp8", 128, 128, 6144, 30_049),
    NativeRow("fp8", 1000, 1000, 1344, 18_463),
    NativeRow("fp8", 128, 2048, 704, 26_793),
    NativeRow("fp8", 20000, 2000, 82, 1_645),
    NativeRow("bf16", 1000, 1000, 384, 10_443),
    NativeRow("bf16", 128, 128, 256, 15_372),
    NativeRow("bf16", 752, 2, 1, 1e3 / 3.855),  # decode only
    NativeRow("fp8", 752, 2, 1, 1e3 / 2.533),
)


def native_tokens_per_s(row: NativeRow, c: Constants) -> float:
    """Return predicted output tokens/s of a whole run: full batches, then one with the rest."""
    setup = ServingSetup(
        shape=find_model("llama3.1-8b"), gpu="h200", dtype=row.dtype, kv_dtype=row.dtype, isl=row.isl, osl=row.osl,
        concurrency=row.requests, engine="native", waves=1,
    )  # fmt: skip
    if row.osl == 2:
        return 1e3 / predict_serving(setup, c=c).tpot_ms
    slots = min(row.requests, cache_slots(setup, serving_work(setup)), setup.max_batch_size)
    batches, remainder = divmod(row.requests, slots)
    seconds = batches * predict_serving(replace(setup, concurrency=slots), c=c).e2e_ms / 1e3
    if remainder:
        seconds += predict_serving(replace(setup, concurrency=remainder), c=c).e2e_ms / 1e3
    return row.requests * row.osl / seconds


def with_native(c: Constants) -> Constants:
    """Return the constants with those of the native engine fitted to its own rows."""
    native = {name: constant for name, constant in serving_constants().items() if name.endswith("_native")}

    def errors_of(values: Constants) -> np.ndarray:
        return np.log([native_tokens_per_s(row, c | values) / row.tokens_per_s for row in NATIVE_ROWS])

    start = {name: constant.prior for name, constant in native.items()}
    return c | least_squares(errors_of, NATIVE_NOISE, np.ones(len(NATIVE_ROWS)), native, start)


def native_table() -> str:
    """Return predicted and measured throughput of the native engine."""
    c = calibrated_serving()
    rows = []
    for row in NATIVE_ROWS:
        predicted = native_tokens_per_s(row, c)
        title = f"{row.isl}/{row.osl}" if row.osl > 2 else f"decode after {row.isl} tokens"
        error = 100 * (predicted / row.tokens_per_s - 1)
        rows.append((row.dtype, title, row.requests, f"{row.tokens_per_s:,.0f}", f"{predicted:,.0f}", f"{error:+.1f}"))
    return table(("dtype", "isl/osl", "requests", "measured tokens/s", "predicted", "error %"), rows)
