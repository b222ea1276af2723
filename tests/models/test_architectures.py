"""What holds for networks of every architecture: causality, initial weights, sizes and names of their tensors."""

import math

import pytest
import torch
from small_models import SMALL_MODELS
from test_hf_parity import MODELS

from llmb.config.recipe import load_all, shipped
from llmb.config.spec import Model
from llmb.models.architectures import ARCHITECTURES, Network, build_model
from llmb.perfmodel import params

PUBLISHED = [recipe.model(size) for recipe in load_all([shipped()]).values() for size in recipe.sizes]


def network_of(name: str) -> Network:
    network = build_model(SMALL_MODELS[name])
    network.init_weights(1)
    return network


def test_every_architecture_has_a_small_and_a_published_model() -> None:
    assert SMALL_MODELS.keys() == ARCHITECTURES.keys() == {model.architecture for model in PUBLISHED}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_network_is_causal(name: str) -> None:
    network, tokens = network_of(name), torch.arange(40)[None]
    later = tokens.clone()
    later[0, 25] = 99
    change = (network(tokens) - network(later)).abs().amax(-1)[0]
    assert change[:25].max() == 0
    assert change[25:].min() > 0


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_initial_weights_depend_on_the_seed_and_initial_loss_is_log_vocab(name: str) -> None:
    network, second = network_of(name), network_of(name)
    assert all(torch.equal(weight, second.state_dict()[key]) for key, weight in network.state_dict().items())
    second.init_weights(2)
    assert not torch.equal(second.embedding.weight, network.embedding.weight)
    tokens = torch.arange(90)[None]
    loss = network(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(SMALL_MODELS[name].vocab), rel=0.05)  # with auxiliary losses


@pytest.mark.parametrize("model", [*SMALL_MODELS.values(), *MODELS, *PUBLISHED], ids=lambda model: model.name)
def test_parameter_count_matches_the_cost_model_and_every_tensor_has_a_hf_name(model: Model) -> None:
    with torch.device("meta"):
        network = build_model(model)
    assert sum(tensor.numel() for tensor in network.state_dict().values()) == params.parameters(model)
    names = network.hf_names(model)
    assert names.keys() == network.state_dict().keys()
    assert len(set(names.values())) == len(names)
