"""Triton kernel that applies RoPE to queries and keys and writes keys and values to the cache, token by token."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.dependent_launch import pdl_options, pdl_wait


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr", "cos_ptr", "sin_ptr"])
def _rope_and_cache(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    slot_mapping_ptr,
    inv_key_scale,
    inv_value_scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_wait(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    row = qkv_ptr + token * (H + 2 * G) * D
    slot = tl.load(slot_mapping_ptr + token)
    block, offset = slot // L, slot % L
    if HAS_ROPE:
        half = tl.arange(0, D // 2)
        h = tl.arange(0, HEADS)
        cos = tl.load(cos_ptr + token * (D // 2) + half)[None, :]
        sin = tl.load(sin_ptr + token * (D // 2) + half)[None, :]
        low = h[:, None] * D + half[None, :]
        valid = (h < H + G)[:, None]
        x = tl.load(row + low, mask=valid, other=0.0)
        y = tl.load(row + low + D // 2, mask=valid, other=0.0)
        first = (x.to(tl.float32) * cos - y.to(tl.float32) * sin).to(x.dtype)
        second = (y.to(tl.float32) * cos + x.to(tl.float32) * sin).to(x.dtype)
        tl.store(row + low, first, mask=valid)
        tl.store(row + low + D // 2, second, mask=valid)
        cached = valid & (h >= H)[:, None] & (slot >= 0)
        dst = keys_ptr + ((block * G + h[:, None] - H) * L + offset) * D + half[None, :]
        tl.store(dst, (first.to(tl.float32) * inv_key_scale).to(keys_ptr.dtype.element_ty), mask=cached)
        tl.store(dst + D // 2, (second.to(tl.float32) * inv_key_scale).to(keys_ptr.dtype.element_ty), mask=cached)
    g = tl.arange(0, KV_HEADS)
    d = tl.arange(0, D)
    cached = (g < G)[:, None] & (slot >= 0)
    if not HAS_ROPE:
        k = tl.load(row + (H + g)[:, None] * D + d[None, :], mask=cached, other=0.0).to(tl.float32)
        dst = keys_ptr + ((block * G + g[:, None]) * L + offset) * D + d[None, :]
        tl.store(dst, (k * inv_key_scale).to(keys_ptr.dtype.element_ty), mask=cached)
    v = tl.load(row + (H + G + g)[:, None] * D + d[None, :], mask=cached, other=0.0).to(tl.float32)
    dst = values_ptr + ((block * G + g[:, None]) * D + d[None, :]) * L + offset
    tl.store(dst, (v * inv_value_scale).to(values_ptr.dtype.element_ty), mask=cached)


def rope_and_cache_triton(
    qkv_NW: Tensor, cos_ND: Tensor | None, sin_ND: Tensor | None, cache: KvCache, slot_mapping_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rope_and_cache`, in place: returns views of `qkv_NW`."""
    heads_NXD = qkv_NW.unflatten(-1, (-1, cache.head_dim))
    n, g = qkv_NW.shape[0], cache.kv_heads
    h = heads_NXD.shape[1] - 2 * g
    if n:
        _rope_and_cache[(n,)](
            qkv_NW, cos_ND, sin_ND, cache.keys_BGLD, cache.values_BGDL, slot_mapping_N,
            1 / cache.key_scale, 1 / cache.value_scale,
            H=h, G=g, D=cache.head_dim, L=cache.block_tokens, HEADS=triton.next_power_of_2(h + g),
            KV_HEADS=triton.next_power_of_2(g), HAS_ROPE=cos_ND is not None, num_warps=4,
            **pdl_options(n),
        )  # fmt: skip
    q_NHD, k_NGD, v_NGD = heads_NXD.split((h, g, g), dim=1)
    return q_NHD, k_NGD, v_NGD
