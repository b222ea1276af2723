"""Work of LoRA adapters in an out-of-core step.

    adapter_work(model, lora)               # of one layer
    adapter_update_bytes(model, plan)       # of the update of all

Counted from `llmb/models/llama_layer/lora_linears.py`. GEMMs over the rank are bound by memory: what they read and
write of activations counts as passes over memory, beside their FLOPs.
"""

from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.native.lora_shapes import adapter_numel, adapter_shapes, projection_rows
from llmb.config.offload_plan import Lora, Plan
from llmb.perfmodel.offload.buffers import activation_itemsize, update_itemsizes


class AdapterWork(NamedTuple):
    """Multiply-adds and elements read and written for each token in a layer, besides those of frozen matrices."""

    forward_macs: int
    recompute_macs: int
    backward_macs: int
    forward_elements: int
    recompute_elements: int
    backward_elements: int


def adapter_work(model: Model, lora: Lora) -> AdapterWork:
    """Return the work of a layer's adapters."""
    shapes, macs, elements = adapter_shapes(model, lora), [0, 0, 0], [0, 0, 0]
    recomputed = {"q_proj", "o_proj", "gate_proj", "up_proj"}
    recomputed |= ({"k_proj"} if model.qk_norm is not None else set()) | ({"down_proj"} if model.post_norms else set())
    for matrix, projections in projection_rows(model, lora).items():
        inputs = shapes[f"{matrix}.A"][1]
        shares_input = (
            matrix == "w13_2FC"
        )  # one GEMM computes x A^T of all projections; queries have buffers of their own
        for index, projection in enumerate(projections):
            outputs = projection.rows
            a, b = lora.rank * inputs, lora.rank * outputs
            forward = a + b, (0 if shares_input and index else inputs) + 2 * outputs  # written, then read as an addend
            macs[0], elements[0] = macs[0] + forward[0], elements[0] + forward[1]
            if projection.name in recomputed:
                macs[1], elements[1] = macs[1] + forward[0], elements[1] + forward[1]
            # x A^T again, dB, dy B, dA, and d_low A; the output's gradient is read twice.
            macs[2], elements[2] = macs[2] + 3 * a + 2 * b, elements[2] + 2 * outputs
        elements[2] += 4 * inputs  # the input is read twice, its gradient read and written
    return AdapterWork(*macs, *elements)


def adapter_update_bytes(model: Model, plan: Plan) -> int:
    """Return the bytes that an update reads and writes: the norm of the gradients, Adam, and clearing them."""
    assert plan.lora is not None
    grad, state = update_itemsizes(plan)
    return adapter_numel(model, plan.lora) * (2 * activation_itemsize(plan) + 3 * grad + 2 * state)


def low_elements(lora: Lora) -> int:
    """Return the elements per token of x A^T and its gradient, of the three projections that share an input."""
    return 2 * 3 * lora.rank


def adapted_elements(model: Model, lora: Lora, saves_activations: bool) -> int:
    """Return the elements per token that adapters add to the peak of forward: a temporary of gate and up."""
    temporary = model.hidden + model.ffn if saves_activations else 2 * model.ffn
    return temporary + low_elements(lora)
