"""Dense architectures against `transformers`: logits, loss, every gradient, greedy serving, weights saved and read."""

from pathlib import Path

import pytest
import torch
from dense_cases import DENSE_CASES, NIGHTLY_CASES
from model_table import BEGIN, END, model_table
from small_served import config_of, engine_for, serve, served_model_for
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmb.config.huggingface.dense_models import DENSE_MODELS
from llmb.config.huggingface.hf_config import load_hf_config, to_hf_config
from llmb.config.model import Model
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights, save_weights
from llmb.perfmodel.params import parameters
from llmb.perfmodel.shards import layer_weights
from llmb.serve.request import Request

TOLERANCE = 1e-4  # relative to the largest value of each tensor, fp32
TOKENS = 24  # of a sequence to train
PROMPTS, OUTPUT = (23, 3), 8  # tokens; the first prompt is longer than every window

cases = pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            model,
            marks=[pytest.mark.nightly] if model.name in NIGHTLY_CASES else [],
            id=f"{model.architecture} {model.name}",
        )
        for model in DENSE_CASES
    ],
)


def reference_network(model: Model) -> PreTrainedModel:
    """Return the network of `transformers` with weights so large that every tensor matters."""
    config = AutoConfig.for_model(**to_hf_config(model))
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(5)
    offset = 1.0 - DENSE_MODELS[model.architecture].norm_offset
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            values = torch.randn(tensor.shape, generator=generator) * 0.2
            tensor.copy_(values + offset if "norm" in name else values)
    return network.eval()


def assert_near(actual: Tensor, expected: Tensor, label: str) -> None:
    assert expected.abs().max() > 0, f"{label}: nothing is compared"
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error < TOLERANCE, f"{label}: {error:.1e}"


def test_every_dense_architecture_has_a_case() -> None:
    assert {model.architecture for model in DENSE_CASES} == set(DENSE_MODELS)


@cases
def test_training_and_serving_match_transformers(model: Model, tmp_path: Path) -> None:
    reference, folder = reference_network(model), tmp_path / "weights"
    reference.save_pretrained(folder)
    network = build_model(load_hf_config(folder))
    load_weights(network, folder)
    assert parameters(model) == sum(parameter.numel() for parameter in network.parameters())
    sizes = sum(parameter.numel() for parameter in network.layers[0].parameters())
    assert sum(weight.size for weight in layer_weights(model, 0)) == sizes

    tokens = torch.randint(model.vocab, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = reference(inputs, use_cache=False).logits
    assert_near(network(inputs), logits, "logits")
    loss, expected_loss = network(inputs, labels), torch.nn.functional.cross_entropy(logits.mT, labels)
    assert_near(loss, expected_loss, "loss")
    loss.backward()
    expected_loss.backward()
    _compare_gradients(network, reference, tmp_path / "gradients")

    save_weights(network, tmp_path / "saved", torch.float32)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    _compare_serving(model, saved, folder)


def _compare_gradients(network: torch.nn.Module, reference: PreTrainedModel, folder: Path) -> None:
    """Compare in our names: the reference's gradients are loaded as weights would be."""
    weights = {name: parameter.data for name, parameter in reference.named_parameters()}
    for parameter in reference.parameters():
        parameter.data = parameter.grad
    reference.save_pretrained(folder)
    gradients = build_model(network.model)
    load_weights(gradients, folder)
    offset = DENSE_MODELS[network.model.architecture].norm_offset
    for (name, parameter), grad in zip(network.named_parameters(), gradients.parameters(), strict=True):
        is_offset = offset if "norm" in name else 0.0
        assert_near(parameter.grad, grad.detach() - is_offset, name)
    for name, parameter in reference.named_parameters():
        parameter.data = weights[name]


def _compare_serving(model: Model, reference: PreTrainedModel, folder: Path) -> None:
    """Serve prompts in chunks of a few tokens, together."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(model.vocab, (count,), generator=generator).tolist() for count in PROMPTS]
    settings = {"max_new_tokens": OUTPUT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    served = served_model_for(config_of(model, folder), context_tokens=max(PROMPTS) + OUTPUT)
    engine = engine_for(served, 32, block_tokens=4, max_num_tokens=9)
    requests = [
        Request(request_id=number, prompt=tuple(prompt), max_tokens=OUTPUT) for number, prompt in enumerate(prompts)
    ]
    outputs = serve(engine, requests).tokens()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :]
        assert list(output) == expected.tolist()


def test_the_documented_table_is_the_one_of_these_cases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    documented = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert documented == model_table(), "python tests/model_table.py prints the new table"
