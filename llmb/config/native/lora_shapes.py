"""LoRA of a run as its settings give it, and the shapes of a layer's adapters.

    lora = lora_of(workload, model, "bf16")      # None: all weights are trained
    adapter_shapes(model, lora)                  # in the order in which they lie in the flat buffers of all adapters

Each projection has its own A and B, under the names that PEFT gives them. The As of projections with the same input are
stacked, so that one GEMM computes their outputs. Shared by the layer and the planner, which must agree on the memory.
"""

from math import prod
from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import aligned, check_llama_layers
from llmb.config.offload_plan import Lora
from llmb.config.spec import OutOfCore
from llmb.errors import ConfigError, UnknownName

Shape = tuple[int, int]
PROJECTIONS = {  # by the matrix of a layer (`llama_layer_shapes.py`) in which they are stacked
    "wqkv_XC": ("q_proj", "k_proj", "v_proj"),
    "wo_CA": ("o_proj",),
    "w13_2FC": ("gate_proj", "up_proj"),
    "w2_CF": ("down_proj",),
}
TARGETS = tuple(name for names in PROJECTIONS.values() for name in names)


class ProjectionRows(NamedTuple):
    """A projection with an adapter, inside the matrix in which it is stacked."""

    name: str
    first: int  # row of that matrix
    rows: int


def lora_of(workload: OutOfCore, model: Model, dtype: str) -> Lora | None:
    """Return the LoRA of a workload; one line where its settings have no effect or are not computed."""
    rank, alpha, frozen = workload.lora_rank, workload.lora_alpha, workload.frozen_weights
    if not rank:
        for name, value in (("lora_alpha", alpha), ("lora_targets", workload.lora_targets), ("frozen_weights", frozen)):
            if value:
                raise ConfigError(f"{name} has no effect without LoRA, which trains adapters; also set lora_rank=16")
        return None
    try:
        check_llama_layers(model)
    except ConfigError as error:
        raise ConfigError(f"lora_rank={rank}: {error}") from None
    if dtype == "fp8":
        raise ConfigError("LoRA computes in bf16; use dtype=bf16, and frozen_weights=fp8 to store weights in fp8")
    if dtype == "fp32" and frozen == "bf16":
        raise ConfigError("frozen_weights=bf16 has no effect with fp32; leave it out, or set frozen_weights=fp8")
    for name in workload.lora_targets:
        if name not in TARGETS:
            raise UnknownName("projection in lora_targets:", name, TARGETS)
    if rank > min(model.hidden, model.kv_heads * model.head_dim, model.ffn):
        raise ConfigError(f"lora_rank={rank} is more than the rank of the projections of {model.name}")
    targets = tuple(name for name in TARGETS if name in (workload.lora_targets or TARGETS))
    return Lora(
        rank=rank, alpha=2.0 * rank if alpha is None else alpha, targets=targets,
        frozen_weights=frozen or ("fp32" if dtype == "fp32" else "bf16"),
    )  # fmt: skip


def projection_rows(model: Model, lora: Lora) -> dict[str, list[ProjectionRows]]:
    """Return the projections with adapters by the matrix in which they are; matrices without any are left out."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    rows = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width, "o_proj": model.hidden}
    rows |= {"gate_proj": model.ffn, "up_proj": model.ffn, "down_proj": model.hidden}
    chosen: dict[str, list[ProjectionRows]] = {}
    for matrix, names in PROJECTIONS.items():
        first = 0
        for name in names:
            if name in lora.targets:
                chosen.setdefault(matrix, []).append(ProjectionRows(name, first, rows[name]))
            first += rows[name]
    return chosen


def adapter_shapes(model: Model, lora: Lora) -> dict[str, Shape]:
    """Return the tensors of a layer's adapters by name: of each matrix the stacked As, then each B."""
    width = model.heads * model.head_dim
    inputs = {"wqkv_XC": model.hidden, "wo_CA": width, "w13_2FC": model.hidden, "w2_CF": model.ffn}
    shapes: dict[str, Shape] = {}
    for matrix, projections in projection_rows(model, lora).items():
        shapes[f"{matrix}.A"] = (len(projections) * lora.rank, inputs[matrix])
        shapes |= {f"{projection.name}.B": (projection.rows, lora.rank) for projection in projections}
    return shapes


def adapter_params(model: Model, lora: Lora) -> int:
    """Return the number of trained parameters of all layers."""
    return model.layers * sum(prod(shape) for shape in adapter_shapes(model, lora).values())


def adapter_numel(model: Model, lora: Lora) -> int:
    """Return the elements of the flat buffer of all adapters, each tensor aligned."""
    return model.layers * sum(aligned(prod(shape)) for shape in adapter_shapes(model, lora).values())
