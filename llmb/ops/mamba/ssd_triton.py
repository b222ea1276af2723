"""SSD scan of Mamba-2 in Triton, forward and backward; `ssd.py` defines what it computes.

Forward: scores c . b of each chunk (shared by the heads of a group), state passing from chunk to chunk, and the chunk
scan that reads both. The backward pass saves only the inputs, recomputes scores and states, and runs in reverse: the
kernel that passes states also accumulates their gradients.

The gradient of the decays needs no kernel of its own. A token's decay lies between every earlier token and every token
from it on: its gradient is the sum of all products read across it: through the scores of the chunk, from the state
before the chunk, into the state after the chunk, and from the one into the other. The kernels that compute those
products (`ssd_kernels_triton.py`) sum them as they go. Tensor names end in their shape, as in `ssd.py`.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from llmb.ops.mamba.ssd_kernels_triton import (
    input_grads_kernel,
    key_grads_kernel,
    scan_kernel,
    score_grads_kernel,
    scores_kernel,
    states_kernel,
)
from llmb.ops.tensor_layout import dense_rows

BLOCK_TOKENS = 64
BLOCK_STATE = 64  # columns of a state, with all rows (the head dim)
STATE_PASSING_BYTES = 256  # per channel and block of the state passing kernel: 128 tokens in bf16


class _ScanShape(NamedTuple):
    """Sizes of one call and its blocks."""

    batch: int
    tokens: int
    heads: int
    groups: int
    head_dim: int
    state: int
    chunk: int

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def block_l(self) -> int:
        return min(BLOCK_TOKENS, _block_size(self.chunk))

    @property
    def block_n(self) -> int:
        return min(BLOCK_STATE, _block_size(self.state))

    @property
    def blocks_l(self) -> int:
        return -(-self.chunk // self.block_l)

    @property
    def blocks_n(self) -> int:
        return -(-self.state // self.block_n)

    def sizes(self, *names: str) -> dict[str, int]:
        """Return the named constants of kernels."""
        values = {
            "GROUP_HEADS": self.heads // self.groups,
            "CHUNK": self.chunk,
            "HEAD_DIM": self.head_dim,
            "STATE": self.state,
            "BLOCK_L": self.block_l,
            "BLOCK_P": _block_size(self.head_dim),
            "BLOCK_N": self.block_n,
        }
        return {name: values[name] for name in names}


ALL_SIZES = ("GROUP_HEADS", "CHUNK", "HEAD_DIM", "STATE", "BLOCK_L", "BLOCK_P", "BLOCK_N")


def _block_size(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # the minimum of tl.dot


class _Decays(NamedTuple):
    """dt and decays of each head, [B, H, Z, L] in fp32."""

    dt: Tensor
    da_cumsum: Tensor  # log decay from the start of the chunk, inclusive
    decay_from_start: Tensor  # exp of it: decay of the state before the chunk
    decay_to_end_dt: Tensor  # decay from a token to the end of the chunk, times its dt
    chunk_decay: Tensor  # [B, H, Z]: over the whole chunk


def _decays(shape: _ScanShape, dt_BTH: Tensor, a_H: Tensor) -> _Decays:
    padded = F.pad(dt_BTH, (0, 0, 0, shape.chunks * shape.chunk - shape.tokens))
    dt = padded.unflatten(1, (shape.chunks, shape.chunk)).permute(0, 3, 1, 2).contiguous()
    da_cumsum = (dt * a_H[:, None, None]).cumsum(dim=-1)
    decay_to_end_dt = (da_cumsum[..., -1:] - da_cumsum).exp() * dt
    return _Decays(dt, da_cumsum, da_cumsum.exp(), decay_to_end_dt, da_cumsum[..., -1].exp().contiguous())


def _scores(shape: _ScanShape, c: Tensor, b: Tensor) -> Tensor:
    scores = torch.empty(
        shape.batch, shape.chunks, shape.groups, shape.chunk, shape.chunk, dtype=torch.float32, device=c.device
    )
    grid = (shape.batch * shape.chunks, shape.groups, shape.blocks_l**2)
    sizes = shape.sizes("CHUNK", "STATE", "BLOCK_L", "BLOCK_N")
    scores_kernel[grid](c, b, scores, *c.stride()[:3], *b.stride()[:3], shape.tokens, shape.chunks, **sizes)
    return scores


class _PassedStates(NamedTuple):
    """Result of the state passing kernel."""

    states: Tensor  # [B, Z, H, P, N]: before each chunk; backward, the gradient of the state after it
    final_states: Tensor | None  # [B, H, P, N]: after the last chunk, if there is an initial state
    dlog_states: Tensor | None  # [B, H, Z]: backward, gradient of the log decay through the states


def _pass_states(
    shape: _ScanShape, v: Tensor, weights: Tensor, k: Tensor, decays: _Decays, *,
    initial_states: Tensor | None = None, entering: Tensor | None = None,
) -> _PassedStates:  # fmt: skip
    """Pass states from the first chunk to the last, or backward if the states before each chunk are given."""
    sizes = shape.sizes(*ALL_SIZES) | {"BLOCK_L": min(STATE_PASSING_BYTES // v.itemsize, _block_size(shape.chunk))}
    states = v.new_empty(shape.batch, shape.chunks, shape.heads, shape.head_dim, shape.state)
    final_states = None if initial_states is None else torch.empty_like(initial_states)
    dlog_states = None if entering is None else decays.chunk_decay.new_empty(shape.blocks_n, *decays.chunk_decay.shape)
    strides = (*v.stride()[:3], *k.stride()[:3])
    states_kernel[shape.batch * shape.heads, shape.blocks_n](
        v, weights, k, decays.chunk_decay, initial_states, entering, states, final_states, dlog_states, *strides,
        shape.tokens, shape.chunks, shape.heads, BACKWARD=entering is not None, **sizes,
    )  # fmt: skip
    return _PassedStates(states, final_states, None if dlog_states is None else dlog_states.sum(dim=0))


def _entering_states(shape: _ScanShape, x: Tensor, b: Tensor, decays: _Decays) -> Tensor:
    return _pass_states(shape, x, decays.decay_to_end_dt, b, decays).states


def _scan(
    shape: _ScanShape, x: Tensor, c: Tensor, scores: Tensor, states: Tensor, decays: _Decays, d: Tensor
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (shape.batch * shape.chunks, shape.heads, shape.blocks_l)
    strides = (*x.stride()[:3], *c.stride()[:3])
    scan_kernel[grid](
        x, c, scores, states, decays.dt, decays.da_cumsum, d, y, *strides, shape.tokens, shape.chunks,
        **shape.sizes(*ALL_SIZES),
    )  # fmt: skip
    return y


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk: int) -> Tensor:
        batch, tokens, heads, head_dim = x.shape
        shape = _ScanShape(batch, tokens, heads, b.shape[2], head_dim, b.shape[3], chunk)
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
        shape: _ScanShape = ctx.shape
        dy = dense_rows(dy)
        decays = _decays(shape, dt, a)
        scores = _scores(shape, c, b)
        states = _entering_states(shape, x, b, decays)
        dstates, _, dlog_states = _pass_states(shape, dy, decays.decay_from_start, c, decays, entering=states)

        dscores, row_sums, column_sums = _score_grads(shape, dy, x, scores, decays)
        dx, ddt_direct, dd = _input_grads(shape, dy, x, b, scores, dstates, decays, d)
        dc, dlog_c = _key_grads(shape, dy, decays.decay_from_start, states, dscores, key=c, query=b, transposed=False)
        db, dlog_b = _key_grads(shape, x, decays.decay_to_end_dt, dstates, dscores, key=b, query=c, transposed=True)

        # Gradient of dt * a, a token's log decay: all that is read across it.
        later = (row_sums - column_sums + dlog_c).flip(-1).cumsum(-1).flip(-1)  # read by this token and later ones
        earlier = dlog_b.cumsum(-1) - dlog_b  # written by earlier ones
        assert dlog_states is not None
        dlog = later + earlier + dlog_states[..., None]
        ddt = ddt_direct + dlog * a[:, None, None]
        ddt_BTH = ddt.permute(0, 2, 3, 1).flatten(1, 2)[:, : shape.tokens]
        da = (dlog * decays.dt).sum(dim=(0, 2, 3))
        return dx, ddt_BTH, da, db, dc, dd.sum(dim=(0, 2, 3)), None


def _score_grads(
    shape: _ScanShape, dy: Tensor, x: Tensor, scores: Tensor, decays: _Decays
) -> tuple[Tensor, Tensor, Tensor]:
    dscores = torch.empty_like(scores)
    partial_sums = (shape.blocks_l, *decays.da_cumsum.shape)
    row_sums, column_sums = (decays.da_cumsum.new_zeros(partial_sums) for _ in range(2))
    grid = (shape.batch * shape.chunks, shape.groups, shape.blocks_l**2)
    sizes = shape.sizes("GROUP_HEADS", "CHUNK", "HEAD_DIM", "BLOCK_L", "BLOCK_P")
    strides = (*dy.stride()[:3], *x.stride()[:3])
    score_grads_kernel[grid](
        dy, x, scores, decays.dt, decays.da_cumsum, dscores, row_sums, column_sums, *strides,
        shape.tokens, shape.chunks, shape.heads, **sizes,
    )  # fmt: skip
    return dscores, row_sums.sum(dim=0), column_sums.sum(dim=0)


def _input_grads(
    shape: _ScanShape, dy: Tensor, x: Tensor, b: Tensor, scores: Tensor, dstates: Tensor, decays: _Decays, d: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    ddt, dd = torch.empty_like(decays.dt), torch.empty_like(decays.dt)
    grid = (shape.batch * shape.chunks, shape.heads, shape.blocks_l)
    strides = (*dy.stride()[:3], *x.stride()[:3], *b.stride()[:3])
    input_grads_kernel[grid](
        dy, x, b, scores, dstates, decays.dt, decays.da_cumsum, d, dx, ddt, dd, *strides, shape.tokens, shape.chunks,
        **shape.sizes(*ALL_SIZES),
    )  # fmt: skip
    return dx, ddt, dd


def _key_grads(
    shape: _ScanShape,
    v: Tensor,
    weights: Tensor,
    states: Tensor,
    dscores: Tensor,
    key: Tensor,
    query: Tensor,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    dkey = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    dlog = weights.new_empty(shape.blocks_n, *weights.shape)  # partial sums per block of the state
    grid = (shape.batch * shape.chunks, shape.groups, shape.blocks_l * shape.blocks_n)
    strides = (*v.stride()[:3], *key.stride()[:3], *query.stride()[:3])
    key_grads_kernel[grid](
        v, weights, states, dscores, key, query, dkey, dlog, *strides, shape.tokens, shape.chunks, shape.heads,
        TRANSPOSED=transposed, **shape.sizes(*ALL_SIZES),
    )  # fmt: skip
    return dkey, dlog.sum(dim=0)


def ssd_triton(
    x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, d_H: Tensor, chunk: int
) -> Tensor:
    """See `ssd.ssd`: dt, a and d are taken in fp32, matmuls in the dtype of x."""
    dt, a, d = (tensor.float() for tensor in (dt_BTH, a_H, d_H))
    x, b, c = (dense_rows(tensor.to(x_BTHP.dtype)) for tensor in (x_BTHP, b_BTGN, c_BTGN))
    return _Ssd.apply(x, dt, a, b, c, d, chunk)


def ssd_with_state_triton(
    state_HPN: Tensor,
    x_THP: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    d_H: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """See `ssd.ssd_with_state`."""
    dt, a, d = (tensor.float() for tensor in (dt_TH[None], a_H, d_H))
    x, b, c = (dense_rows(tensor.to(x_THP.dtype)[None]) for tensor in (x_THP, b_TGN, c_TGN))
    tokens, heads, head_dim = x_THP.shape
    shape = _ScanShape(1, tokens, heads, b_TGN.shape[1], head_dim, b_TGN.shape[2], chunk)
    decays = _decays(shape, dt, a)
    scores = _scores(shape, c, b)
    initial_states = state_HPN.float().contiguous()[None]
    states, final_states, _ = _pass_states(shape, x, decays.decay_to_end_dt, b, decays, initial_states=initial_states)
    assert final_states is not None
    return _scan(shape, x, c, scores, states, decays, d)[0], final_states[0]
