"""A served Nemotron-H equals the network for any chunking and batching."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import nemotron_h_model
from step_inputs import step_inputs
from torch import Tensor

from llmb.config.model import MambaConfig, Model
from llmb.models.architectures import Network, build_model
from llmb.models.nemotron_h import NemotronH
from llmb.ops.quant.activation_quant import quantize_activation
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_mamba import ServedMamba
from llmb.serve.layers.served_model import ServedModel, ServingDtypes, build_served_model
from llmb.serve.rank_groups import RankGroup, RankGroups
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import RandomWeights

CPU = torch.device("cpu")
SEED, BLOCK_TOKENS, BLOCKS, SLOTS = 3, 4, 40, 4
MODEL = nemotron_h_model(
    name="small",
    hidden=48,
    ffn=80,
    head_dim=16,
    vocab=97,
    pattern="M-M*-M",
    mamba=MambaConfig(heads=8, head_dim=12, groups=2, state=10, chunk=8),
)
LENGTH = 21


@dataclass(frozen=True)
class Text:
    """A sequence with its slot and blocks, and the logits of the network."""

    slot: int
    blocks: Sequence[int]
    tokens_T: Tensor
    logits_TV: Tensor


@pytest.fixture(scope="module")
def network() -> Network:
    network = build_model(MODEL)
    network.init_weights(SEED)
    return network


def weights_of(model: Model) -> RandomWeights:
    return RandomWeights(model, SEED, torch.float32, CPU)


def allocated(served_model: ServedModel) -> ServedModel:
    for mixer in served_model.mixers():
        mixer.allocate(BLOCKS, BLOCK_TOKENS, SLOTS, CPU)
    return served_model


@pytest.fixture(scope="module")
def served_model() -> ServedModel:
    return allocated(
        build_served_model(
            MODEL, weights_of(MODEL), ServingDtypes(torch.float32, "plain", torch.float32), RankGroups(CPU)
        )
    )


@pytest.fixture(scope="module")
def texts(network: Network) -> list[Text]:
    """Return one text for each slot, and one more that reuses the first slot."""
    generator = torch.Generator().manual_seed(7)
    tokens_BT = torch.randint(0, MODEL.vocab, (SLOTS + 1, LENGTH), generator=generator)
    with torch.no_grad():
        logits_BTV = network(tokens_BT)
    blocks = [range(first, BLOCKS, SLOTS + 1) for first in range(SLOTS + 1)]
    return [Text(i % SLOTS, blocks[i], tokens_BT[i], logits_BTV[i]) for i in range(SLOTS + 1)]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def take_step(served_model: ServedModel, chunks: Sequence[tuple[Text, int, int]], padding: int = 0) -> None:
    """Compute (text, start, count) chunks in one step; every token's logits must equal the network's."""
    chunks = sorted(chunks, key=lambda chunk: chunk[2] != 1)  # those with one token come first
    inputs = step_inputs(
        [(text.slot, text.blocks, start, count) for text, start, count in chunks], BLOCK_TOKENS, padding
    )
    num_decodes = sum(count == 1 for _, _, count in chunks)
    ranges = [slice(start, start + count) for _, start, count in chunks]
    tokens = [text.tokens_T[positions] for (text, _, _), positions in zip(chunks, ranges, strict=True)]
    tokens.insert(num_decodes, torch.zeros(padding, dtype=torch.int64))
    with torch.no_grad():
        x_NC = served_model.forward(served_model.embed(torch.cat(tokens)), inputs)
        logits_NV = served_model.logits(x_NC, torch.arange(len(x_NC)))
    logits_without_padding = torch.cat((logits_NV[:num_decodes], logits_NV[num_decodes + padding :]))
    assert_near(
        logits_without_padding,
        torch.cat([text.logits_TV[positions] for (text, _, _), positions in zip(chunks, ranges, strict=True)]),
    )


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(1, LENGTH), min_size=1, max_size=LENGTH), padding=st.integers(0, 2))
def test_any_chunking_of_a_prompt(
    served_model: ServedModel, texts: list[Text], counts: list[int], padding: int
) -> None:
    start = 0
    for count in [*counts, LENGTH]:
        count = min(count, LENGTH - start)
        if count:
            take_step(served_model, [(texts[0], start, count)], padding)
        start += count


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.tuples(*[st.sampled_from((0, 1, 1, 3, 8, 13))] * (SLOTS + 1)), max_size=20),
    padding=st.integers(0, 2),
)
def test_any_batching(served_model: ServedModel, texts: list[Text], steps: list[tuple[int, ...]], padding: int) -> None:
    """Texts advance by any counts; the last one starts in the slot of the first when that is done."""
    done = [0] * len(texts)
    remaining = (LENGTH,) * len(texts)
    for step_counts in [*steps, remaining, remaining]:
        left = [LENGTH - count for count in done]
        if left[0]:
            left[SLOTS] = 0
        counts = [min(pair) for pair in zip(step_counts, left, strict=True)]
        chunks = [chunk for chunk in zip(texts, done, counts, strict=True) if chunk[2]]
        done = [sum(pair) for pair in zip(done, counts, strict=True)]
        if chunks:
            take_step(served_model, chunks, padding)
    assert min(done) == LENGTH


def test_decodes_beside_prefill(served_model: ServedModel, texts: list[Text]) -> None:
    first, second = texts[:2]
    take_step(served_model, [(first, 0, 17)])
    take_step(served_model, [(first, 17, 1), (second, 0, 9)])
    take_step(served_model, [(first, 18, 1), (second, 9, 11)])
    take_step(served_model, [(first, 19, 1), (second, 20, 1)], padding=2)
    take_step(served_model, [(texts[SLOTS], 0, 1)])  # in the slot of the first, with a prompt of one token
    take_step(served_model, [(texts[SLOTS], 1, 1)])


def mixer_of(model: Model, group: RankGroup, format: Format = "plain") -> ServedMamba:
    mixer = ServedMamba(weights_of(model), "layers.0.mixer", model, format, torch.float32, group)
    mixer.allocate(0, BLOCK_TOKENS, SLOTS, CPU)
    return mixer


@pytest.mark.parametrize("conv", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_shards_of_a_mixer_sum_to_the_whole(conv: int, parts: int) -> None:
    """Prefill chunks, then decodes, of one mixer and of two shards, against the mixer of training."""
    assert MODEL.mamba is not None
    model = replace(MODEL, mamba=replace(MODEL.mamba, conv=conv))
    network = NemotronH(model)
    network.init_weights(SEED)
    x_TC = torch.randn(LENGTH, model.hidden, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = network.get_submodule("layers.0.mixer")(x_TC[None])[0]
    mixer_shards = [mixer_of(model, RankGroup(index, parts)) for index in range(parts)]
    outputs = torch.cat(
        [torch.stack([mixer_shard(x, inputs) for mixer_shard in mixer_shards]).sum(0) for x, inputs in steps_of(x_TC)]
    )
    assert_near(outputs, expected)


def steps_of(x_TC: Tensor) -> list[tuple[Tensor, StepInputs]]:
    """Return the steps of one sequence: chunks, one of a single token, then decodes."""
    cuts = [0, 2, 3, 13, 19, 20, LENGTH]
    return [
        (x_TC[begin:end], step_inputs([(1, (0,), begin, end - begin)], LENGTH, decodes=int(begin >= 19)))
        for begin, end in pairwise(cuts)
    ]


def test_padding_keeps_state_and_gives_zero() -> None:
    mixer = mixer_of(MODEL, RankGroup())
    assert mixer.state is not None
    for tensor in mixer.state:
        tensor.fill_(3.0)
    inputs = step_inputs([], BLOCK_TOKENS, padding=3)
    assert not mixer(torch.randn(3, MODEL.hidden), inputs).any()
    assert all((tensor == 3.0).all() for tensor in mixer.state)


def test_tokens_of_no_sequence_give_zero() -> None:
    mixer = mixer_of(MODEL, RankGroup())
    inputs = step_inputs([(0, (0, 1), 0, 5)], BLOCK_TOKENS)
    x_NC = torch.randn(8, MODEL.hidden)
    padded = mixer(x_NC, inputs)
    assert not padded[5:].any()
    torch.testing.assert_close(padded[:5], mixer(x_NC[:5], inputs))
    assert mixer(x_NC[:0], step_inputs([], BLOCK_TOKENS)).shape == (0, MODEL.hidden)


@pytest.mark.parametrize("parts", [1, 2])
def test_bytes_per_slot_equal_allocation(parts: int) -> None:
    mixer = mixer_of(MODEL, RankGroup(0, parts))
    assert mixer.state is not None
    assert mixer.bytes_per_token == 0
    assert mixer.bytes_per_slot * SLOTS == sum(tensor.nbytes for tensor in mixer.state)


def test_fp8_projections_are_close() -> None:
    plain, rounded = mixer_of(MODEL, RankGroup()), mixer_of(MODEL, RankGroup(), "fp8_channel")
    x_TC = torch.randn(LENGTH, MODEL.hidden, generator=torch.Generator().manual_seed(2))
    for x, inputs in steps_of(x_TC):
        expected, actual = plain(x, inputs), rounded(quantize_activation(x, rounded.input_format), inputs)
        assert 0 < (actual - expected).norm() / expected.norm() < 0.08
