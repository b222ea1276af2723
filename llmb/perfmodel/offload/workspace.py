"""How much the computation of one chunk allocates beside its pieces.

    workspace_bytes(model, plan)

Each function names what is alive together at each point of the device side's `layer.py`, in numbers a token of the
run's format, and takes the largest. Kernels of attention make new memory for what they give; what cuDNN uses inside is
what its published form needs: the queries' slopes in fp32, and slopes of keys and values for each head of the queries.
What the plain forms of kernels hold on CPUs is not counted.
"""

from math import prod

from llmb.config.llama_layer_shapes import layer_weight_shapes
from llmb.config.offload_plan import FULL, Plan
from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import number_bytes, piece_bytes

KEYS_AT_ONCE = 65536  # of one call of the attention: its gradients are made for each head of the queries


def workspace_bytes(model: Model, plan: Plan) -> int:
    """What the computation of one chunk needs at most; what its level did not keep is there until it is done."""
    sizes, each, rows = piece_bytes(model, plan), number_bytes(plan), plan.chunk_tokens
    keys = max(rows, min(plan.group_tokens - rows, KEYS_AT_ONCE))  # its own, or those before it
    again = 0 if set(plan.levels) == {FULL} else sizes["rest"] + sizes["attn"]
    forward = each * forward_numbers(model, keeps_rest=not again)
    behind = each * max(recompute_numbers(model, attn_saved=not again), backward_numbers(model, keys / rows))
    head = plan.loss_tokens * head_numbers(model) * each + rows * model.hidden * each
    kept = 0
    if plan.dtype == "fp8":
        forward = max(forward, fp8_forward_bytes(model, keeps_rest=not again))
        behind = max(behind, fp8_backward_bytes(model))
        matrices = [prod(shape) for shape in layer_weight_shapes(model) if len(shape) == 2]
        kept = 2 * sum(matrices)  # a layer's, in both forms
    return max(rows * forward, again + rows * behind, head) + kept


def forward_numbers(model: Model, keeps_rest: bool) -> int:
    """Of `Block.forward`."""
    width = model.heads * model.head_dim
    queries = 0 if keeps_rest else width
    attention = queries + width + _lse(model)
    mlp = model.ffn if keeps_rest else model.hidden + 2 * model.ffn
    return max(model.hidden + queries, attention, model.hidden, mlp)


def recompute_numbers(model: Model, attn_saved: bool) -> int:
    """Of `Block.recompute`, whose `attn` and `rest` are the caller's."""
    width = model.heads * model.head_dim
    return max(model.hidden, 0 if attn_saved else width + _lse(model))


def backward_numbers(model: Model, keys_a_token: float) -> int:
    """Of `Block.backward`; a call of the attention takes so many times as many keys as queries."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    given = width + 2 * kv_width * keys_a_token
    inside = 2 * width + 2 * _lse(model) + (2 * width * keys_a_token if model.heads != model.kv_heads else 0)
    carved = 2 * width + 2 * kv_width + model.hidden  # in the memory of gate and up, as far as that goes
    beyond = carved if carved > 2 * model.ffn else 0
    return round(max(model.ffn, model.hidden, given + inside + beyond))


def fp8_forward_bytes(model: Model, keeps_rest: bool) -> int:
    """Of the linear layers of `fp8_linears.py`, a token: what they are given in 8 bits, and what is tried apart."""
    queries, both = (0, 0) if keeps_rest else (2 * model.heads * model.head_dim, 4 * model.ffn)
    added = 0 if keeps_rest else 2 * model.hidden
    return max(model.hidden + queries, both + max(model.hidden, model.ffn + added))


def fp8_backward_bytes(model: Model) -> int:
    """The same going back, and what is computed again before; the widest place is the activation's slope."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    slopes = 2 * model.hidden + 2 * model.ffn + 4 * model.ffn + model.ffn  # of the stream, act; both forms of h13, act
    carved = 2 * (2 * width + 2 * kv_width + model.hidden)
    beyond = carved if carved > 4 * model.ffn else 0
    attention = 2 * model.hidden + width, 2 * (width + 2 * kv_width) + model.hidden
    return max(slopes, beyond + max(attention))


def head_numbers(model: Model) -> int:
    """Of `vocabulary.head_loss`, for each of the tokens whose logits exist at once."""
    return model.vocab + model.hidden


def _lse(model: Model) -> int:
    """A log-sum-exp for each head, as two numbers of 16 bits."""
    return 2 * model.heads
