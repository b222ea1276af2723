"""Predicted against measured maximum throughput of TensorRT-LLM's published tables."""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from accuracy import table

from llmb.errors import LlmbError
from llmb.perfmodel.serving_time.serving_predictor import ServingPrediction, predict_serving
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.cluster_fabric import FABRICS

CLIENTS = 3000  # requests of most of TensorRT-LLM's tables
DTYPES = {"fp16": "bf16", "bf16": "bf16", "fp8": "fp8", "fp4": "nvfp4"}


def offline_table(path: Path) -> str:
    """Return the errors of TensorRT-LLM's maximum throughput by model, GPU and dtype."""
    errors: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for setup, prediction, measured in _offline_rows(path):
        key = (setup.shape.model.name, setup.gpu, setup.dtype)
        errors[key].append(np.log(prediction.output_tokens_per_s / measured))
    rows = [(*key, *_summary(values)) for key, values in sorted(errors.items())]
    everything = [error for values in errors.values() for error in values]
    header = ("model", "GPU", "dtype", "rows", "median %", "p90 %", "bias %")
    return table(header, [*rows, ("all", "", "", *_summary(everything))])


def unseen_rows(data: Path, gpu: str) -> list[tuple[object, ...]]:
    """Return the errors of a GPU's maximum throughput by model and dtype, and how often the interval holds them."""
    groups: dict[tuple[str, ...], list[tuple[float, bool]]] = defaultdict(list)
    for setup, prediction, measured in _offline_rows(data / "published_inference.csv"):
        if setup.gpu == gpu:
            low, high = prediction.interval_80["output_tokens_per_s"] or (0.0, 0.0)
            error = 100 * abs(prediction.output_tokens_per_s / measured - 1)
            for key in ((setup.shape.model.name, setup.dtype), ("all", "")):
                groups[key].append((error, low <= measured <= high))
    return [
        (*key, len(rows), f"{np.median([error for error, _ in rows]):.1f}",
         f"{100 * np.mean([inside for _, inside in rows]):.0f}")
        for key, rows in sorted(groups.items(), key=lambda group: (group[0][0] == "all", group[0]))
    ]  # fmt: skip


def _offline_rows(path: Path) -> Iterator[tuple[ServingSetup, ServingPrediction, float]]:
    """Yield TensorRT-LLM's rows that can be predicted, with measured output tokens/s."""
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            setup = _offline_setup(cells)
            if setup is None:
                continue
            try:
                yield setup, predict_serving(setup), float(cells["output_tok_s"])
            except LlmbError:
                continue


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
        shape = find_model(cells["model"].replace(" ", "-"))
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
