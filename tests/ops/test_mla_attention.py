"""MLA: plain torch against attention over expanded keys, and the kernels against plain torch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.errors import ConfigError
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.mla_attention import (
    MlaCache,
    mla_attention,
    mla_prefill_attention,
    mla_rope_and_cache,
)
from llmb.ops.quant.activation_quant import E4M3

pytest.importorskip("triton")
from llmb.ops.attention.mla_attention_triton import num_mla_splits, tile_sizes

RANK, ROPE, BLOCK, SCALE = 20, 8, 16, 0.3


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def cache_of(blocks: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, block: int = BLOCK) -> MlaCache:
    return MlaCache(normal(blocks, block, RANK).to(dtype), normal(blocks, block, ROPE), scale)


def metadata_of(sequences: list[tuple[int, int]], decodes: int = 0, block: int = BLOCK) -> AttentionMetadata:
    """Return metadata of sequences of (count, length), with shuffled blocks."""
    counts, lengths = zip(*sequences, strict=True)
    max_blocks = max(1, *(-(-length // block) for length in lengths))
    order = torch.randperm(len(sequences) * max_blocks, generator=torch.Generator().manual_seed(max_blocks))
    return AttentionMetadata(
        cu_seqlens_P1=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens_P=torch.tensor(lengths).int(),
        block_table_PM=order.view(len(sequences), max_blocks).int(),
        num_decodes=decodes,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
    )


def queries(metadata: AttentionMetadata, heads: int) -> tuple[Tensor, Tensor]:
    """Return queries strided as in the mixer: latents transposed, the RoPE part a slice."""
    tokens = int(metadata.cu_seqlens_P1[-1])
    return normal(heads, tokens, RANK).transpose(0, 1), normal(tokens, heads, ROPE + 3)[..., 3:]


def moved(device: torch.device, cache: MlaCache, metadata: AttentionMetadata, *tensors: Tensor) -> tuple:
    """Move to where kernels run, with strides as they are."""
    tensor_fields = {name: getattr(metadata, name) for name in ("cu_seqlens_P1", "seq_lens_P", "block_table_PM")}
    cache = replace(cache, latents_BLR=cache.latents_BLR.to(device), keys_BLK=cache.keys_BLK.to(device))
    return (
        *(x.to(device) for x in tensors),
        cache,
        replace(metadata, **{n: t.to(device) for n, t in tensor_fields.items()}),
    )


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert (actual.cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()


def has_lost_carry(actual: Tensor, expected: Tensor) -> Tensor:
    """Find where Triton's interpreter loses the carry as e4m3 rounds up to a power of two; GPUs do not (tests/gpu)."""
    return (expected.abs().frexp().mantissa == 0.5) & (actual == expected / 2)


def test_latent_is_key_and_value_of_every_head() -> None:
    metadata, cache = metadata_of([(3, 21)]), cache_of(2, scale=0.5)
    q_latent, q_rope = queries(metadata, heads=2)
    actual = mla_attention.reference(q_latent, q_rope, cache, metadata, SCALE)
    blocks = metadata.block_table_PM[0].long()
    latents_TR = cache.latents_BLR[blocks].flatten(0, 1)[:21] * 0.5
    k_TD = torch.cat((latents_TR, cache.keys_BLK[blocks].flatten(0, 1)[:21]), dim=-1)
    for query, seen in enumerate((19, 20, 21)):
        q_HD = torch.cat((q_latent[query], q_rope[query]), dim=-1)
        assert_near(actual[query], ((q_HD @ k_TD[:seen].T) * SCALE).softmax(-1) @ latents_TR[:seen])


