"""Triton for the heads of latent attention: one program puts several heads of a token together, or takes all apart."""

import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # at once


@triton.jit
def _copy_still(out_ptr, x_ptr, head, out_head, x_head, there, N: tl.constexpr, WIDE: tl.constexpr):
    """The first N channels of some heads."""
    n = tl.arange(0, WIDE)[None, :]
    inside = there & (n < N)
    tl.store(out_ptr + head * out_head + n, tl.load(x_ptr + head * x_head + n, mask=inside), mask=inside)


@triton.jit
def _tables(cos_ptr, sin_ptr, token, F: tl.constexpr, WIDE: tl.constexpr, INVERSE: tl.constexpr):
    f = tl.arange(0, WIDE)
    cos = tl.load(cos_ptr + token * F + f, mask=f < F, other=0.0)
    sin = tl.load(sin_ptr + token * F + f, mask=f < F, other=0.0)
    return cos, -sin if INVERSE else sin


@triton.jit
def _put_together(
    out_ptr, still_ptr, turned_ptr, cos_ptr, sin_ptr, out_batch, out_token, out_head, still_batch, still_token,
    still_head, turned_batch, turned_token, turned_head, tokens,
    INVERSE: tl.constexpr, H: tl.constexpr, N: tl.constexpr, F: tl.constexpr, HEADS: tl.constexpr,
    WIDE_N: tl.constexpr, WIDE_F: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    row = (tl.program_id(0) // groups).to(tl.int64)
    batch, token = row // tokens, row % tokens
    head = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    out_ptr += batch * out_batch + token * out_token
    still_ptr += batch * still_batch + token * still_token
    turned_ptr += batch * turned_batch + token * turned_token
    _copy_still(out_ptr, still_ptr, head[:, None], out_head, still_head, (head < H)[:, None], N, WIDE_N)
    cos, sin = _tables(cos_ptr, sin_ptr, token, F, WIDE_F, INVERSE)
    r = tl.arange(0, 2 * WIDE_F)[None, :]
    inside = (head < H)[:, None] & (r < 2 * F)
    x = tl.load(turned_ptr + head[:, None] * turned_head + r, mask=inside, other=0.0).to(tl.float32)
    first, second = tl.split(x.reshape(HEADS, WIDE_F, 2))
    turned = tl.join(first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :])
    place = out_ptr + head[:, None] * out_head + N + r
    tl.store(place, turned.reshape(HEADS, 2 * WIDE_F).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _take_apart(
    dkv_ptr, dkey_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head,
    tokens, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, F: tl.constexpr, HEADS: tl.constexpr,
    WIDE_N: tl.constexpr, WIDE_V: tl.constexpr, WIDE_F: tl.constexpr,
):  # fmt: skip
    """A token's slopes of keys and values, side by side; of what is turned the sum over its heads, turned back."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    dk_ptr += batch * dk_batch + token * dk_token
    dv_ptr += batch * dv_batch + token * dv_token
    dkv_ptr += row * (H * (N + V))
    r = tl.arange(0, 2 * WIDE_F)
    total = tl.zeros((HEADS, 2 * WIDE_F), tl.float32)
    for start in range(0, H, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        _copy_still(dkv_ptr, dk_ptr, head, N + V, dk_head, head < H, N, WIDE_N)
        _copy_still(dkv_ptr + N, dv_ptr, head, N + V, dv_head, head < H, V, WIDE_V)
        inside = (head < H) & (r < 2 * F)[None, :]
        total += tl.load(dk_ptr + head * dk_head + N + r[None, :], mask=inside, other=0.0).to(tl.float32)
    cos, sin = _tables(cos_ptr, sin_ptr, token, F, WIDE_F, True)
    first, second = tl.split(tl.sum(total, axis=0).reshape(WIDE_F, 2))
    turned = tl.join(first * cos - second * sin, second * cos + first * sin).reshape(2 * WIDE_F)
    tl.store(dkey_ptr + row * (2 * F) + r, turned.to(dkey_ptr.dtype.element_ty), mask=r < 2 * F)


def put_together(
    out_BTHD: Tensor, still_BTHD: Tensor, turned_BTHR: Tensor, cos_TF: Tensor, sin_TF: Tensor, inverse: bool
) -> None:
    """The first channels of `still`, behind them all of `turned`, whose heads may be one and the same."""
    batch, tokens, heads, _ = out_BTHD.shape
    sizes = _sizes(out_BTHD, cos_TF, sin_TF)
    if batch * tokens:
        _put_together[(batch * tokens * triton.cdiv(heads, sizes["HEADS"]),)](
            out_BTHD, still_BTHD, turned_BTHR, cos_TF, sin_TF, *out_BTHD.stride()[:3], *still_BTHD.stride()[:3],
            *turned_BTHR.stride()[:3], tokens, INVERSE=inverse, **sizes,
        )  # fmt: skip


def take_apart(
    dkv_BTHD: Tensor, dkey_BTR: Tensor, dk_BTHD: Tensor, dv_BTHD: Tensor, cos_TF: Tensor, sin_TF: Tensor
) -> None:
    """Into two dense tensors."""
    (batch, tokens), value = dk_BTHD.shape[:2], dv_BTHD.shape[-1]
    if batch * tokens:
        _take_apart[(batch * tokens,)](
            dkv_BTHD, dkey_BTR, dk_BTHD, dv_BTHD, cos_TF, sin_TF, *dk_BTHD.stride()[:3], *dv_BTHD.stride()[:3], tokens,
            V=value, WIDE_V=triton.next_power_of_2(value), **_sizes(dk_BTHD, cos_TF, sin_TF),
        )  # fmt: skip


def _sizes(whole_BTHD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> dict[str, int]:
    """Of heads that are put together, as kernels spell them."""
    assert cos_TF.is_contiguous()
    assert sin_TF.is_contiguous()
    (heads, width), pairs = whole_BTHD.shape[2:], cos_TF.shape[1]
    still = width - 2 * pairs
    return {
        "H": heads, "N": still, "F": pairs, "HEADS": min(HEADS, triton.next_power_of_2(heads)),
        "WIDE_N": triton.next_power_of_2(max(still, 1)), "WIDE_F": triton.next_power_of_2(pairs),
    }  # fmt: skip
