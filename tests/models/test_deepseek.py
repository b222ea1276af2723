"""DeepSeek-V3: the bias of its router, and rejected configurations; its numbers: `test_hf_parity.py`."""

from dataclasses import replace

import pytest
import torch
from small_models import MLA, SMALL_MODELS

from llmb.errors import ConfigError
from llmb.models.architectures import build_model

MODEL = SMALL_MODELS["deepseek"]


def test_router_bias_affects_the_selection_only() -> None:
    network = build_model(MODEL)
    network.init_weights(1)
    router = network.layers[2].mlp.router
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(2))
    weights, chosen = router(x)
    router.bias += 0.7  # the same for all: nothing changes
    assert torch.equal(router(x)[1], chosen)
    torch.testing.assert_close(router(x)[0], weights)
    router.bias[5] += 10.0
    weights, chosen = router(x)
    assert (chosen == 5).any(dim=1).all()
    assert weights.max() < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla": None}, "a deepseek needs the field mla"),
        ({"experts": None}, "a deepseek needs the field experts"),
        ({"rope": None}, "a deepseek needs the field rope"),
        ({"post_norms": True}, "a deepseek cannot have post_norms=true"),
        ({"attn_logit_softcap": 30.0}, "a deepseek cannot have attn_logit_softcap=30.0"),
        ({"mla": replace(MLA, rope_dim=7)}, "rope_dim=7 must be even"),
    ],
)
def test_unsupported_fields_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(replace(MODEL, **change))
