"""Triton kernels of MLA's RoPE: one program assembles several heads of a token, or splits all heads of its gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.rope.rope_autograd import RopeFunction
from llmb.ops.tensor_layout import dense_rows

HEADS = 16  # at once


@triton.jit
def _copy_channels(out_ptr, x_ptr, head, out_head_stride, x_head_stride, mask, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Copy the first N channels of some heads."""
    n = tl.arange(0, BLOCK_N)[None, :]
    mask = mask & (n < N)
    tl.store(out_ptr + head * out_head_stride + n, tl.load(x_ptr + head * x_head_stride + n, mask=mask), mask=mask)


@triton.jit
def _load_tables(cos_ptr, sin_ptr, token, F: tl.constexpr, BLOCK_F: tl.constexpr, INVERSE: tl.constexpr):
    f = tl.arange(0, BLOCK_F)
    cos = tl.load(cos_ptr + token * F + f, mask=f < F, other=0.0)
    sin = tl.load(sin_ptr + token * F + f, mask=f < F, other=0.0)
    return cos, -sin if INVERSE else sin


@triton.jit
def _mla_rope(
    out_ptr, nope_ptr, rope_ptr, cos_ptr, sin_ptr, out_batch, out_token, out_head, nope_batch, nope_token, nope_head,
    rope_batch, rope_token, rope_head, tokens,
    INVERSE: tl.constexpr, H: tl.constexpr, N: tl.constexpr, F: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    row = (tl.program_id(0) // head_blocks).to(tl.int64)
    batch, token = row // tokens, row % tokens
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    out_ptr += batch * out_batch + token * out_token
    nope_ptr += batch * nope_batch + token * nope_token
    rope_ptr += batch * rope_batch + token * rope_token
    _copy_channels(out_ptr, nope_ptr, head[:, None], out_head, nope_head, (head < H)[:, None], N, BLOCK_N)
    cos, sin = _load_tables(cos_ptr, sin_ptr, token, F, BLOCK_F, INVERSE)
    r = tl.arange(0, 2 * BLOCK_F)[None, :]
    mask = (head < H)[:, None] & (r < 2 * F)
    x = tl.load(rope_ptr + head[:, None] * rope_head + r, mask=mask, other=0.0).to(tl.float32)
    first, second = tl.split(x.reshape(HEADS, BLOCK_F, 2))
    rotated = tl.join(first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :])
    pointers = out_ptr + head[:, None] * out_head + N + r
    tl.store(pointers, rotated.reshape(HEADS, 2 * BLOCK_F).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mla_rope_backward(
    dkv_ptr, dkey_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head,
    tokens, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, F: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """A token's gradients of keys and values, side by side; those of the shared key summed over heads, rotated back."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    dk_ptr += batch * dk_batch + token * dk_token
    dv_ptr += batch * dv_batch + token * dv_token
    dkv_ptr += row * (H * (N + V))
    r = tl.arange(0, 2 * BLOCK_F)
    total = tl.zeros((HEADS, 2 * BLOCK_F), tl.float32)
    for start in range(0, H, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        _copy_channels(dkv_ptr, dk_ptr, head, N + V, dk_head, head < H, N, BLOCK_N)
        _copy_channels(dkv_ptr + N, dv_ptr, head, N + V, dv_head, head < H, V, BLOCK_V)
        mask = (head < H) & (r < 2 * F)[None, :]
        total += tl.load(dk_ptr + head * dk_head + N + r[None, :], mask=mask, other=0.0).to(tl.float32)
    cos, sin = _load_tables(cos_ptr, sin_ptr, token, F, BLOCK_F, True)
    first, second = tl.split(tl.sum(total, axis=0).reshape(BLOCK_F, 2))
    rotated = tl.join(first * cos - second * sin, second * cos + first * sin).reshape(2 * BLOCK_F)
    tl.store(dkey_ptr + row * (2 * F) + r, rotated.to(dkey_ptr.dtype.element_ty), mask=r < 2 * F)


def mla_rope_queries_triton(q_BTHD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Launch the kernel of `mla_rope.mla_rope_queries`; differentiable."""
    return RopeFunction.apply(q_BTHD, cos_TF, sin_TF, _rotate_last)


def mla_rope_keys_triton(
    kv_BTHD: Tensor, key_BTR: Tensor, cos_TF: Tensor, sin_TF: Tensor, nope: int
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of `mla_rope.mla_rope_keys`; differentiable."""
    return _MlaRopeKeys.apply(kv_BTHD, key_BTR, cos_TF, sin_TF, nope)


class _MlaRopeKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kv_BTHD: Tensor, key_BTR: Tensor, cos_TF: Tensor, sin_TF: Tensor, nope: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_TF, sin_TF)
        kv_BTHD = dense_rows(kv_BTHD)
        k_BTHD = kv_BTHD.new_empty(*kv_BTHD.shape[:3], nope + key_BTR.shape[-1])
        shared_BTHR = dense_rows(key_BTR)[:, :, None].expand(-1, -1, kv_BTHD.shape[2], -1)
        _launch(k_BTHD, kv_BTHD, shared_BTHR, cos_TF, sin_TF, inverse=False)
        return k_BTHD, kv_BTHD[..., nope:]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dk_BTHD: Tensor, dv_BTHD: Tensor) -> tuple[Tensor | None, ...]:
        dk_BTHD, dv_BTHD = dense_rows(dk_BTHD), dense_rows(dv_BTHD)
        cos_TF, sin_TF = ctx.saved_tensors
        (batch, tokens), value = dk_BTHD.shape[:2], dv_BTHD.shape[-1]
        nope = dk_BTHD.shape[-1] - 2 * cos_TF.shape[-1]
        dkv_BTHD = dk_BTHD.new_empty(*dk_BTHD.shape[:3], nope + value)
        dkey_BTR = dk_BTHD.new_empty(batch, tokens, 2 * cos_TF.shape[-1])
        if batch * tokens:
            _mla_rope_backward[(batch * tokens,)](
                dkv_BTHD, dkey_BTR, dk_BTHD, dv_BTHD, cos_TF, sin_TF, *dk_BTHD.stride()[:3], *dv_BTHD.stride()[:3],
                tokens, V=value, BLOCK_V=triton.next_power_of_2(value), **_shape_constants(dk_BTHD, cos_TF, sin_TF),
            )  # fmt: skip
        return dkv_BTHD, dkey_BTR, None, None, None


def _rotate_last(x_BTHD: Tensor, cos_TF: Tensor, sin_TF: Tensor, inverse: bool) -> Tensor:
    x_BTHD = dense_rows(x_BTHD)
    out_BTHD = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    nope = x_BTHD.shape[-1] - 2 * cos_TF.shape[-1]
    _launch(out_BTHD, x_BTHD, x_BTHD[..., nope:], cos_TF, sin_TF, inverse)
    return out_BTHD


def _launch(
    out_BTHD: Tensor, nope_BTHD: Tensor, rope_BTHR: Tensor, cos_TF: Tensor, sin_TF: Tensor, inverse: bool
) -> None:
    """Write the first channels of `nope`, then all of `rope` rotated, whose heads may be one expanded."""
    batch, tokens, heads, _ = out_BTHD.shape
    constants = _shape_constants(out_BTHD, cos_TF, sin_TF)
    if batch * tokens:
        _mla_rope[(batch * tokens * triton.cdiv(heads, constants["HEADS"]),)](
            out_BTHD, nope_BTHD, rope_BTHR, cos_TF, sin_TF, *out_BTHD.stride()[:3], *nope_BTHD.stride()[:3],
            *rope_BTHR.stride()[:3], tokens, INVERSE=inverse, **constants,
        )  # fmt: skip


def _shape_constants(x_BTHD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> dict[str, int]:
    """Return the constants of kernels for whole heads, nope and rope."""
    assert cos_TF.is_contiguous()
    assert sin_TF.is_contiguous()
    (heads, width), pairs = x_BTHD.shape[2:], cos_TF.shape[1]
    nope = width - 2 * pairs
    return {
        "H": heads, "N": nope, "F": pairs, "HEADS": min(HEADS, triton.next_power_of_2(heads)),
        "BLOCK_N": triton.next_power_of_2(max(nope, 1)), "BLOCK_F": triton.next_power_of_2(pairs),
    }  # fmt: skip
