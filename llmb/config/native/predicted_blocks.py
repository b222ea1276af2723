"""Blocks that predictions of other engines know and that the native engine has not."""

from llmb.config.model import Model
from llmb.errors import ConfigError


def check_native_blocks(model: Model) -> None:
    """Refuse a model with such blocks, by the field that describes them."""
    fields = {
        "delta_net (gated DeltaNet layers)": model.delta_net is not None or "D" in model.attention_pattern,
        "attention_pattern of M (layers of Mamba and an MLP)": "M" in model.attention_pattern,
        "output_gate (a gate on the output of attention)": model.output_gate,
        "mla.q_rank=0 (queries without a latent)": model.mla is not None and not model.mla.q_rank,
        "mla.index_topk (sparse attention)": model.mla is not None and bool(model.mla.index_topk),
        "experts.latent (experts of another width)": model.experts is not None and model.experts.latent is not None,
    }
    if missing := [field for field, is_set in fields.items() if is_set]:
        raise ConfigError(
            f"{model.name}: the native engine has no {', no '.join(missing)}; predict it for another engine"
        )
