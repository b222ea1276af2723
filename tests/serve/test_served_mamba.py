"""A served Nemotron-H gives what the network gives, however its tokens are cut into steps and whoever is beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import step_inputs
from torch import Tensor

from llmb.config.spec import Mamba, Model
from llmb.models.architectures import Network, build_model
from llmb.models.nemotron_h import NemotronH
from llmb.ops.quant.activation_quant import in_form
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_mamba import StatefulMamba
from llmb.serve.layers.served_model import How, Stack, build_stack
from llmb.serve.rank_groups import Group, Ranks
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import RandomWeights

CPU = torch.device("cpu")
SEED, BLOCK_TOKENS, BLOCKS, SLOTS = 3, 4, 40, 4
MODEL = Model(
    name="small",
    architecture="nemotron_h",
    layers=6,
    hidden=48,
    ffn=80,
    gated=False,
    activation="squared_relu",
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=97,
    rope=None,
    pattern="M-M*-M",
    mamba=Mamba(heads=8, head_dim=12, groups=2, state=10, chunk=8),
)
LENGTH = 21


@dataclass(frozen=True)
class Text:
    """A sequence with the place it has, and what the network says of each of its tokens."""

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


def allocated(stack: Stack) -> Stack:
    for mixer in stack.mixers():
        mixer.allocate(BLOCKS, BLOCK_TOKENS, SLOTS, CPU)
    return stack


@pytest.fixture(scope="module")
def stack() -> Stack:
    return allocated(build_stack(MODEL, weights_of(MODEL), How(torch.float32, "plain", torch.float32), Ranks(CPU)))


@pytest.fixture(scope="module")
def texts(network: Network) -> list[Text]:
    """One for each slot, and one more that has the slot of the first."""
    generator = torch.Generator().manual_seed(7)
    tokens_BT = torch.randint(0, MODEL.vocab, (SLOTS + 1, LENGTH), generator=generator)
    with torch.no_grad():
        logits_BTV = network(tokens_BT)
    blocks = [range(first, BLOCKS, SLOTS + 1) for first in range(SLOTS + 1)]
    return [Text(i % SLOTS, blocks[i], tokens_BT[i], logits_BTV[i]) for i in range(SLOTS + 1)]


def assert_near(ours: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == wanted.shape
    assert (ours - wanted).abs().max() <= tolerance * wanted.abs().max()


def take_step(stack: Stack, pieces: Sequence[tuple[Text, int, int]], padding: int = 0) -> None:
    """Compute (text, start, count) together; every token's logits must be those of the network."""
    pieces = sorted(pieces, key=lambda piece: piece[2] != 1)  # those with one token come first
    inputs = step_inputs(
        [(text.slot, text.blocks, start, count) for text, start, count in pieces], BLOCK_TOKENS, padding
    )
    ones = sum(count == 1 for _, _, count in pieces)
    spans = [slice(start, start + count) for _, start, count in pieces]
    tokens = [text.tokens_T[span] for (text, _, _), span in zip(pieces, spans, strict=True)]
    tokens.insert(ones, torch.zeros(padding, dtype=torch.int64))
    with torch.no_grad():
        x_NC = stack.through(stack.embed(torch.cat(tokens)), inputs)
        logits_NV = stack.logits(x_NC, torch.arange(len(x_NC)))
    kept = torch.cat((logits_NV[:ones], logits_NV[ones + padding :]))
    assert_near(kept, torch.cat([text.logits_TV[span] for (text, _, _), span in zip(pieces, spans, strict=True)]))


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(1, LENGTH), min_size=1, max_size=LENGTH), padding=st.integers(0, 2))
def test_any_cut_of_a_prompt(stack: Stack, texts: list[Text], counts: list[int], padding: int) -> None:
    start = 0
    for count in [*counts, LENGTH]:
        count = min(count, LENGTH - start)
        if count:
            take_step(stack, [(texts[0], start, count)], padding)
        start += count


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.tuples(*[st.sampled_from((0, 1, 1, 3, 8, 13))] * (SLOTS + 1)), max_size=20),
    padding=st.integers(0, 2),
)
def test_any_company(stack: Stack, texts: list[Text], steps: list[tuple[int, ...]], padding: int) -> None:
    """All go on as they like, some not at all in a step; the last begins in the slot of the first when that is done."""
    done = [0] * len(texts)
    rest = (LENGTH,) * len(texts)
    for wished in [*steps, rest, rest]:
        left = [LENGTH - count for count in done]
        if left[0]:
            left[SLOTS] = 0
        counts = [min(pair) for pair in zip(wished, left, strict=True)]
        pieces = [piece for piece in zip(texts, done, counts, strict=True) if piece[2]]
        done = [sum(pair) for pair in zip(done, counts, strict=True)]
        if pieces:
            take_step(stack, pieces, padding)
    assert min(done) == LENGTH


