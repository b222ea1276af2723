"""Activations that an external engine saves for backward, with low-precision GEMM inputs and recomputed modules.

    saved_fraction(setup)     -> bytes saved, relative to the memory estimate's, in bf16 and with no module recomputed

An input of a low-precision GEMM is saved in its dtype. Megatron recomputes modules by name: layernorm, core_attn,
mla_up_proj, mlp, moe_act, moe.
"""

from llmb.config.model import Model
from llmb.perfmodel.activation_memory import ActivationSizes
from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.expert_capacity import CAPACITY_FACTOR
from llmb.perfmodel.memory_estimate import LOGIT_BYTES, LOSS_CHUNK_TOKENS
from llmb.perfmodel.step_time.run_description import NATIVE, run_config
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.step_work import BF16, OPERAND_BYTES

SELECTIVE_SAVED = 0.6  # of the activations, with every second GEMM and the attention saved


def saved_fraction(setup: StepSetup, routed: float = CAPACITY_FACTOR) -> float:
    """Return the bytes saved over those of bf16 without recompute of single modules.

    `routed`: tokens that the experts of the fullest rank get, against an even routing.
    """
    plain = saved = 0.0
    for kind, count, block in block_stack(setup.shape.model):
        plain += count * BF16 * block.saved_values
        saved += count * _saved_bytes(setup, kind, BF16 * block.saved_values, routed)
    return saved / plain * (SELECTIVE_SAVED if setup.recompute == "selective" else 1.0)


def whole_logits(setup: StepSetup) -> float:
    """Return the logits of a micro-batch beyond the chunk that the estimate counts, which chunks the loss.

    Megatron and torchtitan do not; Transformer Engine's loss writes the gradient over them. Only without a pipeline,
    whose first stage, with the most micro-batches in flight, is the fullest.
    """
    chunk = LOSS_CHUNK_TOKENS * LOGIT_BYTES / BF16  # tokens
    return (
        BF16 * max(0.0, setup.tokens - chunk) * setup.shape.model.vocab / setup.parallel.tp * (setup.parallel.pp == 1)
    )


def offloaded_bytes(setup: StepSetup) -> float:
    """Return the activations of a micro-batch that a rank copies to the host, and back for backward.

    A recomputed layer has none.
    """
    model, split = setup.shape.model, setup.parallel
    layers = min(setup.offload_layers, setup.most_layers - setup.recomputed_layers)
    if layers and setup.engine == NATIVE:  # exact
        return layers * ActivationSizes(run_config(setup)).layer(0)
    values = sum(count * block.saved_values for _, count, block in block_stack(model)) / model.layers
    return layers * BF16 * values * saved_fraction(setup, routed=1.0) * setup.tokens / split.tp if layers else 0.0


def _saved_bytes(setup: StepSetup, kind: str, plain: float, routed: float) -> float:
    """Bytes per token of one block: the residual, the normalized input, and what the block itself saves."""
    model, operand = setup.shape.model, OPERAND_BYTES[setup.dtype]
    modules = setup.recompute_modules
    residual = BF16 * model.hidden
    normalized = 0.0 if "layernorm" in modules else operand * model.hidden
    if kind == "attention":
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        output = 0.0 if "core_attn" in modules else operand * width
        gate = (BF16 + operand) * width * model.output_gate  # and the gated output
        return residual + normalized + BF16 * (width + 2 * kv_width) + output + gate
    if kind == "mla":
        return residual + normalized + _mla(model, operand, "mla_up_proj" in modules)
    if kind == "mlp":
        return residual if "mlp" in modules else residual + normalized + _projections(model, model.ffn, operand)
    if kind == "experts":
        experts = _experts(model, operand, "moe_act" in modules, setup.parallel.etp, routed)
        return residual if "moe" in modules else residual + normalized + experts
    return plain - 2 * BF16 * model.hidden + residual + normalized


def _mla(model: Model, operand: float, recomputed: bool) -> float:
    assert model.mla is not None
    ranks = model.mla
    key, value = ranks.nope_dim + ranks.rope_dim, ranks.value_dim
    expanded = 0.0 if recomputed else BF16 * model.heads * (2 * key + value)
    return (BF16 + operand) * (ranks.q_rank + ranks.kv_rank) + expanded + operand * model.heads * value


def _projections(model: Model, width: int, operand: float, activated: float = 1.0) -> float:
    """Outputs of the first projections, and of the activation."""
    return (BF16 * (2 if model.gated else 1) + activated * operand) * width


def _experts(model: Model, operand: float, recomputed: bool, etp: int, load: float) -> float:
    """Each routed token once before its expert; routing weights are part of the activation, so none after it.

    Ranks that share the width of experts gather the tokens of all of them.
    """
    assert model.experts is not None
    experts = model.experts
    routed = etp * operand * (experts.latent or model.hidden)
    routed += _projections(model, experts.ffn, operand, 0.0 if recomputed else 1.0)
    return load * experts.top_k * routed + experts.shared * _projections(model, experts.ffn, operand)
