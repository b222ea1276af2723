"""Initial weights: what writes to the residual stream is scaled down with depth; Mamba as published."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_models import SMALL_MODELS, deepseek_model, grok1_model, llama_model, nemotron_h_model

from llmb.config.model import MambaConfig
from llmb.models.architectures import build_model
from llmb.models.decoder import INIT_STD
from llmb.models.mamba2 import MambaMixer
from llmb.serve.weights.weight_source import RandomWeights

WIDTHS = {"hidden": 128, "ffn": 256, "vocab": 512}
MODELS = {  # wide enough for a standard deviation to a few percent, and of several depths
    "llama": llama_model(layers=8, **WIDTHS),
    "grok1": grok1_model(layers=6, **WIDTHS),
    "deepseek": deepseek_model(layers=5, **WIDTHS),
    "nemotron_h": nemotron_h_model("M-M*-M*-", **WIDTHS),
}
RESIDUAL_OUTPUTS = (".o.weight", "mlp.down.weight", "shared.down.weight", "mixer.down.weight", ".outward.weight")


@pytest.mark.parametrize("architecture", MODELS)
def test_every_residual_output_is_scaled_by_depth(architecture):
    """A transformer layer adds to the residual stream twice, a layer of a hybrid once."""
    model = MODELS[architecture]
    adds = model.layers if architecture == "nemotron_h" else 2 * model.layers
    network = build_model(model)
    network.init_weights(1)
    outputs = 0
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1 or "conv" in name or name == "embedding.weight":
            continue
        std = parameter.std().item() if parameter.numel() > 4000 else None
        is_output = name.endswith(RESIDUAL_OUTPUTS)
        outputs += is_output
        if std is not None:
            assert std == pytest.approx(INIT_STD / math.sqrt(adds) if is_output else INIT_STD, rel=0.06), name
    experts = sum("shared.down" in name for name, _ in network.named_parameters())
    assert outputs == adds + experts


@pytest.mark.parametrize("architecture", SMALL_MODELS)
def test_served_random_weights_are_those_of_training(architecture):
    model = SMALL_MODELS[architecture]
    network, served = build_model(model), RandomWeights(model, 7, torch.float32, torch.device("cpu"))
    network.init_weights(7)
    assert all(torch.equal(served.load(name), parameter) for name, parameter in network.named_parameters())


def test_mamba_parameters_are_initialized_as_published():
    network = build_model(nemotron_h_model(mamba=MambaConfig(heads=512, head_dim=4, groups=2, state=4, chunk=8)))
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
