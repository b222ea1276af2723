"""Parameter counts and bytes of a model: weights, KV cache, recurrent state, traffic of a decode step.

parameters(model)                        all parameters
kv_bytes_per_token(model, "fp8")         KV cache of one token over all layers
"""

from llmb.config.model import Model
from llmb.config.spec import Precision
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.block_costs import attended_tokens, block_stack

# Bytes per value. nvfp4: 4 bits and one 8-bit scale for every 16 values; mxfp4: for every 32.
BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125}
FP8_ALIGNMENT = 16  # fp8 GEMMs need a K dimension that is a multiple of this
FP8_BLOCK = 128  # values along K that share a scale in the recipe blockwise
MXFP4_GROUP = 32  # values along K that share a scale


def parameter_breakdown(model: Model) -> dict[str, int]:
    """Return parameters by component.

    There is a norm before every block, unless without `pre_norms`, with `post_norms` one after it, and one before the
    LM head.
    """
    components = {"embedding": model.vocab * model.hidden}
    norms, router, norms_per_block = 1, 0, model.pre_norms + model.post_norms
    for kind, count, block in block_stack(model):
        components[kind] = count * (block.parameters - block.router_weights)
        norms, router = norms + count * norms_per_block, router + count * block.router_weights
    if router:
        components["router"] = router
    components["norms"] = norms * model.hidden
    if not model.tied_embeddings:
        components["lm_head"] = model.vocab * model.hidden
    return components


def parameters(model: Model) -> int:
    """Return all parameters, tied embeddings once. Leaves out multi-token-prediction layers."""
    return sum(parameter_breakdown(model).values())


def active_parameters(model: Model) -> int:
    """Return the parameters that one token uses: all but the routed experts that it is not routed to."""
    inactive = 0
    for _, count, block in block_stack(model):
        if block.routed_weights:
            unused = block.routed_weights - block.active_routed_weights
            inactive += count * (unused + block.routed_biases * unused // block.routed_weights)
    return parameters(model) - inactive


def kv_bytes_per_token(model: Model, kv_dtype: str | None) -> float:
    """Return the KV cache of one token over all layers; no dtype means bf16. Mamba blocks cache nothing per token."""
    value_bytes = bytes_per_value(kv_dtype or "bf16")
    bf16_or_wider = max(value_bytes, BYTES["bf16"])
    blocks = [(count, block.kv_values, block.kv_bf16_values) for _, count, block in block_stack(model)]
    return sum(count * ((values - bf16) * value_bytes + bf16 * bf16_or_wider) for count, values, bf16 in blocks)


def state_bytes_per_sequence(model: Model) -> float:
    """Return the recurrent state of one sequence, in fp32. Zero for a model without Mamba blocks."""
    return sum(count * block.state_values for _, count, block in block_stack(model)) * BYTES["fp32"]


def decode_bytes(model: Model, precision: Precision, batch: int, context: int) -> float:
    """Return the bytes that one decode step of `batch` requests must move.

    Block weights once in the run's dtype (mxfp4: experts only), the LM head once in bf16 or wider, `context` cached
    tokens per request (those inside of a sliding window), recurrent states read and written. Of the routed experts
    those that some token is routed to, on average with uniform routing: count * (1 - (1 - top_k / count) ** batch).
    Leaves out activations, norms and the embedding's rows.
    """
    check_tokens("batch", batch)
    check_tokens("context", context)
    weight_bytes = bytes_per_value(precision.dtype)
    total = model.hidden * model.vocab * max(weight_bytes, BYTES["bf16"])
    for _, count, block in block_stack(model):
        routed = block.routed_weights
        read = routed * (1 - (1 - block.active_routed_weights / routed) ** batch) if routed else 0.0
        total += count * (block.dense_weights * dense_bytes_per_value(precision.dtype) + read * weight_bytes)
    per_request = attended_tokens(model, context) * kv_bytes_per_token(
        model, precision.kv_dtype
    ) + 2 * state_bytes_per_sequence(model)
    return total + batch * per_request


def check_tokens(name: str, tokens: int) -> None:
    """Raise a ConfigError unless `tokens` is a positive whole number."""
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"{name} must be a whole number of tokens, 1 or more, got {tokens!r}")


def bytes_per_value(dtype: str) -> float:
    """Return the bytes of one value of a dtype."""
    if dtype not in BYTES:
        raise UnknownName("dtype", dtype, BYTES)
    return BYTES[dtype]


def dense_bytes_per_value(dtype: str) -> float:
    """Return the bytes of one weight of a matrix outside of experts: mxfp4 models quantize no others."""
    return bytes_per_value("bf16" if dtype == "mxfp4" else dtype)


def unaligned_fp8_widths(model: Model, multiple: int = FP8_ALIGNMENT) -> dict[str, int]:
    """Return the K dimensions of a dense Llama layer that fp8 GEMMs do not support, by name."""
    widths = {
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads * head_dim": model.heads * model.head_dim,
        "kv_heads * head_dim": model.kv_heads * model.head_dim,
    }
    return {name: width for name, width in widths.items() if width % multiple}
