"""Weight shapes of a Llama layer, and checks that a model consists of such layers.

Shared by the layer with explicit backward (`llmb/models/llama_layer`) and the planner of out-of-core training, which
must agree on the memory layout.
"""

from typing import Any

from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.perfmodel.params import FP8_ALIGNMENT, unaligned_fp8_widths

ALIGNMENT = 256  # elements: at multiples of it tensors begin inside a buffer

# Fields of other layers, which would silently be trained as these, with the values that they have here.
LAYER_FIELDS: dict[str, tuple[Any, ...]] = {
    "gated": (True,), "activation": ("silu", "gelu"), "pre_norms": (True,), "o_bias": (False,),
    "qk_norm": (None, "head"), "attention_sinks": (False,), "pattern": (None,), "experts": (None,), "mla": (None,),
    "mamba": (None,), "residual_scale": (1.0,),
}  # fmt: skip


def aligned(elements: int) -> int:
    """Round up to the next offset at which a tensor may begin."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def layer_weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of wqkv, wo, w13 (gate and up), w2 (down), both norms, and of what a model may have more.

    That is a bias of queries, keys and values, norms of each head of queries and keys, and norms of what both blocks
    add to the residual. Names are those of `LayerWeights`, in their order.
    """
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "wqkv_XC": (width + 2 * kv_width, model.hidden),
        "wo_CA": (model.hidden, width),
        "w13_2FC": (2 * model.ffn, model.hidden),
        "w2_CF": (model.hidden, model.ffn),
        "norm1_C": (model.hidden,),
        "norm2_C": (model.hidden,),
    }
    if model.qkv_bias:
        shapes["bqkv_X"] = (width + 2 * kv_width,)
    if model.qk_norm is not None:
        shapes |= {"q_norm_D": (model.head_dim,), "k_norm_D": (model.head_dim,)}
    if model.post_norms:
        shapes |= {"post_norm1_C": (model.hidden,), "post_norm2_C": (model.hidden,)}
    return shapes


def has_llama_layers(model: Model) -> bool:
    """Return whether layers have explicit backward: those of a Llama, also with a qkv bias, norms of heads, post-norms,
    a softcap, or GeGLU."""
    return model.rope is not None and _other_field(model) is None


def check_llama_layers(model: Model) -> None:
    """Refuse a model of other layers in one line."""
    if (other := _other_field(model)) is not None:
        field, values = other
        raise ConfigError(
            f"layers with explicit backward are those of Llamas: {field} of {model.name} must be {values}, "
            f"got {getattr(model, field)!r}"
        )
    if model.rope is None:
        raise ConfigError(f"layers with explicit backward are those of Llamas: {model.name} has no RoPE")


def _other_field(model: Model) -> tuple[str, str] | None:
    """Return the first field that a Llama layer does not have so, and what it must be."""
    for field, values in LAYER_FIELDS.items():
        if getattr(model, field) not in values:
            return field, " or ".join(map(repr, values))
    return None


def check_fp8_widths(model: Model) -> None:
    """Refuse a model whose widths fp8 gemms do not support, in one line."""
    odd = [f"{name} is {width}" for name, width in unaligned_fp8_widths(model).items()]
    if odd:
        raise ConfigError(
            f"fp8 takes widths that are multiples of {FP8_ALIGNMENT}: of {model.name} {', '.join(odd)}; use dtype=bf16"
        )
