"""The skinny path of small decode batches equals the usual path, with and without Triton kernels."""

from dataclasses import replace

import pytest
import torch
from nightly_cases import by_turns
from small_models import llama_model
from step_inputs import step_inputs
from torch import Tensor
from triton_interpreter import force_kernels, interpreter  # noqa: F401  # fixtures

from llmb.config.model import Model, MoEConfig
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import ServedModel, ServingDtypes, build_served_model
from llmb.serve.rank_groups import RankGroup, RankGroups
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import RandomWeights

CPU = torch.device("cpu")
LLAMA = llama_model(name="llama", hidden=64, ffn=96, vocab=33)
GROK = replace(
    LLAMA,
    name="grok1",
    architecture="grok1",
    activation="gelu",
    post_norms=True,
    attn_logit_softcap=30.0,
    experts=MoEConfig(count=4, top_k=2, ffn=32),
)
BLOCKS = ([3, 5, 1, 7], [2, 6], [4], [8, 9, 10])
LENGTHS = (50, 17, 1, 40)  # with the token of the step


def small_model(model: Model, format: Format = "plain") -> ServedModel:
    """Build a model whose KV cache is filled with random numbers."""
    weights = RandomWeights(model, 3, torch.float32, CPU)
    served_model = build_served_model(
        model, weights, ServingDtypes(torch.float32, format, torch.float32), RankGroups(CPU)
    )
    generator = torch.Generator().manual_seed(1)
    for mixer in served_model.mixers():
        mixer.allocate(12, 16, 5, CPU)
        if mixer.bytes_per_token:
            mixer.cache.keys_BGLD.normal_(generator=generator)  # type: ignore[attr-defined]
            mixer.cache.values_BGDL.normal_(generator=generator)  # type: ignore[attr-defined]
    return served_model


def decode_inputs(count: int, padding: int = 0) -> StepInputs:
    chunks = [(slot, BLOCKS[slot], LENGTHS[slot] - 1, 1) for slot in range(count)]
    return step_inputs(chunks, 16, padding)


def logits(served_model: ServedModel, tokens: list[int], inputs: StepInputs) -> Tensor:
    x_NC = served_model.forward(served_model.embed(torch.tensor(tokens)), inputs)
    return served_model.logits(x_NC, torch.arange(len(tokens)))


@pytest.fixture
def skinny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the skinny path as on a GPU."""
    monkeypatch.setattr("llmb.serve.layers.served_model.takes_skinny_gemm", lambda x: 0 < len(x) <= 4)


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch, force_kernels: None) -> None:  # noqa: F811
    monkeypatch.setattr("llmb.ops.attention.decode_attention_triton.num_kv_splits", lambda *_: 4)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "kernels"), by_turns(((3, 1), (1, 0)), (True, False)))
def test_skinny_path_equals_the_usual_path(step, kernels, request):
    count, padding = step
    tokens, inputs = [5, 17, 30, 32][: count + padding], decode_inputs(count, padding)
    slow, fast = small_model(LLAMA), small_model(LLAMA)
    expected = logits(slow, tokens, inputs)
    request.getfixturevalue("skinny")
    if kernels:
        request.getfixturevalue("by_triton")
    torch.testing.assert_close(logits(fast, tokens, inputs)[:count], expected[:count], rtol=1e-4, atol=1e-4)
    for actual, reference in zip(fast.blocks[::2], slow.blocks[::2], strict=True):
        for of in ("keys_BGLD", "values_BGDL"):
            torch.testing.assert_close(
                getattr(actual.mixer.cache, of), getattr(reference.mixer.cache, of), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_fp8_weights_with_unquantized_activations(format, skinny):
    """Only the weights are quantized."""
    inputs, tokens = decode_inputs(2), [5, 17]
    actual = logits(small_model(LLAMA, format), tokens, inputs)
    exact = logits(small_model(LLAMA), tokens, inputs)
    assert 0.0 < ((actual - exact).norm() / exact.norm()).item() < 0.05


def test_blocks_without_skinny_path(skinny):
    """Models with post-norms, and formats without a skinny gemm."""
    assert all(block.skinny_mixer is None for block in small_model(GROK).blocks)
    assert all(
        block.skinny_mixer is None for block in small_model(replace(LLAMA, hidden=128, ffn=128), "fp8_block").blocks
    )
    assert all(block.skinny_mixer is block.mixer for block in small_model(LLAMA, "fp8_channel").blocks)


def test_mixed_skinny_and_usual_blocks(skinny):
    """Attention has a skinny path, experts have none."""
    mixed = replace(LLAMA, architecture="grok1", experts=MoEConfig(count=4, top_k=2, ffn=32))
    inputs, tokens = decode_inputs(3), [5, 17, 30]
    served_model = small_model(mixed)
    assert [block.skinny_mixer is not None for block in served_model.blocks] == [True, False, True, False]
    actual = logits(served_model, tokens, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmb.serve.layers.served_model.takes_skinny_gemm", lambda _: False)
        expected = logits(small_model(mixed), tokens, inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_prefill_chunk_takes_the_usual_path(skinny, monkeypatch):
    monkeypatch.setattr("llmb.serve.layers.gqa.decode_attention", None)
    inputs = step_inputs([(0, BLOCKS[0], 0, 3)], 16)
    assert logits(small_model(LLAMA), [1, 2, 3], inputs).shape == (3, 33)


def test_tensor_parallel_ranks_add_the_residual_once(skinny):
    """The outputs of two ranks, as an all-reduce would sum them."""
    weights = RandomWeights(LLAMA, 3, torch.float32, CPU)
    dtypes, inputs = ServingDtypes(torch.float32, "plain", torch.float32), decode_inputs(2)
    residual = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))

    def output(group: RankGroup) -> Tensor:
        block = build_served_model(LLAMA, weights, dtypes, RankGroups(CPU, tp=group)).blocks[
            1
        ]  # the MLP, which needs no cache
        return replace(small_model(LLAMA), blocks=[block]).forward(residual, inputs)

    whole = output(RankGroup())
    torch.testing.assert_close(output(RankGroup(0, 2)) + output(RankGroup(1, 2)), whole, rtol=1e-4, atol=1e-4)