def test_decodes_after_a_prompt_beside_another_prompt(stack: Stack, texts: list[Text]) -> None:
    first, second = texts[:2]
    take_step(stack, [(first, 0, 17)])
    take_step(stack, [(first, 17, 1), (second, 0, 9)])
    take_step(stack, [(first, 18, 1), (second, 9, 11)])
    take_step(stack, [(first, 19, 1), (second, 20, 1)], padding=2)
    take_step(stack, [(texts[SLOTS], 0, 1)])  # in the slot of the first, with a prompt of one token
    take_step(stack, [(texts[SLOTS], 1, 1)])


def mixer_of(model: Model, group: Group, format: Format = "plain") -> StatefulMamba:
    mixer = StatefulMamba(weights_of(model), "layers.0.mixer", model, format, torch.float32, group)
    mixer.allocate(0, BLOCK_TOKENS, SLOTS, CPU)
    return mixer


@pytest.mark.parametrize("conv", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_shares_of_a_mixer_add_up_to_it(conv: int, parts: int) -> None:
    """Chunks and then decodes of one mixer, and of two that have a group each, against the mixer of training."""
    assert MODEL.mamba is not None
    model = replace(MODEL, mamba=replace(MODEL.mamba, conv=conv))
    network = NemotronH(model)
    network.init_weights(SEED)
    x_TC = torch.randn(LENGTH, model.hidden, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = network.get_submodule("layers.0.mixer")(x_TC[None])[0]
    shares = [mixer_of(model, Group(index, parts)) for index in range(parts)]
    made = torch.cat([torch.stack([share(x, inputs) for share in shares]).sum(0) for x, inputs in pieces_of(x_TC)])
    assert_near(made, wanted)


def pieces_of(x_TC: Tensor) -> list[tuple[Tensor, Inputs]]:
    """Steps of one sequence: chunks, one of them of a single token, then decodes."""
    cuts = [0, 2, 3, 13, 19, 20, LENGTH]
    return [
        (x_TC[begin:end], step_inputs([(1, (0,), begin, end - begin)], LENGTH, decodes=int(begin >= 19)))
        for begin, end in pairwise(cuts)
    ]


def test_padding_changes_no_state_and_gives_zero() -> None:
    mixer = mixer_of(MODEL, Group())
    assert mixer.state is not None
    for one in mixer.state:
        one.fill_(3.0)
    inputs = step_inputs([], BLOCK_TOKENS, padding=3)
    assert not mixer(torch.randn(3, MODEL.hidden), inputs).any()
    assert all((one == 3.0).all() for one in mixer.state)


def test_tokens_of_no_part_give_zero() -> None:
    mixer = mixer_of(MODEL, Group())
    inputs = step_inputs([(0, (0, 1), 0, 5)], BLOCK_TOKENS)
    x_NC = torch.randn(8, MODEL.hidden)
    padded = mixer(x_NC, inputs)
    assert not padded[5:].any()
    torch.testing.assert_close(padded[:5], mixer(x_NC[:5], inputs))
    assert mixer(x_NC[:0], step_inputs([], BLOCK_TOKENS)).shape == (0, MODEL.hidden)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_slot_has_the_bytes_that_are_allocated_for_it(parts: int) -> None:
    mixer = mixer_of(MODEL, Group(0, parts))
    assert mixer.state is not None
    assert mixer.bytes_per_token == 0
    assert mixer.bytes_per_slot * SLOTS == sum(one.nbytes for one in mixer.state)


def test_projections_in_8_bits_stay_near_the_plain_ones() -> None:
    plain, rounded = mixer_of(MODEL, Group()), mixer_of(MODEL, Group(), "fp8_channel")
    x_TC = torch.randn(LENGTH, MODEL.hidden, generator=torch.Generator().manual_seed(2))
    for x, inputs in pieces_of(x_TC):
        wanted, ours = plain(x, inputs), rounded(in_form(x, rounded.form), inputs)
        assert 0 < (ours - wanted).norm() / wanted.norm() < 0.08
