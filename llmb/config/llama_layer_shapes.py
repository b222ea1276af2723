"""Weight shapes of a plain Llama layer, and checks that a model consists of such layers.

Shared by the layer with explicit backward (`llmb/models/llama_layer`) and the planner of out-of-core training, which
must agree on the memory layout.
"""

from typing import Any

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.perfmodel.flops import FP8_MULTIPLE, odd_fp8_widths

ALIGNMENT = 256  # elements: at multiples of it tensors begin inside a buffer

# A model with more to it would be trained as something that it is not.
PLAIN: dict[str, Any] = {
    "architecture": "llama", "gated": True, "activation": "silu", "post_norms": False, "attention_cap": None,
    "embedding_scale": 1.0, "logit_scale": 1.0, "pattern": None, "experts": None, "latent": None, "mamba": None,
}  # fmt: skip


def aligned(elements: int) -> int:
    """Round up to the next offset at which a tensor may begin."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def layer_weight_shapes(model: Model) -> tuple[tuple[int, ...], ...]:
    """Shapes of wqkv, wo, w13 (gate and up), w2 (down) and both norms."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return (
        (width + 2 * kv_width, model.hidden),
        (model.hidden, width),
        (2 * model.ffn, model.hidden),
        (model.hidden, model.ffn),
        (model.hidden,),
        (model.hidden,),
    )


def check_plain_llama(model: Model) -> None:
    """One line for any other model."""
    for field, plain in PLAIN.items():
        if getattr(model, field) != plain:
            raise ConfigError(
                f"out-of-core training is for plain Llamas: of {model.name} {field} is {getattr(model, field)!r}, "
                f"it must be {plain!r}"
            )
    if model.rope is None:
        raise ConfigError(f"out-of-core training is for plain Llamas: {model.name} has no rotary positions (rope)")


def check_fp8_widths(model: Model) -> None:
    """One line for a model that 8-bit products cannot compute."""
    odd = [f"{name} is {width}" for name, width in odd_fp8_widths(model).items()]
    if odd:
        raise ConfigError(
            f"fp8 takes widths that are multiples of {FP8_MULTIPLE}: of {model.name} {', '.join(odd)}; use dtype=bf16"
        )
