"""Memory that the computation of one chunk allocates besides the arena's buffers.

    workspace_bytes(model, plan)

Each function lists the tensors that are alive together at each point of `llmb/models/llama_layer/layer.py`, in elements
per token of the run's dtype, and returns the maximum. Attention kernels allocate their outputs. Inside, cuDNN backward
needs what its documentation says: dq in fp32, and dk and dv for every query head. Reference kernels on CPUs are not
counted.

A gemm that accumulates into a gradient needs a temporary of that gradient's size in two cases (`ops/gemm/matmul.py`):
where cuBLASLt does not take the operands, so that torch computes the product and adds it afterwards, and where a shape
first occurs with something to add, since trying cuBLASLt's algorithms must not touch the gradient. With LoRA the same
holds of outputs, which adapters write first.
"""

from math import prod

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers, layer_weight_shapes
from llmb.config.offload_plan import ATTENTION, FULL, Plan
from llmb.perfmodel.offload.autograd_workspace import autograd_backward_bytes, autograd_forward_bytes
from llmb.perfmodel.offload.buffers import ParamBuckets, activation_itemsize, buffer_bytes, widened_numel
from llmb.perfmodel.offload.lora_costs import adapted_elements, low_elements
from llmb.perfmodel.offload.operand_bytes import FIRST_PASS
from llmb.perfmodel.params import FP8_BLOCK

KEY_BLOCK = 65536  # keys per attention call: backward allocates their gradients for every query head
GEMM_ALIGNMENT = 16  # bytes at multiples of which cuBLASLt's operands and their rows begin


def workspace_bytes(model: Model, plan: Plan) -> int:
    """Return the peak over all tasks of a chunk; recomputed activations live until its backward is done."""
    sizes, each, rows = buffer_bytes(model, plan), activation_itemsize(plan), plan.chunk_tokens
    keys = max(rows, min(plan.group_tokens - rows, KEY_BLOCK))  # those of the chunk itself, or those before it
    head = plan.loss_tokens * head_elements(model) * each + rows * model.hidden * each
    head += head_temporary_bytes(model, plan)
    if not has_llama_layers(model):
        attn_saved = set(plan.levels) == {ATTENTION}
        backward = autograd_backward_bytes(model, rows, each, keys / rows, attn_saved)
        return max(autograd_forward_bytes(model, rows, each), backward + (0 if attn_saved else sizes["attn"]), head)
    recomputed = 0 if set(plan.levels) == {FULL} else sizes["rest"] + sizes["attn"]
    forward = each * forward_elements(model, saves_activations=not recomputed)
    backward = each * max(recompute_elements(model, attn_saved=not recomputed), backward_elements(model, keys / rows))
    cached = widened_numel(model) * each if plan.widens_weights else 0
    if plan.lora is not None:
        forward += each * adapted_elements(model, plan.lora, saves_activations=not recomputed)
        # Only fp32 has temporaries again where chunks are recomputed.
        backward += each * (low_elements(plan.lora) + (2 * model.ffn if plan.dtype == "fp32" else 0))
    if plan.dtype == "fp8":
        forward = max(forward, fp8_forward_bytes(model, not recomputed, plan.fp8_recipe))
        backward = max(backward, fp8_backward_bytes(model, plan.fp8_recipe))
        cached = 2 * sum(_matrices(model))  # weights of one layer, in both layouts
    behind = max(rows * backward, _accumulating_backward_bytes(model, plan, backward))
    return max(rows * forward, recomputed + behind, head) + cached


def head_temporary_bytes(model: Model, plan: Plan) -> int:
    """Return the size of the temporary for the gradient of a vocabulary shard, 0 where none is ever needed.

    Shards are column ranges of the logits, and may begin or end where cuBLASLt does not take them: Llama 1b has five
    shards of 25652 rows, every second of which begins at an odd multiple of 8 bytes.
    """
    chunk = min(plan.chunk_tokens, plan.group_tokens)
    if plan.lora is not None:
        return 0
    if not _accumulates(plan) and chunk <= plan.loss_tokens:
        return 0
    buckets, each = ParamBuckets(model), activation_itemsize(plan)
    starts = (buckets.shard_rows(part).start for part in range(buckets.vocab_shards))
    misaligned = any(element * each % GEMM_ALIGNMENT for element in (model.vocab, *starts))
    late_shapes = _has_unequal_chunks(plan) or (chunk > plan.loss_tokens and chunk % plan.loss_tokens)
    if not (plan.dtype == "fp32" or misaligned or late_shapes):
        return 0
    return len(buckets.shard_rows(0)) * model.hidden * _grad_element_size(model, plan)


def _accumulating_backward_bytes(model: Model, plan: Plan, backward: int) -> int:
    """Return the peak of the gemms that add to a layer's gradients, where these need temporaries, else 0.

    With many scales per tensor they always do: that of gate and up is the largest.
    """
    if plan.lora is not None or not _accumulates(plan):
        return 0
    if plan.fp8_recipe in FIRST_PASS:
        return plan.chunk_tokens * backward + 2 * model.hidden * model.ffn * _grad_element_size(model, plan)
    if not (plan.dtype == "fp32" or _has_unequal_chunks(plan)):
        return 0
    each, rows, grad = activation_itemsize(plan), plan.chunk_tokens, _grad_element_size(model, plan)
    down = model.hidden * model.ffn * grad
    if plan.dtype == "fp8":
        return rows * backward + 2 * down
    return max(rows * model.ffn * each + down, rows * model.hidden * each + 2 * down)


