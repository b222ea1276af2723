"""Served MLA equals the network's for any chunking and head sharding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import deepseek_model
from step_inputs import step_inputs
from torch import Tensor

from llmb.config.model import MlaConfig, Model, MoEConfig, RopeConfig
from llmb.models.architectures import build_model
from llmb.models.blocks import rope_table
from llmb.models.mla import MLAAttention
from llmb.ops.quant.activation_quant import E4M3, quantize_activation
from llmb.serve.layers import served_mla
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_mla import PagedMla
from llmb.serve.layers.served_model import ServingDtypes, build_served_model
from llmb.serve.rank_groups import RankGroup, RankGroups
from llmb.serve.weights.weight_source import RandomWeights

CPU = torch.device("cpu")
SEED, LENGTH, TEXTS = 3, 23, 3
LATENT = MlaConfig(q_rank=24, kv_rank=20, nope_dim=16, rope_dim=8, value_dim=12)
MODEL = deepseek_model(
    name="small",
    layers=3,
    hidden=48,
    ffn=80,
    head_dim=16,
    vocab=97,
    rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=256, mscale_all_dim=1.0),
    experts=MoEConfig(count=8, top_k=3, ffn=24, shared=1, dense_layers=1, groups=4, top_groups=2, score="sigmoid"),
)
ATTENTION = "layers.1.attention"


def weights_of(model: Model) -> RandomWeights:
    return RandomWeights(model, SEED, torch.float32, CPU)


def mixer_of(
    model: Model, format: Format = "plain", kv_dtype: torch.dtype = torch.float32, group: RankGroup | None = None
) -> PagedMla:
    return PagedMla(weights_of(model), ATTENTION, model, format, torch.float32, kv_dtype, group or RankGroup())


def plain_attention(model: Model) -> MLAAttention:
    network = build_model(model)
    network.init_weights(SEED)
    return network.get_submodule(ATTENTION)


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def computed(plain: MLAAttention, model: Model, x_BTC: Tensor) -> Tensor:
    table = rope_table(model.rope, model.mla.rope_dim, torch.arange(x_BTC.shape[1]))
    with torch.no_grad():
        return plain(x_BTC, *table)


@dataclass(frozen=True)
class Steps:
    """Steps over several texts: each step has the next chunk of some of them."""

    block_tokens: int
    blocks: Sequence[Sequence[int]]  # of each text
    counts: Sequence[Sequence[int]]  # of each step, for each text
    padding: int = 0

    def served(self, mixer: PagedMla, x_BTC: Tensor) -> Tensor:
        """Return the output of each token, [B, T, C]."""
        most = 1 + max(block for blocks in self.blocks for block in blocks)
        mixer.allocate(most, self.block_tokens, slots=1, device=CPU)
        done, out_BTC = [0] * len(x_BTC), torch.full_like(x_BTC, torch.nan)
        for counts in self.counts:
            chunks = [(text, min(count, x_BTC.shape[1] - done[text])) for text, count in enumerate(counts)]
            chunks = sorted((chunk for chunk in chunks if chunk[1]), key=lambda chunk: chunk[1] > 1)
            if chunks:
                self._step(mixer, x_BTC, chunks, done, out_BTC)
        assert all(num_done == x_BTC.shape[1] for num_done in done)
        return out_BTC

    def _step(self, mixer: PagedMla, x_BTC: Tensor, chunks: list, done: list[int], out_BTC: Tensor) -> None:
        parts = [(0, self.blocks[text], done[text], count) for text, count in chunks]
        inputs = step_inputs(parts, self.block_tokens, self.padding)
        cos_ND, sin_ND = rope_table(MODEL.rope, LATENT.rope_dim, inputs.positions_N)
        x_NC = torch.zeros(len(inputs.positions_N), x_BTC.shape[-1])
        rows = inputs.cu_seqlens_P1[:-1][inputs.seq_lens_P > 0].tolist()
        for row, (text, count) in zip(rows, chunks, strict=True):
            x_NC[row : row + count] = x_BTC[text, done[text] : done[text] + count]
        out_NC = mixer(quantize_activation(x_NC, mixer.input_format), replace(inputs, cos_ND=cos_ND, sin_ND=sin_ND))
        for row, (text, count) in zip(rows, chunks, strict=True):
            out_BTC[text, done[text] : done[text] + count] = out_NC[row : row + count]
            done[text] += count


def steps_of_parts() -> st.SearchStrategy[Steps]:
    @st.composite
    def draw_steps(draw: st.DrawFn) -> Steps:
        block_tokens = draw(st.sampled_from([1, 3, 8, 32]))
        each = -(-LENGTH // block_tokens)
        order = draw(st.permutations(range(TEXTS * each)))
        counts = draw(st.lists(st.lists(st.sampled_from([0, 1, 1, 4, 11]), min_size=TEXTS, max_size=TEXTS), max_size=8))
        last_step = [[LENGTH] * TEXTS]
        blocks = [order[text * each : (text + 1) * each] for text in range(TEXTS)]
        return Steps(block_tokens, blocks, counts + last_step, padding=draw(st.sampled_from([0, 2])))

    return draw_steps()


ONE_BY_ONE = Steps(8, [(4, 0, 2), (1, 3, 6), (5, 8, 7)], [[1] * TEXTS] * LENGTH)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(steps=steps_of_parts(), expanded_from=st.sampled_from([2, 5, 256]))
def test_any_chunking_and_blocks_equal_the_network(steps: Steps, expanded_from: int) -> None:
    """Whichever later chunks are expanded."""
    x_BTC = normal(TEXTS, LENGTH, MODEL.hidden)
    expected = computed(plain_attention(MODEL), MODEL, x_BTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_mla, "MIN_EXPANDED_CHUNK", expanded_from)
        actual = steps.served(mixer_of(MODEL), x_BTC)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "steps", [ONE_BY_ONE, replace(ONE_BY_ONE, counts=[[LENGTH - 2] * TEXTS, [1] * TEXTS, [1] * TEXTS])]
)
def test_head_shards_sum_to_the_whole(steps: Steps) -> None:
    x_BTC = normal(TEXTS, LENGTH, MODEL.hidden)
    halves = [mixer_of(MODEL, group=RankGroup(index, 2)) for index in range(2)]  # a plain RankGroup reduces nothing
    parts = [steps.served(half, x_BTC) for half in halves]
    expected = computed(plain_attention(MODEL), MODEL, x_BTC)
    assert (sum(parts) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert parts[0].ne(expected).any()
    assert halves[0].bytes_per_token == mixer_of(MODEL).bytes_per_token, "the cache is whole on every rank"


@pytest.mark.parametrize("steps", [ONE_BY_ONE, replace(ONE_BY_ONE, counts=[[9, 1, 4], [LENGTH] * TEXTS])])
def test_fp8_cache_quantizes_only_latents(steps: Steps) -> None:
    x_BTC = normal(TEXTS, LENGTH, MODEL.hidden)
    plain = plain_attention(MODEL)
    plain.kv_norm.register_forward_hook(lambda module, args, out: out.to(E4M3).float())
    actual = steps.served(mixer_of(MODEL, kv_dtype=E4M3), x_BTC)
    expected = computed(plain, MODEL, x_BTC)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("kv_dtype", "expected"), [(torch.float32, 28 * 4), (torch.bfloat16, 28 * 2), (E4M3, 20 + 8 * 4)]
)
def test_bytes_per_token_equal_allocation(kv_dtype: torch.dtype, expected: int) -> None:
    mixer = mixer_of(MODEL, kv_dtype=kv_dtype)
    mixer.allocate(blocks=5, block_tokens=8, slots=1, device=CPU)
    assert mixer.cache is not None
    assert mixer.bytes_per_token == expected
    assert mixer.cache.latents_BLR.nbytes + mixer.cache.keys_BLK.nbytes == 5 * 8 * expected
    assert mixer.bytes_per_slot == 0


def test_linears_are_quantized_but_not_kv_up() -> None:
    model = replace(MODEL, hidden=128, mla=replace(LATENT, q_rank=128, kv_rank=120, value_dim=32), heads=4, kv_heads=4)
    mixer = mixer_of(model, "fp8_channel")
    assert (mixer.input_format, mixer.q_up.input_format, mixer.o.input_format) == ("per_token",) * 3
    assert mixer.kv_up_HWR.dtype == torch.float32
    x_BTC = normal(TEXTS, LENGTH, model.hidden)
    expected = computed(plain_attention(model), model, x_BTC)
    error = (ONE_BY_ONE.served(mixer, x_BTC) - expected).norm() / expected.norm()
    assert 0.001 < error < 0.1


def test_served_deepseek_logits_equal_the_network() -> None:
    network = build_model(MODEL)
    network.init_weights(SEED)
    served_model = build_served_model(
        MODEL, weights_of(MODEL), ServingDtypes(torch.float32, "plain", torch.float32), RankGroups(CPU)
    )
    for mixer in served_model.mixers():
        mixer.allocate(4, 8, 1, CPU)
    tokens_T = torch.randint(0, MODEL.vocab, (LENGTH,), generator=torch.Generator().manual_seed(1))
    parts, blocks = ((0, 9), (9, 1), (10, 7), (17, 6)), (3, 0, 2)
    outputs = []
    for start, count in parts:
        inputs = step_inputs([(0, blocks, start, count)], 8)
        x_NC = served_model.forward(served_model.embed(tokens_T[start : start + count]), inputs)
        outputs.append(served_model.logits(x_NC, torch.arange(count)))
    with torch.no_grad():
        expected = network(tokens_T[None])[0]
    assert (torch.cat(outputs) - expected).abs().max() <= 1e-4 * expected.abs().max()
