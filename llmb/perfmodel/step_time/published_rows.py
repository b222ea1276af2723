"""Rows of a CSV of training runs as step descriptions, and why a row cannot be used.

    for row in read_rows(Path("published_training.csv")): row.setup, row.step_time_s, row.reason

Columns: model (a name, or the path of a config.json), size, task, gpu, dtype, gpus, seqlen, gbs, mbs, tp, pp, cp, vp,
ep, etp, fsdp, cuda_graphs, recompute_layers, offload_layers; those of SETTINGS, as with `--set`; optional source and
notes name engine, release and knobs; measured values may be empty.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.config.spec import Parallel
from llmb.errors import ConfigError, LlmbError
from llmb.perfmodel.shapes.hf_shape import find_or_read_shape
from llmb.perfmodel.step_time.csv_table import named_cells, positive_cell, read_table, whole_cell
from llmb.perfmodel.step_time.predictor import model_flops, peak_flops, step_memory
from llmb.perfmodel.step_time.recipe_settings import with_recipe
from llmb.perfmodel.step_time.setup_fields import default_etp, is_sharded_by_default, parse_settings, trains_mtp
from llmb.perfmodel.step_time.step_constants import NEWEST
from llmb.perfmodel.step_time.step_setup import DEFAULT_ENGINE, Recompute, StepSetup, parse_dtype
from llmb.perfmodel.step_time.waterfall import step_work

DEFAULT_SEQLEN = 8192  # of Llama 3 in torchtitan, whose tables leave it out
SEQLEN_UNIT, SEQLEN_TOLERANCE = 512, 0.002  # of a length that follows from measured figures
REDUCED_WATTS = 500.0  # of the H100 with 96 GB in torchtitan's tables
PACKED_TOKENS = 512  # per document of the question-answering data that fine-tuning recipes pack into sequences
BATCH_TOLERANCE = 0.2  # of log FLOPs: formulas for attention and MTP differ by less, batches by a factor of 2
IMPOSSIBLE = 2.0  # times the memory of the GPU: beyond what an estimate may miss
POSITIVE = ("gpus", "mbs", "tp", "pp", "cp", "ep")
# Columns that say what source and notes leave open: fields of `--set`.
SETTINGS = ("engine", "dispatcher", "recompute", "layers", "mtp", "overlap_experts", "fused_experts", "fp8_attention")
COLUMNS = (
    "source", "model", "size", "task", "gpu", "dtype", "gpus", "seqlen", "gbs", "mbs", "tp", "pp", "cp", "vp", "ep",
    "etp", "fsdp", "ga", "cuda_graphs", "recompute_layers", "offload_layers", *SETTINGS, "step_time_s", "tokens_per_s",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_percent", "notes",
)  # fmt: skip
# Words of other tables and of Megatron's options for columns.
SPELLINGS = {
    "gpu_type": "gpu", "num_gpus": "gpus", "world_size": "gpus", "precision": "dtype", "seq_len": "seqlen",
    "seq_length": "seqlen", "sequence_length": "seqlen", "micro_batch_size": "mbs", "global_batch_size": "gbs",
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "vp", "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp", "step_time": "step_time_s",
}  # fmt: skip
GRAPH_PARTS = ("attn", "mamba", "moe_router", "moe_preprocess")


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row: what ran, what was measured, or why the row cannot be used."""

    number: int  # line of the file
    cells: dict[str, str]
    setup: StepSetup | None = None
    step_time_s: float | None = None
    reason: str | None = None

    @property
    def model(self) -> str:
        return f"{self.cells['model']} {self.cells.get('size', '')}".strip()


def read_rows(path: Path) -> list[PublishedRow]:
    """Read a CSV file; every row comes back, with a description or a reason."""
    return read_table(path, parse_row, ("model", "gpu", "dtype", "gpus"), SPELLINGS)


def parse_row(cells: dict[str, str], number: int = 0) -> PublishedRow:
    """Return the description of one row."""
    try:
        cells = {name: _cell(name, value) for name, value in named_cells(cells).items()}
        setup = _setup(cells)
        seconds = measured_step_time(cells, setup)
        setup = setup if seconds is None else _as_run(setup)
        _check_batch(cells, setup, seconds)
        return PublishedRow(number=number, cells=cells, setup=setup, step_time_s=seconds)
    except LlmbError as error:
        return PublishedRow(number=number, cells=cells, reason=str(error).split("; choices are")[0])


def _as_run(setup: StepSetup) -> StepSetup:
    """Return a measured run with every layer recomputed where it cannot have run as described, for lack of memory."""
    capacity = setup.gpu_memory_bytes
    if setup.recompute != "none" or capacity is None or step_memory(setup).total < IMPOSSIBLE * capacity:
        return setup
    return replace(setup, recompute="full")


