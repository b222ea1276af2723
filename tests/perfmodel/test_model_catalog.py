"""The catalog of published shapes: every entry builds, and its FLOPs are those that its authors print."""

import pytest

from llmb.errors import UnknownName
from llmb.perfmodel.flops import train_flops_per_sequence
from llmb.perfmodel.params import active_parameters, parameters
from llmb.perfmodel.shapes.model_catalog import catalog_names, find_model
from llmb.perfmodel.step_time.predictor import model_flops
from llmb.perfmodel.step_time.step_setup import StepSetup

# Billions of parameters in the model's name or card; tied embeddings count once.
SIZES = {
    "gpt3-175b": 175, "llama2-7b": 6.74, "llama2-13b": 13.0, "llama2-70b": 69.0, "llama3.1-405b": 405.9,
    "llama4-scout-109b": 107.8, "llama4-maverick-400b": 400.7, "mistral-7b": 7.24, "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6, "nemotron4-15b": 15.6, "nemotron4-340b": 341, "nemotron3-nano-30b-a3b": 31.6,
    "nemotron3-ultra-550b-a55b": 550,
    "qwen2.5-7b": 7.62, "qwen2.5-72b": 72.7, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    "glm-4.5-air": 106.9, "kimi-k2-1t": 1026, "deepseek-v3-671b": 671, "grok1-314b": 315.7,
    "gemma-2-9b": 9.24, "gemma-2-27b": 27.2, "gemma-3-12b": 11.77, "gemma-3-27b": 27.0, "phi-4": 14.66,
    "qwen3-next-80b-a3b": 79.7, "qwen3.5-9b": 8.95, "qwen3.5-27b": 26.9, "qwen3.5-35b-a3b": 34.7,
    "qwen3.5-122b-a10b": 122.1, "qwen3.5-397b-a17b": 396.3, "kimi-linear-48b-a3b": 49.1,
    "deepseek-v3.2-685b": 671.9, "glm-5-744b": 743.9,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), SIZES.items())
def test_parameters_are_the_published_ones(name, billions):
    assert parameters(find_model(name).model) / 1e9 == pytest.approx(billions, rel=0.005)


def test_every_entry_builds_a_model():
    for name in set(catalog_names().values()):
        model = find_model(name).model
        assert 0 < active_parameters(model) <= parameters(model)


@pytest.mark.parametrize(
    ("name", "seqlen", "gflops"),
    [("qwen3-30b-a3b", 4096, 23.0), ("qwen3-235b-a22b", 4096, 148), ("kimi-k2-1t", 4096, 204)],
)
def test_flops_per_token_are_those_of_the_authors(name, seqlen, gflops):
    flops = train_flops_per_sequence(find_model(name).model, seqlen, "causal") / seqlen
    assert flops / 1e9 == pytest.approx(gflops, rel=0.005)


def test_nemotron_3_ultra_has_the_published_active_weights_and_flops():
    """55 billion without the embedding; 363 GFLOP/token with two passes of MTP."""
    shape = find_model("nemotron3-ultra", "550b-a55b")
    model = shape.model
    assert (active_parameters(model) - model.vocab * model.hidden) / 1e9 == pytest.approx(55, rel=0.01)
    step = StepSetup(shape=shape, gpu="gb300", gpus=1, dtype="bf16", seqlen=8192, mbs=1, gbs=1)
    assert model_flops(step) / step.seqlen / 1e9 == pytest.approx(363, rel=0.01)


def test_names_are_found_by_family_and_size_in_any_spelling():
    assert find_model("llama3", "70b") is find_model("llama3.1-70b")
    assert find_model("Qwen3-8B").model.layers == 36
    assert find_model("gpt_oss_120b").window == 128
    assert find_model("kimi-k2", "1t").model.mla is not None


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownName, match="did you mean mixtral-8x7b"):
        find_model("mixtral-8x6b")
