"""Which models out-of-core training is for: what it plans and computes, by hand, is a plain Llama and nothing else."""

from typing import Any

from llmb.costs import FP8_MULTIPLE, odd_fp8_widths
from llmb.errors import ConfigError
from llmb.spec import Model

# A model with more to it would be trained as something that it is not.
PLAIN: dict[str, Any] = {
    "architecture": "llama", "gated": True, "activation": "silu", "post_norms": False, "attention_cap": None,
    "embedding_scale": 1.0, "logit_scale": 1.0, "pattern": None, "experts": None, "latent": None, "mamba": None,
}  # fmt: skip


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
