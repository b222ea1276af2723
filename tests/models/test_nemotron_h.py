"""Nemotron-H: initial Mamba parameters, and rejected configurations; its numbers: `test_hf_parity.py`."""

from dataclasses import replace

import pytest
import torch.nn.functional as F
from small_models import nemotron_h_model

from llmb.config.spec import MambaConfig, MoEConfig, RopeConfig
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.mamba2 import MambaMixer

MODEL = nemotron_h_model("M-M*-M")


def test_mamba_parameters_are_initialized_as_published() -> None:
    network = build_model(replace(MODEL, mamba=MambaConfig(heads=512, head_dim=4, groups=2, state=4, chunk=8)))
    network.init_weights(1)
    mixer = next(module for module in network.modules() if isinstance(module, MambaMixer))
    steps, rates = F.softplus(mixer.dt_bias), mixer.a_log.exp()
    assert 0.00099 < steps.min() < 0.0012
    assert 0.09 < steps.max() < 0.1001
    assert steps.log().mean().exp().item() == pytest.approx(0.01, rel=0.2)
    assert 1.0 <= rates.min() < 1.2
    assert 15.8 < rates.max() <= 16.0
    assert (mixer.d == 1).all()
    assert 0.45 < mixer.conv_weight.abs().max() <= 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": None}, "must be 6 letters of M"),
        ({"pattern": "M-M*-"}, "must be 6 letters of M .*, got 'M-M"),
        ({"pattern": "M-ME-M"}, "must be 6 letters of M"),
        ({"mamba": None}, "needs the field mamba"),
        (
            {"mamba": MambaConfig(heads=8, head_dim=16, groups=3, state=16, chunk=16)},
            "groups=3 does not divide heads=8",
        ),
        ({"mamba": MambaConfig(heads=8, head_dim=16, groups=2, state=16, chunk=0)}, "chunk=0: must be at least 1"),
        ({"rope": RopeConfig()}, "needs rope: null"),
        ({"gated": True}, "needs rope: null and gated: false"),
        ({"tied_embeddings": True}, "tied_embeddings=true"),
        ({"experts": MoEConfig(count=4, top_k=2, ffn=8)}, "experts"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
    ],
)
def test_unsupported_fields_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(replace(MODEL, **change))
