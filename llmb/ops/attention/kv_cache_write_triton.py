"""Triton for turning queries and keys by their positions and writing keys and values to the cache, token by token."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.dependent_launch import begins, dependent


@triton.jit(do_not_specialize_on_alignment=["places_ptr", "cos_ptr", "sin_ptr"])
def _rotate_and_cache(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    places_ptr,
    key_factor,
    value_factor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROTATES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begins(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    row = qkv_ptr + token * (H + 2 * G) * D
    place = tl.load(places_ptr + token)
    block, offset = place // L, place % L
    if ROTATES:
        half = tl.arange(0, D // 2)
        h = tl.arange(0, HEADS)
        cos = tl.load(cos_ptr + token * (D // 2) + half)[None, :]
        sin = tl.load(sin_ptr + token * (D // 2) + half)[None, :]
        low = h[:, None] * D + half[None, :]
        there = (h < H + G)[:, None]
        x = tl.load(row + low, mask=there, other=0.0)
        y = tl.load(row + low + D // 2, mask=there, other=0.0)
        first = (x.to(tl.float32) * cos - y.to(tl.float32) * sin).to(x.dtype)
        second = (y.to(tl.float32) * cos + x.to(tl.float32) * sin).to(x.dtype)
        tl.store(row + low, first, mask=there)
        tl.store(row + low + D // 2, second, mask=there)
        kept = there & (h >= H)[:, None] & (place >= 0)
        to = keys_ptr + ((block * G + h[:, None] - H) * L + offset) * D + half[None, :]
        tl.store(to, (first.to(tl.float32) * key_factor).to(keys_ptr.dtype.element_ty), mask=kept)
        tl.store(to + D // 2, (second.to(tl.float32) * key_factor).to(keys_ptr.dtype.element_ty), mask=kept)
    g = tl.arange(0, KV_HEADS)
    d = tl.arange(0, D)
    kept = (g < G)[:, None] & (place >= 0)
    if not ROTATES:
        k = tl.load(row + (H + g)[:, None] * D + d[None, :], mask=kept, other=0.0).to(tl.float32)
        to = keys_ptr + ((block * G + g[:, None]) * L + offset) * D + d[None, :]
        tl.store(to, (k * key_factor).to(keys_ptr.dtype.element_ty), mask=kept)
    v = tl.load(row + (H + G + g)[:, None] * D + d[None, :], mask=kept, other=0.0).to(tl.float32)
    to = values_ptr + ((block * G + g[:, None]) * D + d[None, :]) * L + offset
    tl.store(to, (v * value_factor).to(values_ptr.dtype.element_ty), mask=kept)


def rotate_and_cache_triton(
    qkv_NW: Tensor, cos_ND: Tensor | None, sin_ND: Tensor | None, cache: KvCache, places_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rotate_and_cache_reference`; what it gives are views of `qkv_NW`, which it writes over."""
    rows_NXD = qkv_NW.unflatten(-1, (-1, cache.width))
    n, g = qkv_NW.shape[0], cache.kv_heads
    h = rows_NXD.shape[1] - 2 * g
    if n:
        _rotate_and_cache[(n,)](
            qkv_NW, cos_ND, sin_ND, cache.keys_BGLD, cache.values_BGDL, places_N,
            1 / cache.key_scale, 1 / cache.value_scale,
            H=h, G=g, D=cache.width, L=cache.block_tokens, HEADS=triton.next_power_of_2(h + g),
            KV_HEADS=triton.next_power_of_2(g), ROTATES=cos_ND is not None, num_warps=4,
            **dependent(n),
        )  # fmt: skip
    q_NHD, k_NGD, v_NGD = rows_NXD.split((h, g, g), dim=1)
    return q_NHD, k_NGD, v_NGD
