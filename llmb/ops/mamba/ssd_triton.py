"""The state-space recurrence of Mamba-2 as Triton kernels, forward and backward; `ssd.py` says what it computes.

Forward: scores c . b of each chunk (one for all heads of a group), the state carried on from chunk to chunk, and the
scan that reads both. The backward pass keeps only the inputs, makes scores and states again, and goes the same way
back: the slopes of the states are gathered by the kernel that carries them on.

The slope of the decays needs no kernel of its own. A token's decay lies between every earlier token and every token
from it on: its slope is the sum of what is read across it, through the scores of the chunk, from the state that entered
the chunk before it, into the state that leaves the chunk after it, and from the one into the other. The kernels that
see those products (`ssd_kernels_triton.py`) sum them on the way. Tensor names end in their shape, as in `ssd.py`.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from llmb.ops.dense_rows import dense_rows
from llmb.ops.mamba.ssd_kernels_triton import (
    input_slopes_kernel,
    key_slopes_kernel,
    scan_kernel,
    score_slopes_kernel,
    scores_kernel,
    states_kernel,
)

TILE_TOKENS = 64
TILE_STATE = 64  # columns of a state at once; its rows, a head's width, are taken whole
CARRIED_BYTES = 256  # of a channel at once, where a state is carried on: 128 tokens in bf16


class _Shape(NamedTuple):
    """The sizes of one call and the tiles they are cut into."""

    batch: int
    tokens: int
    heads: int
    groups: int
    width: int
    state: int
    chunk: int

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def tile(self) -> int:
        return min(TILE_TOKENS, _tile(self.chunk))

    @property
    def tile_n(self) -> int:
        return min(TILE_STATE, _tile(self.state))

    @property
    def tiles(self) -> int:
        return -(-self.chunk // self.tile)

    @property
    def tiles_n(self) -> int:
        return -(-self.state // self.tile_n)

    def sizes(self, *names: str) -> dict[str, int]:
        """The named constants, as kernels spell them."""
        known = {
            "SHARE": self.heads // self.groups,
            "CHUNK": self.chunk,
            "WIDTH": self.width,
            "STATE": self.state,
            "TILE": self.tile,
            "TILE_P": _tile(self.width),
            "TILE_N": self.tile_n,
        }
        return {name: known[name] for name in names}


ALL = ("SHARE", "CHUNK", "WIDTH", "STATE", "TILE", "TILE_P", "TILE_N")


def _tile(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # the least that a matrix product takes


class _Decays(NamedTuple):
    """dt and what follows from it for each head, [B, H, Z, L] in fp32."""

    dt: Tensor
    s: Tensor  # log of the decay from the chunk's start up to and with a token
    entered: Tensor  # what is left of the entering state at a token
    leaving: Tensor  # what is left of a token's input at the chunk's end, times its dt
    whole: Tensor  # [B, H, Z]: over the chunk


def _decays(shape: _Shape, dt_BTH: Tensor, a_H: Tensor) -> _Decays:
    padded = F.pad(dt_BTH, (0, 0, 0, shape.chunks * shape.chunk - shape.tokens))
    dt = padded.unflatten(1, (shape.chunks, shape.chunk)).permute(0, 3, 1, 2).contiguous()
    s = (dt * a_H[:, None, None]).cumsum(dim=-1)
    return _Decays(dt, s, s.exp(), (s[..., -1:] - s).exp() * dt, s[..., -1].exp().contiguous())


def _scores(shape: _Shape, c: Tensor, b: Tensor) -> Tensor:
    scores = torch.empty(
        shape.batch, shape.chunks, shape.groups, shape.chunk, shape.chunk, dtype=torch.float32, device=c.device
    )
    grid = (shape.batch * shape.chunks, shape.groups, shape.tiles**2)
    sizes = shape.sizes("CHUNK", "STATE", "TILE", "TILE_N")
    scores_kernel[grid](c, b, scores, *c.stride()[:3], *b.stride()[:3], shape.tokens, shape.chunks, **sizes)
    return scores


class _Carried(NamedTuple):
    """What goes from chunk to chunk."""

    states: Tensor  # [B, Z, H, P, N]: entering each chunk; on the way back, the slope of what leaves it
    left: Tensor | None  # [B, H, P, N]: after the last chunk, where a state was given to the first
    through: Tensor | None  # [B, H, Z]: how much is read through each chunk, on the way back


def _carry(
    shape: _Shape, v: Tensor, weights: Tensor, k: Tensor, decays: _Decays, *,
    given: Tensor | None = None, entering: Tensor | None = None,
) -> _Carried:  # fmt: skip
    """From the first chunk to the last, or back where what entered each of them is told."""
    sizes = shape.sizes(*ALL) | {"TILE": min(CARRIED_BYTES // v.itemsize, _tile(shape.chunk))}
    states = v.new_empty(shape.batch, shape.chunks, shape.heads, shape.width, shape.state)
    left = None if given is None else torch.empty_like(given)
    through = None if entering is None else decays.whole.new_empty(shape.tiles_n, *decays.whole.shape)
    strides = (*v.stride()[:3], *k.stride()[:3])
    states_kernel[shape.batch * shape.heads, shape.tiles_n](
        v, weights, k, decays.whole, given, entering, states, left, through, *strides, shape.tokens, shape.chunks,
        shape.heads, BACKWARD=entering is not None, **sizes,
    )  # fmt: skip
    return _Carried(states, left, None if through is None else through.sum(dim=0))


def _entering_states(shape: _Shape, x: Tensor, b: Tensor, decays: _Decays) -> Tensor:
    return _carry(shape, x, decays.leaving, b, decays).states


def _scan(shape: _Shape, x: Tensor, c: Tensor, scores: Tensor, states: Tensor, decays: _Decays, d: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (shape.batch * shape.chunks, shape.heads, shape.tiles)
    strides = (*x.stride()[:3], *c.stride()[:3])
    scan_kernel[grid](
        x, c, scores, states, decays.dt, decays.s, d, y, *strides, shape.tokens, shape.chunks, **shape.sizes(*ALL)
    )
    return y


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int) -> Tensor:
        batch, tokens, heads, width = x.shape
        shape = _Shape(batch, tokens, heads, b.shape[2], width, b.shape[3], chunk)
        decays = _decays(shape, dt, a)
        scores = _scores(shape, c, b)
        states = _entering_states(shape, x, b, decays)
        y = _scan(shape, x, c, scores, states, decays, d)
        ctx.save_for_backward(x, dt, a, b, c, d)
        ctx.shape = shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, d = ctx.saved_tensors
        shape: _Shape = ctx.shape
        dy = dense_rows(dy)
        decays = _decays(shape, dt, a)
        scores = _scores(shape, c, b)
        states = _entering_states(shape, x, b, decays)
        dstates, _, through = _carry(shape, dy, decays.entered, c, decays, entering=states)

        slopes, read, given = _score_slopes(shape, dy, x, scores, decays)
        dx, ddt_direct, dd = _input_slopes(shape, dy, x, b, scores, dstates, decays, d)
        dc, from_entered = _key_slopes(shape, dy, decays.entered, states, slopes, own=c, other=b, turned=False)
        db, into_leaving = _key_slopes(shape, x, decays.leaving, dstates, slopes, own=b, other=c, turned=True)

        # The slope of dt * a, a token's decay: all that is read across it.
        later = (read - given + from_entered).flip(-1).cumsum(-1).flip(-1)  # by this token and those after it
        earlier = into_leaving.cumsum(-1) - into_leaving  # from those before it
        assert through is not None
        dlog = later + earlier + through[..., None]
        ddt = ddt_direct + dlog * a[:, None, None]
        ddt_BTH = ddt.permute(0, 2, 3, 1).flatten(1, 2)[:, : shape.tokens]
        da = (dlog * decays.dt).sum(dim=(0, 2, 3))
        return dx, ddt_BTH, da, db, dc, dd.sum(dim=(0, 2, 3)), None


def _score_slopes(
    shape: _Shape, dy: Tensor, x: Tensor, scores: Tensor, decays: _Decays
) -> tuple[Tensor, Tensor, Tensor]:
    slopes = torch.empty_like(scores)
    read, given = (decays.s.new_zeros(shape.tiles, *decays.s.shape) for _ in range(2))  # a part for each tile across
    grid = (shape.batch * shape.chunks, shape.groups, shape.tiles**2)
    sizes = shape.sizes("SHARE", "CHUNK", "WIDTH", "TILE", "TILE_P")
    strides = (*dy.stride()[:3], *x.stride()[:3])
    score_slopes_kernel[grid](
        dy, x, scores, decays.dt, decays.s, slopes, read, given, *strides, shape.tokens, shape.chunks, shape.heads,
        **sizes,
    )  # fmt: skip
    return slopes, read.sum(dim=0), given.sum(dim=0)


def _input_slopes(
    shape: _Shape, dy: Tensor, x: Tensor, b: Tensor, scores: Tensor, dstates: Tensor, decays: _Decays, d: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    ddt, dd = torch.empty_like(decays.dt), torch.empty_like(decays.dt)
    grid = (shape.batch * shape.chunks, shape.heads, shape.tiles)
    strides = (*dy.stride()[:3], *x.stride()[:3], *b.stride()[:3])
    input_slopes_kernel[grid](
        dy, x, b, scores, dstates, decays.dt, decays.s, d, dx, ddt, dd, *strides, shape.tokens, shape.chunks,
        **shape.sizes(*ALL),
    )  # fmt: skip
    return dx, ddt, dd


def _key_slopes(
    shape: _Shape, v: Tensor, weights: Tensor, states: Tensor, slopes: Tensor, own: Tensor, other: Tensor, turned: bool
) -> tuple[Tensor, Tensor]:
    out = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    read = weights.new_empty(shape.tiles_n, *weights.shape)  # a part for each tile of the state
    grid = (shape.batch * shape.chunks, shape.groups, shape.tiles * shape.tiles_n)
    strides = (*v.stride()[:3], *own.stride()[:3], *other.stride()[:3])
    key_slopes_kernel[grid](
        v, weights, states, slopes, own, other, out, read, *strides, shape.tokens, shape.chunks, shape.heads,
        TURNED=turned, **shape.sizes(*ALL),
    )  # fmt: skip
    return out, read.sum(dim=0)


def ssd_triton(
    x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, d_H: Tensor, chunk: int
) -> Tensor:
    """As `ssd.ssd`: dt, a and d are taken in fp32, the matrix products in the format of x."""
    dt, a, d = (one.float() for one in (dt_BTH, a_H, d_H))
    x, b, c = (dense_rows(one.to(x_BTHP.dtype)) for one in (x_BTHP, b_BTGN, c_BTGN))
    return _Ssd.apply(x, dt, a, b, c, d, chunk)


def ssd_from_triton(
    state_HPN: Tensor,
    x_THP: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    d_H: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """As `ssd.ssd_from`, by the same kernels."""
    dt, a, d = (one.float() for one in (dt_TH[None], a_H, d_H))
    x, b, c = (dense_rows(one.to(x_THP.dtype)[None]) for one in (x_THP, b_TGN, c_TGN))
    tokens, heads, width = x_THP.shape
    shape = _Shape(1, tokens, heads, b_TGN.shape[1], width, b_TGN.shape[2], chunk)
    decays = _decays(shape, dt, a)
    scores = _scores(shape, c, b)
    states, left, _ = _carry(shape, x, decays.leaving, b, decays, given=state_HPN.float().contiguous()[None])
    assert left is not None
    return _scan(shape, x, c, scores, states, decays, d)[0], left[0]
