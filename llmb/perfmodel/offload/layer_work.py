"""Work of one layer besides attention: multiply-adds of its GEMMs, and bytes of the passes over memory between them.

    layer_work(model, plan).gemm_macs

A Llama layer recomputes only what backward needs. A layer under autograd (`llmb/models/autograd_layer.py`) runs
its forward pass again, without the attention if that was saved.
"""

from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.native.lora_shapes import adapter_params
from llmb.config.offload_plan import Lora, Plan
from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.offload.buffers import ParamBuckets, activation_itemsize, buffer_bytes, update_itemsizes
from llmb.perfmodel.offload.lora_costs import adapter_work
from llmb.perfmodel.offload.operand_bytes import operand_bytes


class LayerWork(NamedTuple):
    """Work of a layer: for each token, and once for each chunk."""

    gemm_macs: int  # forward
    backward_macs: int
    recompute_macs: int
    forward_bytes: int
    recompute_bytes: int
    backward_bytes: int
    gradient_bytes: float  # of a chunk: gradients of weights that are accumulated


def layer_work(model: Model, plan: Plan) -> LayerWork:
    """Return the work of a layer in the plan's dtype."""
    gradient = buffer_bytes(model, plan)["grad"] / ParamBuckets(model).bucket_numel
    if plan.lora is not None:
        return _adapted(_plain(model, plan, gradient), model, plan, plan.lora)
    return _plain(model, plan, gradient) if has_llama_layers(model) else _autograd(model, plan, gradient)


def _plain(model: Model, plan: Plan, gradient: float) -> LayerWork:
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = model.hidden * (2 * width + 2 * kv_width + 3 * model.ffn)
    itemsize, operands = activation_itemsize(plan), operand_bytes(model, plan)
    norms, bias, qkv = (width + kv_width) * (model.qk_norm is not None), model.qkv_bias, width + 2 * kv_width
    post = 2 * model.hidden * model.post_norms
    return LayerWork(
        gemm_macs=matrices,
        backward_macs=2 * matrices,
        recompute_macs=model.hidden * (2 * width + (2 + model.post_norms) * model.ffn + (kv_width if norms else 0)),
        # Two residual adds, by post-norms too; RoPE, norms and biases, in place.
        forward_bytes=itemsize * (2 * 3 * model.hidden + 2 * (width + kv_width) + 2 * norms + 2 * qkv * bias)
        + operands.forward,
        recompute_bytes=itemsize * (3 * model.hidden + 2 * width + 2 * (qkv - kv_width) * bias)
        + itemsize * 3 * model.ffn * model.post_norms
        + operands.recompute,
        # RoPE backward, accumulation of dk and dv; queries again, norms' backward and a copy; sums for biases.
        backward_bytes=itemsize * (2 * (width + kv_width) + 2 * kv_width * 4 + (4 * width + 5 * norms) * bool(norms))
        + itemsize * (qkv * bias + 3 * post)
        + operands.backward,
        # Every weight gradient is read and written once more to accumulate. In fp8 that is a separate pass, which also
        # reads the addend.
        gradient_bytes=(3.0 if plan.dtype == "fp8" else 2.0) * matrices * gradient,
    )


def _adapted(work: LayerWork, model: Model, plan: Plan, lora: Lora) -> LayerWork:
    """Add the work of adapters, and leave out the gradients of frozen weights."""
    adapters, itemsize = adapter_work(model, lora), activation_itemsize(plan)
    return work._replace(
        gemm_macs=work.gemm_macs + adapters.forward_macs,
        backward_macs=work.gemm_macs + adapters.backward_macs,
        recompute_macs=work.recompute_macs + adapters.recompute_macs,
        forward_bytes=work.forward_bytes + itemsize * adapters.forward_elements,
        recompute_bytes=work.recompute_bytes + itemsize * adapters.recompute_elements,
        backward_bytes=work.backward_bytes + itemsize * adapters.backward_elements,
        gradient_bytes=2.0 * adapter_params(model, lora) / model.layers * update_itemsizes(plan)[0],
    )


def _autograd(model: Model, plan: Plan, gradient: float) -> LayerWork:
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    costs = [cost for _, _, cost in block_stack(model)]
    macs = sum(cost.token_macs + cost.router_weights for cost in costs)
    itemsize, heads = activation_itemsize(plan), width + kv_width
    norms, has_norms = model.pre_norms + model.post_norms, model.qk_norm is not None
    mlp, experts = model.ffn, 0
    if model.experts is not None:
        mlp, experts = model.experts.top_k * model.experts.ffn, model.experts.top_k * model.hidden
    # Two residual adds, norms, biases, RoPE; the activation function; tokens are copied to experts and back.
    layer = 2 * 3 * model.hidden + 2 * 2 * norms * model.hidden
    layer += 2 * (heads * (1 + has_norms) + (heads + kv_width) * model.qkv_bias + model.hidden * model.o_bias)
    layer += 3 * mlp + (2 * (experts + model.hidden) if experts else 0)
    # Each backward reads the gradient and its input and writes one: norms, RoPE, dk and dv, sums for biases.
    backward = 2 * 4 * norms * model.hidden + 2 * heads + 4 * heads * has_norms + 2 * kv_width * 4
    backward += (heads + kv_width) * model.qkv_bias + model.hidden * (2 + model.o_bias)
    backward += 5 * mlp + (4 * experts + 2 * model.hidden if experts else 0)
    return LayerWork(
        gemm_macs=macs,
        backward_macs=2 * macs,
        recompute_macs=macs,
        forward_bytes=itemsize * (layer + 2 * model.hidden + 2 * 2 * kv_width),  # the output, keys and values copied
        recompute_bytes=itemsize * layer,
        backward_bytes=itemsize * backward,
        # Autograd's gradient is read, the one in the buffer read and written: of all experts, whichever are used.
        gradient_bytes=sum(cost.parameters for cost in costs) * (itemsize + 2 * gradient),
    )
