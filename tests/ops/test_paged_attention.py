"""Paged attention: any split of a sequence into steps and blocks equals plain attention; padding, fp8 caches."""

import pytest
import torch
from op_cases.attention import BLOCK_TOKENS, HEAD_DIM, HEADS, KV_HEADS, MIXED, SCALE, kv_cache, paged, step
from torch import Generator, Tensor

from llmb.models.blocks import causal_attention
from llmb.ops.attention.paged_attention import KvCache, paged_attention, rope_and_cache
from llmb.ops.device_capabilities import DeviceCapabilities

CPU = torch.device("cpu")


def empty_cache(
    blocks: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, device: torch.device = CPU
) -> KvCache:
    shapes = ((blocks, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), (blocks, KV_HEADS, HEAD_DIM, BLOCK_TOKENS))
    return KvCache(*(torch.full(shape, 7.0, device=device).to(dtype) for shape in shapes), scale, scale)


def random_qkv(tokens: int, seed: int) -> Tensor:
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    table = positions[:, None] * torch.linspace(1.0, 0.01, HEAD_DIM // 2)
    return table.cos(), table.sin()


def run_in_steps(steps: list[int], blocks: list[int], cache: KvCache, qkv: Tensor, softcap: float | None) -> Tensor:
    """Run a sequence through the cache in steps of so many tokens."""
    out, first = [], 0
    for count in steps:
        metadata, slots = step(Generator(), CPU, ((first, count),), table=torch.tensor([blocks]))
        rows = qkv[first : first + count].clone()
        cos, sin = angles(torch.arange(first, first + count))
        q, k, v = rope_and_cache.reference(rows, cos, sin, cache, slots)
        out.append(paged_attention.reference(q, k, v, cache, metadata, SCALE, softcap))
        first += count
    return torch.cat(out)


@pytest.mark.parametrize("steps", [[40], [1] * 40, [17, 1, 1, 21], [16, 16, 8]])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_any_split_into_steps_equals_plain_attention(steps, softcap):
    qkv = random_qkv(40, seed=1)
    stepped = run_in_steps(steps, [5, 0, 3], empty_cache(6), qkv, softcap)
    q, k, v = rope_and_cache.reference(qkv, *angles(torch.arange(40)), empty_cache(3), torch.arange(40))
    plain = causal_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), softcap=softcap)[0].transpose(0, 1)
    torch.testing.assert_close(stepped, plain, rtol=1e-4, atol=1e-5)


def test_padding_neither_reads_nor_writes(device):
    """A padded decode: slot -1, length 0, a block table without valid blocks."""
    metadata, _ = step(Generator(), device, ((20, 1), (0, 1)), table=torch.tensor([[4, 1], [10**6, 10**6]]))
    metadata.seq_lens_P[1] = 0
    cache = empty_cache(6, device=device)
    before = cache.keys_BGLD.clone(), cache.values_BGDL.clone()
    q, k, v = rope_and_cache.triton(
        random_qkv(2, 7).to(device), None, None, cache, torch.tensor([-1, -1], device=device)
    )
    paged_attention.triton(q, k, v, cache, metadata, SCALE, None)
    torch.testing.assert_close((cache.keys_BGLD, cache.values_BGDL), before)


def test_fp8_cache_is_quantized_with_its_scale():
    metadata, slots = step(Generator(), CPU, ((0, 20),), table=torch.tensor([[1, 0]]))
    cache = empty_cache(2, torch.float8_e4m3fn, scale=0.5)
    qkv = random_qkv(20, seed=8)
    q, k, v = rope_and_cache.reference(qkv, None, None, cache, slots)
    quantized = [(x * 2).to(torch.float8_e4m3fn).float() / 2 for x in (k, v)]
    plain = causal_attention(*(x.transpose(0, 1)[None] for x in (q, *quantized)))[0].transpose(0, 1)
    torch.testing.assert_close(paged_attention.reference(q, k, v, cache, metadata, SCALE), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_blocks_before_the_window_are_never_read(device, implementation):
    """The serving engine frees them: here they are named by the table, and all their values are NaN."""
    sequences, window, generator = ((41, 1), (62, 1), (35, 20)), 9, Generator().manual_seed(2)
    metadata, slots = step(generator, device, sequences)
    cache = kv_cache(generator, device)
    for row, (first, _) in enumerate(sequences):
        freed = metadata.block_table_PM[row, : max(0, first - window + 1) // BLOCK_TOKENS].long()
        assert len(freed) > 0
        cache.keys_BGLD[freed], cache.values_BGDL[freed] = float("nan"), float("nan")
    qkv = rope_and_cache.reference(random_qkv(len(slots), 3).to(device), None, None, cache, slots)
    attend = getattr(paged_attention, implementation)
    assert attend(*qkv, cache, metadata, SCALE, None, window).isfinite().all()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "stages"),
    [(128, torch.float8_e4m3fn, 3), (64, torch.bfloat16, 3), (128, torch.bfloat16, 2), (256, torch.float32, 2)],
)
def test_decode_holds_two_tiles_of_small_caches_only(head_dim: int, dtype: torch.dtype, stages: int) -> None:
    """Two tiles of 256 fp32 channels, 256 KiB, are more than the shared memory of any GPU."""
    decode_stages = pytest.importorskip("llmb.ops.attention.paged_attention_triton").decode_stages
    keys_BGLD = torch.empty(1, 1, 64, head_dim, dtype=dtype)
    assert decode_stages(KvCache(keys_BGLD, keys_BGLD.transpose(2, 3))) == stages


@pytest.mark.parametrize(
    ("compute", "shared_kib", "tiles"),
    [
        ((8, 0), 163, ((128, 3), (64, 2))),
        ((8, 9), 99, ((128, 3), (64, 1))),
        ((9, 0), 227, ((128, 3), (64, 2))),
        ((12, 0), 99, ((128, 3), (64, 1))),
    ],
)
def test_prefill_tiles_fit_shared_memory(
    compute: tuple[int, int], shared_kib: int, tiles: tuple[tuple[int, int], ...]
) -> None:
    """Heads of 128 have the same tile everywhere, those of 256 one that fits."""
    kernels = pytest.importorskip("llmb.ops.attention.paged_attention_triton")
    gpu = DeviceCapabilities(compute=compute, shared_memory_bytes=shared_kib << 10)
    assert tuple(kernels.prefill_tile(head_dim, 64, 2, gpu) for head_dim in (128, 256)) == tiles


def test_small_prefill_tiles_compute_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of a chunk, as GPUs with little shared memory have."""
    kernels = pytest.importorskip("llmb.ops.attention.paged_attention_triton")
    monkeypatch.setattr(kernels, "PREFILL_TILES", ((16, 1),))
    args, _ = paged(Generator().manual_seed(0), device, MIXED, 2.0, window=9)
    torch.testing.assert_close(paged_attention.triton(*args), paged_attention.reference(*args), rtol=0, atol=2e-5)
