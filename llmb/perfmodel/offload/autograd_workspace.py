"""Memory that a layer under autograd (`llmb/models/autograd_layer.py`) allocates for a chunk.

    autograd_forward_bytes(model, rows=16384, itemsize=2)
    autograd_backward_bytes(model, rows=16384, itemsize=2, keys_per_query=1.0, attn_saved=True)

What is alive together at each point, and the maximum over these, in elements of the run's dtype for each token and once
for weights: the gradient of one at a time exists outside of its buffer. Outputs of a GEMM or kernel are new memory,
views are none; attention is as in `workspace.py`.
"""

from math import prod

from llmb.config.model import Model
from llmb.perfmodel.offload.layer_params import layer_param_shapes


def autograd_forward_bytes(model: Model, rows: int, itemsize: int) -> int:
    """Return the peak of `AutogradLayer.forward`."""
    width, _, lse = _widths(model)
    attention = _qkv(model) + 2 * (width + lse)
    return rows * itemsize * max(_projecting(model), attention, width + 3 * model.hidden + _mlp_forward(model))


def autograd_backward_bytes(model: Model, rows: int, itemsize: int, keys_per_query: float, attn_saved: bool) -> int:
    """Return the peak of `AutogradLayer.backward`; the attention, if it is recomputed, belongs to the caller."""
    width, kv_width, lse = _widths(model)
    graph = model.hidden + _qkv(model) + (width + kv_width if model.qk_norm else 0)  # saved before the attention
    recomputed = max(_projecting(model), graph + 2 * (width + lse))
    # The residual, the layer's output and its gradient, the normed residual, what norms behind a block take.
    residuals = (3 + model.pre_norms + 2 * model.post_norms) * model.hidden + (0 if attn_saved else graph)
    attention = graph + model.hidden + 2 * width + 2 * kv_width + _attention_backward(model, keys_per_query)
    projections = graph + (2 + model.qkv_bias + (model.qk_norm is not None)) * _qkv(model) + 3 * model.hidden
    elements = max(
        rows * max(recomputed, attention, residuals + max(_mlp_forward(model), _activation_backward(model))),
        rows * (residuals + _down_backward(model)) + _largest(model, "mlp"),
        rows * projections + _largest(model, "attention"),
    )
    return round(itemsize * elements)


def _attention_backward(model: Model, keys_per_query: float) -> float:
    """Return the gradients of queries, keys and values, and what a kernel needs inside.

    With a softcap these are log-sum-exps; with a window keys before the chunk are copied together with its own.
    """
    width, kv_width, lse = _widths(model)
    if model.attn_logit_softcap is None:
        inside = 2 * width + 2 * lse + (2 * width * keys_per_query if model.heads != model.kv_heads else 0)
        return width + 2 * kv_width * keys_per_query + inside
    if model.window is None:
        return width + 2 * kv_width * keys_per_query + 3 * lse
    return width + 4 * kv_width * (keys_per_query + 1) + 3 * lse


def _widths(model: Model) -> tuple[int, int, int]:
    """Return the widths of all query heads and of all key heads, and the log-sum-exps as 16-bit elements."""
    return model.heads * model.head_dim, model.kv_heads * model.head_dim, 2 * model.heads


def _qkv(model: Model) -> int:
    return (model.heads + 2 * model.kv_heads) * model.head_dim


def _projecting(model: Model) -> int:
    """Return the normed residual, and queries, keys and values before and after a bias, norm or RoPE."""
    return model.hidden + 2 * _qkv(model) + (model.heads + model.kv_heads) * model.head_dim


def _mlp_forward(model: Model) -> int:
    """Return gate, up and their product; of experts also their inputs and outputs. A bias of these is gathered."""
    ffn, rows, router = _expert_widths(model)
    if model.experts is None:
        return 3 * ffn
    bias = model.experts.bias
    return max(rows + (3 + bias) * ffn, (2 + 2 * bias) * rows + (3 if bias else 1) * ffn) + router


def _activation_backward(model: Model) -> int:
    """Return gate and up, and the gradients of both and of their product."""
    ffn, rows, router = _expert_widths(model)
    return 5 * ffn + rows + router


def _down_backward(model: Model) -> int:
    """Return gate, up, their product and its gradient; of experts also their inputs and the gradient of outputs."""
    ffn, rows, router = _expert_widths(model)
    return 4 * ffn + 2 * rows + router


def _expert_widths(model: Model) -> tuple[int, int, int]:
    """Return the width of gate, of the rows that experts take, and of the router's tensors, for each token.

    The router has scores in fp32, and of a token's experts their weights, numbers and rows, forward and backward.
    """
    if model.experts is None:
        return model.ffn, 0, 0
    experts = model.experts
    return experts.top_k * experts.ffn, experts.top_k * model.hidden, 4 * experts.count + 16 * experts.top_k


def _largest(model: Model, block: str) -> int:
    """Return the elements of a block's largest weight."""
    return max(prod(shape) for name, shape in layer_param_shapes(model).items() if name.startswith(block))
