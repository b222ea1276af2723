"""MLA: plain torch against attention over expanded keys; the kernels against plain torch: op_cases/attention.py."""

import pytest
import torch
import torch.nn.functional as F
from op_cases.attention import mla_padded
from torch import Tensor

from llmb.errors import ConfigError
from llmb.ops.attention.mla_attention import MlaCache, mla_attention, mla_prefill_attention, mla_rope_and_cache
from llmb.ops.device_capabilities import DeviceCapabilities
from llmb.ops.quant.activation_quant import E4M3

pytest.importorskip("triton")
from llmb.ops.attention.mla_attention_triton import num_mla_splits, tile_channels, tile_sizes

RANK, ROPE, BLOCK, SCALE = 20, 8, 16, 0.3


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert (actual.cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_latent_is_key_and_value_of_every_head() -> None:
    arguments, _ = mla_padded(torch.Generator(), torch.device("cpu"), [(3, 21)], 2, None, scale=0.5)
    q_latent, q_rope, cache, metadata, scale = arguments
    actual = mla_attention.reference(*arguments)
    blocks = metadata.block_table_PM[0].long()
    latents_TR = cache.latents_BLR[blocks].flatten(0, 1)[:21] * 0.5
    k_TD = torch.cat((latents_TR, cache.keys_BLK[blocks].flatten(0, 1)[:21]), dim=-1)
    for query, seen in enumerate((19, 20, 21)):
        q_HD = torch.cat((q_latent[query], q_rope[query]), dim=-1)
        assert_near(actual[query], ((q_HD @ k_TD[:seen].T) * scale).softmax(-1) @ latents_TR[:seen])


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (E4M3, 1.0), (E4M3, 0.5)])
def test_rope_norm_and_cache_write(dtype: torch.dtype, scale: float) -> None:
    tokens, heads, nope, eps = 5, 19, 4, 1e-6
    q, latent, key, norm = normal(tokens, heads, nope + ROPE), normal(tokens, RANK), normal(tokens, ROPE), normal(RANK)
    norm[0] = 1e4  # beyond what e4m3 holds
    angles = torch.rand(tokens, ROPE // 2) * 100
    slots = torch.tensor([7, -1, 0, 40, 33])
    cache = MlaCache(normal(3, BLOCK, RANK).to(dtype), normal(3, BLOCK, ROPE), scale)
    before = [x.float().flatten(0, 1) for x in (cache.latents_BLR.clone(), cache.keys_BLK.clone())]
    actual = q.clone()
    mla_rope_and_cache.reference(actual, latent, key, norm, eps, angles.cos(), angles.sin(), cache, slots)

    def rope(pairs: Tensor, angle: Tensor) -> Tensor:
        rotated = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones(()), angle)
        return torch.cat((rotated.real, rotated.imag), dim=-1)

    assert_near(actual[..., nope:], rope(q[..., nope:], angles[:, None]))
    assert actual[..., :nope].equal(q[..., :nope])
    latents, keys = (x.float().flatten(0, 1) for x in (cache.latents_BLR, cache.keys_BLK))
    normed = F.rms_norm(latent, (RANK,), norm, eps) / scale
    quantized = normed.clamp(-448, 448).to(dtype).float() if dtype == E4M3 else normed
    cached = [0, 2, 3, 4]
    near = 2**-9 if dtype == E4M3 else 1e-5 * quantized.abs().max()
    assert ((latents[slots[cached]] - quantized[cached]).abs() <= near).all()
    assert_near(keys[slots[cached]], rope(key, angles)[cached])
    untouched = [slot for slot in range(48) if slot not in slots]
    assert latents[untouched].equal(before[0][untouched])
    assert keys[untouched].equal(before[1][untouched])


@pytest.mark.parametrize(("count", "length"), [(1, 1), (5, 5), (33, 70), (64, 65), (40, 1000)])
def test_prefill_queries_see_all_earlier_tokens(count: int, length: int) -> None:
    nope, value, heads = 24, 20, 3
    q, kv, keys = normal(count, heads, nope + ROPE), normal(length, heads, nope + value), normal(length, ROPE)
    expected = mla_prefill_attention.reference(q, kv, keys, SCALE)
    k = torch.cat((kv[:, 1, :nope], keys), dim=-1)
    first = ((q[0, 1] @ k[: length - count + 1].T) * SCALE).softmax(-1) @ kv[: length - count + 1, 1, nope:]
    assert_near(expected[0, 1], first)


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


@pytest.mark.parametrize(
    ("compute", "shared_kib", "quantized", "expected"),
    [
        ((9, 0), 227, False, (64, 64)),
        ((9, 0), 227, True, (64, 64)),
        ((10, 0), 227, False, (64, 32)),
        ((10, 3), 227, True, (64, 64)),
        ((8, 0), 163, False, (64, 64)),
        ((8, 9), 99, True, (64, 16)),
        ((12, 0), 99, False, (64, 16)),
    ],
)
def test_a_tile_of_deepseek_fits_shared_memory(
    compute: tuple[int, int], shared_kib: int, quantized: bool, expected: tuple[int, int]
) -> None:
    channels = tile_channels(DeviceCapabilities(compute=compute), 512 + 64, quantized)
    assert tile_sizes(torch.bfloat16, 128, 64, *channels, shared_kib << 10) == expected


def test_a_tile_is_within_a_block() -> None:
    assert tile_sizes(torch.bfloat16, 128, 64) == (64, 64)
    assert tile_sizes(torch.bfloat16, 128, 96) == (64, 32)
    assert tile_sizes(torch.bfloat16, 16, 128) == (16, 64)
    assert tile_sizes(torch.float32, 128, 64) == (16, 16)
    with pytest.raises(ConfigError, match=r"block_tokens=24.*multiple of 16"):
        tile_sizes(torch.bfloat16, 128, 24)
