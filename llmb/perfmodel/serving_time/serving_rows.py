"""Rows of a CSV of serving benchmarks as descriptions, and why a row cannot be used.

    for row in read_serving_rows(Path("published_serving.csv")): row.setup, row.ttft_ms, row.tpot_ms, row.reason

Columns: model, backend, backend_version, system, precision, isl, osl, concurrency, tp, pp, attention_dp, moe_tp,
moe_ep; optional kv_dtype, max_num_tokens, max_batch_size, receive_interval, draft_tokens, length_ratio; measured
ttft_ms and tpot_ms may be empty.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmb.errors import ConfigError, LlmbError
from llmb.perfmodel.hardware import GPUS
from llmb.perfmodel.serving_time.serving_constants import ENGINES, parse_engine
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.shapes.hf_shape import find_or_read_shape
from llmb.perfmodel.shapes.model_catalog import ModelShape
from llmb.perfmodel.step_time.csv_table import named_cells, positive_cell, read_table, whole_cell

DTYPES = {
    "": "bf16", "bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "fp4": "nvfp4", "nvfp4": "nvfp4",
    "mxfp4": "nvfp4",
}  # fmt: skip
MOST_RANKS = 16  # of one engine; published rows with more are disaggregated
# InferenceMAX draws lengths uniformly from 0.8 to 1 of the nominal ones, which are 1,024 or 8,192.
RECIPE_LENGTHS, RANDOM_RATIO = (1024, 8192), 0.9
KNOBS = ("max_num_tokens", "max_batch_size", "receive_interval", "draft_tokens")
DEFAULT_TOKENS = {"vllm": 8192, "trtllm": 8192, "sglang": 16384, "native": 8192}  # of a step
SPECULATIVE = ("1.2.0rc6.post3",)  # TensorRT-LLM of recipes with a multi-token-prediction layer
UNVERSIONED = "0"  # empty cells of versions are from the first published runs, of 2025; no such column: the newest
PUBLISHED_LAYOUT = {"attention_dp", "moe_tp", "moe_ep"}  # columns that published files have, and loads of users seldom
REQUIRED = ("model", "backend", "system", "isl", "osl", "concurrency")
COLUMNS = (
    "model", "backend", "backend_version", "system", "precision", "isl", "osl", "concurrency", "tp", "pp",
    "attention_dp", "moe_tp", "moe_ep", "kv_dtype", *KNOBS, "length_ratio", "ttft_ms", "tpot_ms",
)  # fmt: skip
# Words of `predict`, of its JSON and of engines' options for columns.
SPELLINGS = {
    "engine": "backend", "engine_version": "backend_version", "gpu": "system", "gpu_type": "system",
    "dtype": "precision", "ep": "moe_ep", "input_len": "isl", "output_len": "osl", "max_concurrency": "concurrency",
    "clients": "concurrency", "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp",
    "data_parallel_size": "attention_dp",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServingRow:
    """One row: what ran, what was measured, or why the row cannot be used."""

    number: int  # line of the file
    cells: dict[str, str]
    setup: ServingSetup | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    reason: str | None = None


def read_serving_rows(path: Path) -> list[ServingRow]:
    """Read a CSV file; every row comes back, with a description or a reason."""
    return read_table(path, parse_serving_row, REQUIRED, SPELLINGS)


def parse_serving_row(cells: dict[str, str], number: int = 0) -> ServingRow:
    """Return the description of one row."""
    try:
        cells = {name: text if name == "model" else text.lower() for name, text in named_cells(cells).items()}
        setup = _setup(cells)
        ttft, tpot = positive_cell(cells, "ttft_ms"), positive_cell(cells, "tpot_ms")
    except LlmbError as error:
        return ServingRow(number=number, cells=cells, reason=str(error).split("; choices are")[0])
    return ServingRow(number=number, cells=cells, setup=setup, ttft_ms=ttft, tpot_ms=tpot)


def _setup(cells: dict[str, str]) -> ServingSetup:
    for name in REQUIRED:
        if not cells.get(name):
            raise ConfigError(f"no {name}")
    engine = parse_engine(cells["backend"])
    if engine not in ENGINES:
        raise ConfigError(f"engine {cells['backend']} is not modelled; engines are: {', '.join(ENGINES)}")
    shape, gpu = find_or_read_shape(cells["model"]), cells["system"].removesuffix("_sxm")
    if cells.get("precision", "") not in DTYPES:
        raise ConfigError(f"precision {cells['precision']} is not modelled")
    dtype = DTYPES[cells.get("precision", "")]
    # Tables name a 4-bit checkpoint after its activations or its KV cache.
    if shape.checkpoint == "nvfp4" and dtype == "fp8" and cells.keys() >= PUBLISHED_LAYOUT:
        dtype = "nvfp4"
    tp, attention_dp, ep, moe_tp = _layout(cells, shape)
    recipe = _is_recipe(cells)
    return ServingSetup(
        shape=shape,
        gpu=gpu,
        dtype=dtype,
        kv_dtype=cells.get("kv_dtype") or default_kv_dtype(engine, gpu, dtype),
        isl=_counts(cells, "isl")[0],
        osl=_counts(cells, "osl")[0],
        concurrency=_counts(cells, "concurrency")[0],
        tp=tp,
        pp=_optional(cells, "pp") or 1,
        attention_dp=attention_dp,
        ep=ep,
        moe_tp=moe_tp,
        engine=engine,
        engine_version=cells.get("backend_version") or (UNVERSIONED if "backend_version" in cells else ""),
        length_ratio=positive_cell(cells, "length_ratio") or (RANDOM_RATIO if recipe else 1.0),
        **_knobs(cells, engine, gpu, attention_dp, shape.model.mla is not None),
    )


def _is_recipe(cells: dict[str, str]) -> bool:
    """Return whether a row has the form of InferenceMAX's recipes: all layout columns, lengths of 1,024 and 8,192."""
    has_layout = all(cells.get(name) for name in PUBLISHED_LAYOUT)
    return has_layout and all(_optional(cells, name) in RECIPE_LENGTHS for name in ("isl", "osl"))


