"""Steps of a handful of tokens go a way of their own through a stack: it comes to the same, kernels and all."""

from dataclasses import replace

import pytest
import torch
from steps import step_inputs
from torch import Tensor
from triton_interpreter import interpreter  # noqa: F401  # a fixture

from llmb.config.spec import Experts, Model
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import How, Stack, build_stack
from llmb.serve.rank_groups import Group, Ranks
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import RandomWeights

CPU = torch.device("cpu")
LLAMA = Model(
    name="llama", architecture="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=33
)
GROK = replace(
    LLAMA,
    name="grok1",
    architecture="grok1",
    activation="gelu",
    post_norms=True,
    attention_cap=30.0,
    experts=Experts(count=4, top_k=2, ffn=32),
)
BLOCKS = ([3, 5, 1, 7], [2, 6], [4], [8, 9, 10])
LENGTHS = (50, 17, 1, 40)  # with the token of the step


def small(model: Model, format: Format = "plain") -> Stack:
    """With a cache in which older tokens lie already."""
    weights = RandomWeights(model, 3, torch.float32, CPU)
    stack = build_stack(model, weights, How(torch.float32, format, torch.float32), Ranks(CPU))
    generator = torch.Generator().manual_seed(1)
    for mixer in stack.mixers():
        mixer.allocate(12, 16, 5, CPU)
        if mixer.bytes_per_token:
            mixer.cache.keys_BGLD.normal_(generator=generator)  # type: ignore[attr-defined]
            mixer.cache.values_BGDL.normal_(generator=generator)  # type: ignore[attr-defined]
    return stack


def generating(count: int, padding: int = 0) -> Inputs:
    pieces = [(slot, BLOCKS[slot], LENGTHS[slot] - 1, 1) for slot in range(count)]
    return step_inputs(pieces, 16, padding)


def logits(stack: Stack, tokens: list[int], inputs: Inputs) -> Tensor:
    through = stack.through(stack.embed(torch.tensor(tokens)), inputs)
    return stack.logits(through, torch.arange(len(tokens)))


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tensors were on a GPU."""
    monkeypatch.setattr("llmb.serve.layers.served_model.is_thin", lambda x: 0 < len(x) <= 4)


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:  # noqa: F811
    for module in ("gemm.skinny_gemm", "attention.decode_attention"):
        monkeypatch.setattr(f"llmb.ops.{module}.takes_triton", lambda _: True)
    monkeypatch.setattr("llmb.ops.attention.decode_attention_triton.shares_of", lambda *_: 4)


@pytest.mark.parametrize(("count", "padding"), [(1, 0), (3, 1)])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_llama_comes_to_the_same(count, padding, kernels, request):
    tokens, inputs = [5, 17, 30, 32][: count + padding], generating(count, padding)
    slow, fast = small(LLAMA), small(LLAMA)
    usual = logits(slow, tokens, inputs)
    request.getfixturevalue("thin")
    if kernels:
        request.getfixturevalue("by_triton")
    torch.testing.assert_close(logits(fast, tokens, inputs)[:count], usual[:count], rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(fast.blocks[::2], slow.blocks[::2], strict=True):
        for of in ("keys_BGLD", "values_BGDL"):
            torch.testing.assert_close(
                getattr(ours.mixer.cache, of), getattr(theirs.mixer.cache, of), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_8_bit_weights_meet_plain_activations(format, thin):
    """Between the stack whose weights were not rounded and the one that rounds activations too."""
    inputs, tokens = generating(2), [5, 17]
    found = logits(small(LLAMA, format), tokens, inputs)
    exact = logits(small(LLAMA), tokens, inputs)
    assert 0.0 < ((found - exact).norm() / exact.norm()).item() < 0.05


def test_blocks_without_a_thin_way_take_the_usual_one(thin):
    """A model with norms of what its blocks add, and formats that thin products do not know."""
    assert all(block.thin is None for block in small(GROK).blocks)
    assert all(block.thin is None for block in small(replace(LLAMA, hidden=128, ffn=128), "fp8_block").blocks)
    assert all(block.thin is block.mixer for block in small(LLAMA, "fp8_channel").blocks)


def test_thin_and_usual_blocks_follow_one_another(thin):
    """Attention thin, experts not: the stream passes between them."""
    mixed = replace(LLAMA, architecture="grok1", experts=Experts(count=4, top_k=2, ffn=32))
    inputs, tokens = generating(3), [5, 17, 30]
    stack = small(mixed)
    assert [block.thin is not None for block in stack.blocks] == [True, False, True, False]
    found = logits(stack, tokens, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmb.serve.layers.served_model.is_thin", lambda _: False)
        usual = logits(small(mixed), tokens, inputs)
    torch.testing.assert_close(found, usual, rtol=1e-4, atol=1e-4)


def test_a_chunk_of_a_prompt_goes_the_usual_way(thin, monkeypatch):
    monkeypatch.setattr("llmb.serve.layers.gqa.thin_attention", None)
    inputs = step_inputs([(0, BLOCKS[0], 0, 3)], 16)
    assert logits(small(LLAMA), [1, 2, 3], inputs).shape == (3, 33)


def test_ranks_that_share_a_block_add_the_stream_once(thin):
    """Two ranks' parts, as a sum over them would add them up."""
    weights = RandomWeights(LLAMA, 3, torch.float32, CPU)
    how, inputs = How(torch.float32, "plain", torch.float32), generating(2)
    stream = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))

    def given(group: Group) -> Tensor:
        block = build_stack(LLAMA, weights, how, Ranks(CPU, dense=group)).blocks[1]  # an MLP, which needs no cache
        return replace(small(LLAMA), blocks=[block]).through(stream, inputs)

    whole = given(Group())
    torch.testing.assert_close(given(Group(0, 2)) + given(Group(1, 2)), whole, rtol=1e-4, atol=1e-4)
