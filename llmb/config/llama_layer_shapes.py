"""Weight shapes of a plain Llama layer, and checks that a model consists of such layers.

Shared by the layer with explicit backward (`llmb/models/llama_layer`) and the planner of out-of-core training, which
must agree on the memory layout.
"""

from typing import Any

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.perfmodel.params import FP8_ALIGNMENT, unaligned_fp8_widths

ALIGNMENT = 256  # elements: at multiples of it tensors begin inside a buffer

# Fields of other layers, which would silently be trained as plain ones.
LAYER_FIELDS: dict[str, Any] = {
    "gated": True, "activation": "silu", "pre_norms": True, "post_norms": False, "qkv_bias": False, "o_bias": False,
    "qk_norm": None, "local_rope": None, "attention_sinks": False,
    "attn_logit_softcap": None, "pattern": None, "experts": None, "mla": None, "mamba": None,
}  # fmt: skip


def aligned(elements: int) -> int:
    """Round up to the next offset at which a tensor may begin."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def layer_weight_shapes(model: Model) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of wqkv, wo, w13 (gate and up), w2 (down) and both norms."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return (
        (width + 2 * kv_width, model.hidden),
        (model.hidden, width),
        (2 * model.ffn, model.hidden),
        (model.hidden, model.ffn),
        (model.hidden,),
        (model.hidden,),
    )


def has_plain_layers(model: Model) -> bool:
    """Return whether the layer with explicit backward computes the layers of a model."""
    return model.rope is not None and all(getattr(model, name) == plain for name, plain in LAYER_FIELDS.items())


def check_plain_layers(model: Model) -> None:
    """Refuse a model of other layers in one line."""
    for field, plain in LAYER_FIELDS.items():
        if getattr(model, field) != plain:
            raise ConfigError(
                f"layers with explicit backward are those of plain Llamas: {field} of {model.name} must be {plain!r}, "
                f"got {getattr(model, field)!r}"
            )
    if model.rope is None:
        raise ConfigError(f"layers with explicit backward are those of plain Llamas: {model.name} has no RoPE")


def check_fp8_widths(model: Model) -> None:
    """Refuse a model whose widths fp8 gemms do not support, in one line."""
    odd = [f"{name} is {width}" for name, width in unaligned_fp8_widths(model).items()]
    if odd:
        raise ConfigError(
            f"fp8 takes widths that are multiples of {FP8_ALIGNMENT}: of {model.name} {', '.join(odd)}; use dtype=bf16"
        )
