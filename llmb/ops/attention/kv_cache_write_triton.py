"""Triton kernel that norms queries and keys, applies RoPE and writes keys and values to the cache, token by token."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.paged_attention import HeadNorms, KvCache
from llmb.ops.dependent_launch import pdl_options, pdl_wait


@triton.jit
def _scale(x, inverse_rms, q_weight_ptrs, k_weight_ptrs, is_query):
    """Return a half of the normed heads, rounded like `qkv_norm_`."""
    q_weight = tl.load(q_weight_ptrs).to(tl.float32)[None, :]
    k_weight = tl.load(k_weight_ptrs).to(tl.float32)[None, :]
    return (x.to(tl.float32) * inverse_rms * tl.where(is_query, q_weight, k_weight)).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr", "cos_ptr", "sin_ptr"])
def _rope_and_cache(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    inv_key_scale,
    inv_value_scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_NORM: tl.constexpr,
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
        if HAS_NORM:
            x_square, y_square = x.to(tl.float32) * x.to(tl.float32), y.to(tl.float32) * y.to(tl.float32)
            inverse_rms = tl.rsqrt(tl.sum(x_square + y_square, 1) / D + eps)[:, None]
            x = _scale(x, inverse_rms, q_norm_ptr + half, k_norm_ptr + half, (h < H)[:, None])
            y = _scale(y, inverse_rms, q_norm_ptr + half + D // 2, k_norm_ptr + half + D // 2, (h < H)[:, None])
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
    qkv_NW: Tensor,
    cos_ND: Tensor | None,
    sin_ND: Tensor | None,
    cache: KvCache,
    slot_mapping_N: Tensor,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rope_and_cache`, in place: returns views of `qkv_NW`."""
    heads_NXD = qkv_NW.unflatten(-1, (-1, cache.head_dim))
    n, g = qkv_NW.shape[0], cache.kv_heads
    h = heads_NXD.shape[1] - 2 * g
    assert norms is None or cos_ND is not None, "the kernel norms the halves that it rotates"
    if n:
        _rope_and_cache[(n,)](
            qkv_NW, cos_ND, sin_ND, cache.keys_BGLD, cache.values_BGDL, slot_mapping_N,
            *(norms or (None, None, 0.0)), 1 / cache.key_scale, 1 / cache.value_scale,
            H=h, G=g, D=cache.head_dim, L=cache.block_tokens, HEADS=triton.next_power_of_2(h + g),
            KV_HEADS=triton.next_power_of_2(g), HAS_ROPE=cos_ND is not None, HAS_NORM=norms is not None,
            num_warps=4, **pdl_options(n),
        )  # fmt: skip
    q_NHD, k_NGD, v_NGD = heads_NXD.split((h, g, g), dim=1)
    return q_NHD, k_NGD, v_NGD