def _cell(name: str, text: str) -> str:
    """Return a cell as text; in settings, case does not matter and none is empty."""
    if name in ("source", "notes", "model"):
        return text
    return "" if text.lower() in ("none", "null", "nan") and name != "cuda_graphs" else text.lower()


def measured_step_time(cells: dict[str, str], setup: StepSetup) -> float | None:
    """Return the measured step time: printed, or from tokens/s of all GPUs or of one."""
    tokens = setup.gbs * setup.seqlen
    if (seconds := positive_cell(cells, "step_time_s")) is not None:
        return seconds
    if (rate := positive_cell(cells, "tokens_per_s_per_gpu")) is not None:
        return tokens / setup.gpus / rate
    return tokens / rate if (rate := positive_cell(cells, "tokens_per_s")) is not None else None


def _check_batch(cells: dict[str, str], setup: StepSetup, seconds: float | None) -> None:
    """Reject a row whose batch came from its recipe and does not give the TFLOP/s that it prints."""
    printed = positive_cell(cells, "tflops_per_gpu")
    if cells.get("gbs") or printed is None or seconds is None:
        return
    ratio = model_flops(setup) / setup.gpus / seconds / 1e12 / printed
    if abs(math.log(ratio)) > BATCH_TOLERANCE:
        raise ConfigError("the batch of its recipe does not give the printed TFLOP/s")


def is_possible(setup: StepSetup, seconds: float) -> bool:
    """Return whether a measured step stays below the GPU's peak in the dtype of the run."""
    return model_flops(setup) / setup.gpus / seconds < peak_flops(step_work(setup))


def _setup(cells: dict[str, str]) -> StepSetup:
    if not cells.get("model"):
        raise ConfigError("no model")
    shape = find_or_read_shape(cells["model"], cells.get("size", ""))
    _require(cells, "gpu", "gpus", "dtype")
    settings = parse_settings([f"{name}={cells[name]}" for name in SETTINGS if cells.get(name)])
    engine = settings.pop("engine", None) or engine_of(cells.get("source", ""), cells.get("notes", ""))
    dtype = parse_dtype(cells["dtype"])
    # A row of a table leaves out what its release or recipe says; any other has the defaults of `--set`.
    is_published = bool(cells.get("source") or cells.get("notes"))
    if is_published:
        cells = with_recipe(cells, shape, dtype, recent=engine == NEWEST)
    _require(cells, "mbs")
    notes = cells.get("notes", "")
    if not settings.pop("mtp", trains_mtp(engine) and "without MTP" not in notes):
        shape = replace(shape, mtp_depth=0)
    seqlen = _count(cells, "seqlen") or (DEFAULT_SEQLEN if engine == "torchtitan" else _measured_seqlen(cells))
    if seqlen is None:
        raise ConfigError("no seqlen")
    parallel, gpus, mbs = _layout(cells, engine), int(cells["gpus"]), int(cells["mbs"])
    task = cells.get("task") or "pretrain"
    captures = cells.get("cuda_graphs", "")
    graphs = float(captures == "true" or "full_iteration" in captures)
    # Whole iterations with experts can only be captured without waiting for the host, which these kernels do not.
    captured = is_published and shape.model.experts is not None and graphs == 1.0 and engine == NEWEST
    setup = StepSetup(
        shape=shape,
        gpu=cells["gpu"],
        gpus=gpus,
        dtype=dtype,
        seqlen=seqlen,
        # torchtitan names the local batch, which a pipeline splits into micro-batches of one sequence.
        mbs=1 if engine == "torchtitan" and parallel.pp > 1 and is_published else mbs,
        gbs=_count(cells, "gbs") or mbs * parallel.dp,
        parallel=parallel,
        fsdp_ranks=_fsdp_ranks(cells, parallel),
        layers=_layers(notes),
        recompute=_recompute(notes, cells),
        recompute_layers=_count(cells, "recompute_layers") or None,
        recompute_modules=_modules(notes),
        offload_layers=_count(cells, "offload_layers") or 0,
        graphs=graphs,
        graph_parts=_graph_parts(captures),
        engine=engine,
        dispatcher=_dispatcher(notes),
        overlap_tp="vanilla TP" not in notes,
        overlap_experts="moe_a2a_overlap" in notes,
        fused_experts="op_fuser" in notes or captured,
        fp8_attention="fp8_attention" in notes or (captured and dtype == "fp8-mx"),
        task=task,
        document_tokens=PACKED_TOKENS if is_published and task != "pretrain" else None,
        watts=REDUCED_WATTS if "500W" in notes or "lower TDP" in notes else None,
    )
    return replace(setup, **settings)