@pytest.mark.slow
@settings(
    max_examples=10, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinking takes minutes
@given(
    sequences=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=3),
    heads=st.sampled_from([1, 3, 8]),
    splits=st.sampled_from([None, 1, 2, 3, 7]),
)
def test_kernels_equal_the_reference(
    device: torch.device, sequences: list[tuple[int, int]], heads: int, splits: int | None
) -> None:
    """Chunks with and without history; padding has a token and no length; more splits than there is context."""
    metadata = metadata_of([(count, history + count if history else 0) for count, history in sequences])
    cache = cache_of(metadata.block_table_PM.numel())
    q_latent, q_rope = queries(metadata, heads)
    expected = mla_attention.reference(q_latent, q_rope, cache, metadata, SCALE)
    actual = mla_attention.triton(*moved(device, cache, metadata, q_latent, q_rope), SCALE, splits)
    assert_near(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("max_seq_len", [80, 4096])
def test_decodes_equal_the_reference_whatever_max_seq_len_is(
    device: torch.device, splits: int, max_seq_len: int
) -> None:
    metadata = replace(
        metadata_of([(1, 80), (1, 1), (1, 0), (1, 16), (1, 33), (0, 0)], decodes=6), max_seq_len=max_seq_len
    )
    cache = cache_of(metadata.block_table_PM.numel())
    q_latent, q_rope = queries(metadata, heads=24)
    expected = mla_attention.reference(q_latent, q_rope, cache, metadata, SCALE)
    actual = mla_attention.triton(*moved(device, cache, metadata, q_latent, q_rope), SCALE, splits)
    assert_near(actual, expected)
    assert actual[2].eq(0).all(), "padding"


@pytest.mark.parametrize("splits", [1, 2])
def test_kernels_scale_fp8_latents(device: torch.device, splits: int) -> None:
    metadata = metadata_of([(1, 37), (4, 20)])
    cache = cache_of(metadata.block_table_PM.numel(), E4M3, scale=0.25, block=48)
    q_latent, q_rope = queries(metadata, heads=4)
    expected = mla_attention.reference(q_latent, q_rope, cache, metadata, SCALE)
    actual = mla_attention.triton(*moved(device, cache, metadata, q_latent, q_rope), SCALE, splits)
    assert_near(actual, expected)


def test_kernels_never_read_beyond_a_sequence(device: torch.device) -> None:
    metadata = metadata_of([(1, 21), (2, 5)])
    metadata = replace(metadata, block_table_PM=torch.tensor([[2, 0], [3, 10**8]], dtype=torch.int32))
    cache = cache_of(4)
    cache.latents_BLR[0, 5:], cache.keys_BLK[3, 5:], cache.latents_BLR[1] = torch.nan, torch.nan, torch.nan
    q_latent, q_rope = queries(metadata, heads=4)
    expected = mla_attention.reference(q_latent, q_rope, cache, metadata, SCALE)
    assert expected.isfinite().all()
    actual = mla_attention.triton(*moved(device, cache, metadata, q_latent, q_rope), SCALE, 2)
    assert_near(actual, expected)


@pytest.mark.parametrize("write", [mla_rope_and_cache.reference, mla_rope_and_cache.triton])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (E4M3, 1.0), (E4M3, 0.5)])
def test_rope_norm_and_cache_write(device: torch.device, write, dtype: torch.dtype, scale: float) -> None:
    tokens, heads, nope, eps = 5, 19, 4, 1e-6
    down, q, norm = normal(tokens, 3 + RANK + ROPE), normal(tokens, heads, nope + ROPE), 1 + normal(RANK) / 2
    norm[0] = 1e4  # beyond what e4m3 holds
    angles = torch.rand(tokens, ROPE // 2) * 100
    slots = torch.tensor([7, -1, 0, 40, 33])
    cache = cache_of(3, dtype, scale)
    before = cache.latents_BLR.float().clone(), cache.keys_BLK.clone()
    _, latent, key = down.to(device).split((3, RANK, ROPE), dim=-1)
    moved_cache = replace(cache, latents_BLR=cache.latents_BLR.to(device), keys_BLK=cache.keys_BLK.to(device))
    actual = q.clone().to(device)
    operands = (norm.to(device), eps, angles.cos().to(device), angles.sin().to(device), moved_cache, slots.to(device))
    write(actual, latent, key, *operands)

    def rope(pairs: Tensor, angle: Tensor) -> Tensor:
        rotated = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones(()), angle)
        return torch.cat((rotated.real, rotated.imag), dim=-1)

    assert_near(actual[..., nope:], rope(q[..., nope:], angles[:, None]))
    assert actual[..., :nope].cpu().equal(q[..., :nope])
    latents, keys = (x.flatten(0, 1).cpu() for x in (moved_cache.latents_BLR.float(), moved_cache.keys_BLK))
    normed = F.rms_norm(latent.cpu(), (RANK,), norm, eps) / scale
    quantized = normed.clamp(-448, 448).to(dtype).float() if dtype == E4M3 else normed
    cached = [0, 2, 3, 4]
    near = (latents[slots[cached]] - quantized[cached]).abs() <= (
        2**-9 if dtype == E4M3 else 1e-5 * quantized.abs().max()
    )
    assert (near | has_lost_carry(latents[slots[cached]], quantized[cached])).all()
    assert_near(keys[slots[cached]], rope(key.cpu(), angles)[cached])
    untouched = [slot for slot in range(48) if slot not in slots]
    assert latents[untouched].equal(before[0].flatten(0, 1)[untouched])
    assert keys[untouched].equal(before[1].flatten(0, 1)[untouched])


@pytest.mark.slow
@pytest.mark.parametrize(("count", "length"), [(1, 1), (5, 5), (33, 70), (64, 65), (40, 1000)])
def test_prefill_queries_see_all_earlier_tokens(device: torch.device, count: int, length: int) -> None:
    nope, value, heads = 24, 20, 3
    q, kv, keys = normal(count, heads, nope + ROPE), normal(length, heads, nope + value), normal(length, ROPE)
    expected = mla_prefill_attention.reference(q, kv, keys, SCALE)
    k = torch.cat((kv[:, 1, :nope], keys), dim=-1)
    first = ((q[0, 1] @ k[: length - count + 1].T) * SCALE).softmax(-1) @ kv[: length - count + 1, 1, nope:]
    assert_near(expected[0, 1], first)
    assert_near(mla_prefill_attention.triton(q.to(device), kv.to(device), keys.to(device), SCALE), expected)


@pytest.mark.parametrize(
    ("programs", "tiles", "expected"),
    [
        (2, 16, 16),  # one sequence: every tile of its context by itself
        (128, 16, 1),  # as many programs as fit
        (512, 32, 1),
        (68, 64, 3),  # half the GPU: thirds take two waves, halves two as well
        (2, 2048, 64),  # a long context: one wave of even splits
    ],
)
def test_splits_fill_a_gpu_of_132_multiprocessors(programs: int, tiles: int, expected: int) -> None:
    assert num_mla_splits(programs, tiles, 132) == expected


def test_a_tile_is_within_a_block() -> None:
    assert tile_sizes(torch.bfloat16, 128, 64) == (64, 64)
    assert tile_sizes(torch.bfloat16, 128, 96) == (64, 32)
    assert tile_sizes(torch.bfloat16, 16, 128) == (16, 64)
    assert tile_sizes(torch.float32, 128, 64) == (16, 16)
    with pytest.raises(ConfigError, match=r"block_tokens=24.*multiple of 16"):
        tile_sizes(torch.bfloat16, 128, 24)