def _knobs(cells: dict[str, str], engine: str, gpu: str, attention_dp: int, mla: bool) -> dict[str, Any]:
    """Return engine settings that no column tells: given ones, or those of the published recipes.

    TensorRT-LLM's token budget with MLA holds one prompt and the decodes, and one release speculates; with attention_dp
    it waits up to 60 steps to prefill on all replicas together. SGLang on Blackwell looks for new requests every 10 or
    30 steps. Rows of other benchmarks keep one client waiting with TensorRT-LLM: their batch limit is one less than the
    clients.
    """
    clients, isl = _counts(cells, "concurrency", "isl")
    knobs = {"max_num_tokens": DEFAULT_TOKENS[engine]}
    if _is_recipe(cells):
        if engine == "trtllm":
            knobs["max_num_tokens"] = clients + isl + 64 if mla else DEFAULT_TOKENS[engine]
            knobs["receive_interval"] = 60 if attention_dp > 1 else 1
            knobs["draft_tokens"] = int(mla and cells.get("backend_version") in SPECULATIVE)
        if engine == "sglang" and gpu not in ("h100", "h200"):
            knobs["receive_interval"] = 30 if clients >= 16 else 10
    elif engine == "trtllm" and clients > 1 and cells.keys() >= PUBLISHED_LAYOUT:
        knobs["max_batch_size"] = clients - 1
    columns = {name: _optional(cells, name) for name in KNOBS}
    return knobs | {name: value for name, value in columns.items() if value is not None}


def default_kv_dtype(engine: str, gpu: str, dtype: str) -> str:
    """Return the dtype of the KV cache where nobody says: fp8 with quantized weights, as the published recipes set it.

    vLLM's recipes left it in bf16 on H100, and SGLang's on Hopper; the batch that fits shows it. So does a GPU without
    fp8 units.
    """
    plain = {"vllm": ("h100",), "sglang": ("h100", "h200")}
    peaks = GPUS[gpu].peak_flops if gpu in GPUS else {}
    return "bf16" if dtype == "bf16" or gpu in plain.get(engine, ()) or (peaks and "fp8" not in peaks) else "fp8"


def _layout(cells: dict[str, str], shape: ModelShape) -> tuple[int, int, int, int]:
    """Return tp, attention_dp, ep and moe_tp.

    The published rows multiply both expert dimensions where the experts of n ranks are split by ep n: there tp (or
    attention_dp), moe_tp and moe_ep are n x n, n and n. The same measurement also stands there with the plain numbers.
    """
    tp, dp = _optional(cells, "tp") or 1, _optional(cells, "attention_dp") or 1
    moe_tp, ep = _optional(cells, "moe_tp") or 1, _optional(cells, "moe_ep") or 1
    if shape.model.experts is None:
        ep = moe_tp = 1
    elif cells.get("attention_dp") and moe_tp == ep > 1 and tp * dp == ep * ep:
        tp, dp, moe_tp = (tp // ep, 1, 1) if tp > 1 else (1, dp // ep, 1)
    if tp * dp > MOST_RANKS:
        raise ConfigError(f"{tp * dp} GPUs: disaggregated prefill and decode, whose split no column tells")
    if shape.model.experts and (ep * moe_tp != tp * dp):
        moe_tp = tp * dp // ep
    return tp, dp, ep, moe_tp


def _counts(cells: dict[str, str], *names: str) -> list[int]:
    return [_optional(cells, name) or 0 for name in names]


def _optional(cells: dict[str, str], name: str) -> int | None:
    return whole_cell(cells, name, least=1)