def _measured_seqlen(cells: dict[str, str]) -> int | None:
    """Return the tokens of a sequence by the printed tokens/s, step time and batch, if they agree on a whole number."""
    names = ("tokens_per_s_per_gpu", "step_time_s", "gbs")
    rate, seconds, sequences = (positive_cell(cells, name) for name in names)
    if rate is None or seconds is None or sequences is None:
        return None
    tokens = rate * int(cells["gpus"]) * seconds / sequences
    seqlen = round(tokens / SEQLEN_UNIT) * SEQLEN_UNIT
    return seqlen if seqlen and abs(tokens / seqlen - 1) < SEQLEN_TOLERANCE else None


def _require(cells: dict[str, str], *names: str) -> None:
    for name in names:
        if not cells.get(name):
            raise ConfigError(f"no {name}")


def _layout(cells: dict[str, str], engine: str) -> Parallel:
    """Return the parallel layout; torchtitan shards over all GPUs unless the row says otherwise."""
    for name in ("gpus", "mbs"):
        _count(cells, name)
    if not cells.get("tp") and not cells.get("fsdp") and engine != "torchtitan":
        raise ConfigError("no layout")
    tp, pp, cp = (_count(cells, name) or 1 for name in ("tp", "pp", "cp"))
    return Parallel(
        dp=max(1, int(cells["gpus"]) // (tp * pp * cp)),
        fsdp=_is_sharded(cells, engine),
        tp=tp,
        pp=pp,
        cp=cp,
        vp=_count(cells, "vp"),
        ep=_count(cells, "ep") or 1,
        etp=_count(cells, "etp") or default_etp(engine, tp),
    )


def _is_sharded(cells: dict[str, str], engine: str) -> bool:
    """Return whether weights are sharded: a number of FSDP ranks, true, or a word in the notes."""
    text = cells.get("fsdp", "")
    if text in ("true", "false"):
        return text == "true"
    return (_count(cells, "fsdp") or 0) > 1 or is_sharded_by_default(engine) or "FSDP" in cells.get("notes", "")


def _fsdp_ranks(cells: dict[str, str], parallel: Parallel) -> int | None:
    """Return the ranks that share one copy of the weights where there are several copies, as in MaxText's tables."""
    ranks = (_count(cells, "fsdp") or 0) * parallel.cp if cells.get("fsdp") not in ("true", "false") else 0
    replicas = parallel.dp * parallel.cp
    return ranks if parallel.fsdp and 1 < ranks < replicas and replicas % ranks == 0 else None


def engine_of(source: str, notes: str) -> str:
    """Return the engine and its generation from where a row was published."""
    framework = re.search(r"framework=([\w+-]+)", notes)
    if framework:
        engines = {"torchtitan": "torchtitan", "maxtext": "jax", "paxml": "jax"}
        if framework[1] not in engines:
            raise ConfigError(f"engine {framework[1]} is not modelled")
        return engines[framework[1]]
    if "Megatron-Bridge" in source:
        recent = re.search(r"verified=2026|container-26\.(0[6-9]|1)", f"{notes} {source}")
        return "megatron-bridge-2026" if recent else "megatron-bridge"
    release = re.search(r"v(\d\d\.\d\d)", source)
    if release is None:
        return DEFAULT_ENGINE
    return "megatron-2024" if float(release[1]) < 25.04 else "megatron"


def _count(cells: dict[str, str], name: str) -> int | None:
    return whole_cell(cells, name, least=int(name in POSITIVE))


def _layers(notes: str) -> int | None:
    match = re.search(r"\blayers=(\d+)", notes)
    return int(match[1]) if match else None


def _recompute(notes: str, cells: dict[str, str]) -> Recompute:
    if _count(cells, "recompute_layers") or re.search(r"full AC|AC full", notes):
        return "full"
    return "selective" if re.search(r"SAC|selective AC|AC selective", notes) else "none"


def _graph_parts(text: str) -> tuple[str, ...]:
    """Return the parts of layers that are captured one by one; those that can be when the row names none."""
    if "transformer_engine" not in text:
        return ()
    return tuple(part for part in GRAPH_PARTS if part in text) or GRAPH_PARTS


def _dispatcher(notes: str) -> str:
    match = re.search(r"dispatcher=(\w+)|(tokendrop)", notes)
    return (match[1] or match[2]) if match else "alltoall"


def _modules(notes: str) -> tuple[str, ...]:
    match = re.search(r"recompute_modules=([\w+]+)", notes)
    return tuple(match[1].split("+")) if match else ()