def _accumulates(plan: Plan) -> bool:
    """Return whether several chunks add to the same gradients."""
    return plan.rounds > 1 or plan.chunks_per_round > 1


def _has_unequal_chunks(plan: Plan) -> bool:
    """Return whether gemms of another shape first occur when their gradients already hold something."""
    has_short_chunk = plan.chunks_per_group > 1 and plan.group_tokens % plan.chunk_tokens != 0
    return has_short_chunk or plan.gbs % plan.seqs_per_group != 0


def _grad_element_size(model: Model, plan: Plan) -> int:
    return buffer_bytes(model, plan)["grad"] // ParamBuckets(model).bucket_numel


def forward_elements(model: Model, saves_activations: bool) -> int:
    """Return the peak of `LlamaLayer.forward`."""
    width = model.heads * model.head_dim
    queries = 0 if saves_activations and model.qk_norm is None else width
    block = 0 if saves_activations or not model.post_norms else model.hidden  # input of a post-norm
    attention = queries + width + _lse(model) + block
    mlp = model.ffn if saves_activations else model.hidden + 2 * model.ffn
    return max(model.hidden + queries, attention, model.hidden, mlp)


def recompute_elements(model: Model, attn_saved: bool) -> int:
    """Return the peak of `LlamaLayer.recompute`; the activations it fills belong to the caller."""
    width = model.heads * model.head_dim
    queries = 0 if model.qk_norm is None else width
    mlp = model.ffn if model.post_norms else 0  # the activation, projected again for its post-norm
    return max(model.hidden, mlp, 0 if attn_saved else queries + width + _lse(model))


def backward_elements(model: Model, keys_per_query: float) -> int:
    """Return the peak of `LlamaLayer.backward`."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    outputs = width + 2 * kv_width * keys_per_query
    inside = 2 * width + 2 * _lse(model) + (2 * width * keys_per_query if model.heads != model.kv_heads else 0)
    carved = 2 * width + 2 * kv_width + model.hidden  # placed in the memory of gate and up, where it fits
    beyond = carved if carved > 2 * model.ffn else 0
    normed = 0 if model.qk_norm is None else 2 * width + kv_width  # queries, and gradients of what has norms
    return round(max(model.ffn, model.hidden, outputs + inside + beyond + normed))


def fp8_forward_bytes(model: Model, saves_activations: bool, recipe: str | None = None) -> int:
    """Return the peak per token of the linear layers in `fp8_linears.py`: fp8 operands, outputs of algorithm trials.

    With many scales per tensor (`scaled_linears.py`) an operand is in bf16 first, beside its fp8 values and scales; the
    output that is added to the residual in place is a temporary.
    """
    queries, both = (0, 0) if saves_activations else (2 * model.heads * model.head_dim, 4 * model.ffn)
    trial = 0 if saves_activations else 2 * model.hidden
    if recipe in FIRST_PASS:
        normed, act = 2 * model.hidden + _scaled(model.hidden), 2 * model.ffn + _scaled(model.ffn)
        return max(normed + queries, both + max(normed, act, _scaled(model.ffn) + trial))
    return max(model.hidden + queries, both + max(model.hidden, model.ffn + trial))


def fp8_backward_bytes(model: Model, recipe: str | None = None) -> int:
    """Return the same of recompute and backward; the maximum is at the gradient of the activation function."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # Gradients of the residual and of act; both layouts of the gradient of h13; act in fp8.
    activation = 2 * model.hidden + 2 * model.ffn + 4 * model.ffn + model.ffn
    carved = 2 * (2 * width + 2 * kv_width + model.hidden)
    beyond = carved if carved > 4 * model.ffn else 0
    attention = 2 * model.hidden + width, 2 * (width + 2 * kv_width) + model.hidden
    if recipe in FIRST_PASS:  # the gradient of act becomes act, and is gone when that of h13 is cast
        activation = 2 * _scaled(model.hidden) + 5 * _scaled(model.ffn)
        qkv = 2 * _scaled(width + 2 * kv_width) + 2 * model.hidden + _scaled(model.hidden)
        attention = 2 * _scaled(model.hidden) + _scaled(width), qkv
    return max(activation, beyond + max(attention))


def _scaled(values: int) -> int:
    """Return the bytes of fp8 values with their scales, of which there are at most one per 128."""
    return values + -(-values // FP8_BLOCK) * 4


def head_elements(model: Model) -> int:
    """Return the peak of `vocab_ends.head_loss` for each of the tokens whose logits exist at once."""
    return model.vocab + model.hidden


def _matrices(model: Model) -> list[int]:
    return [prod(shape) for shape in layer_weight_shapes(model).values() if len(shape) == 2]


def _lse(model: Model) -> int:
    """An fp32 log-sum-exp per head, counted as two 16-bit elements."""
    return 2 * model.heads
