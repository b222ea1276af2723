"""Context parallelism: the tokens of a sequence are sharded over ranks, which communicate in attention only.

A sequence is split into 2 * cp equal chunks, and rank i of cp holds chunks i and 2 * cp - 1 - i: with causal masking
early chunks have little work and late ones much, and every such pair has the same amount.

    cp = ContextParallel(mesh.submesh("cp"))
    out_NHD, lse_HN, k_TGD, v_TGD = cp.attention_forward(q_NHD, k_NGD, v_NGD, sequences, scale)
    dq_NHD, dk_NGD, dv_NGD = cp.attention_backward(dout_NHD, q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, sequences, scale)

Queries stay. Keys and values of all ranks are all-gathered in one collective, while each chunk attends causally to its
own keys; then it attends to all keys before it (`llmb/ops/attention/segment_attention.py`). In the backward pass the
gradients of gathered keys and values are reduce-scattered, while those of the causal part are computed. MLA gathers the
decompressed keys and values, not the smaller latents.

Shapes: N tokens of a rank, the two chunks of each of B sequences one after the other; T tokens of all ranks, B full
sequences; H heads, G KV heads, D head_dim, W channels.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llmb.models.architectures import Network
from llmb.models.blocks import Attention
from llmb.models.mla import MLAAttention
from llmb.ops.attention.attention_sinks import add_sinks_, sink_gradient
from llmb.ops.attention.segment_attention import (
    KEY_BLOCK,
    Segment,
    causal_backward,
    causal_forward,
    context_backward,
    context_forward,
    shorter_window,
    windowed_backward,
    windowed_forward,
)
from llmb.ops.softcap.softcap_attention import softcap_attention
from llmb.runtime.flat_collectives import all_gather_flat, reduce_scatter_flat
from llmb.train.parallel.mesh import Mesh


def apply_context_parallel(model_part: Network, mesh: Mesh) -> None:
    """Let each attention gather the keys and values of the full sequence, and give each token its position."""
    if mesh.size("cp") == 1:
        return
    model_part.positions = partial(shard_positions, mesh.index("cp"), mesh.size("cp"))
    cp = ContextParallel(mesh.submesh("cp"))
    for module in model_part.modules():
        if isinstance(module, Attention | MLAAttention):
            module.attend = partial(cp_attention, cp)


def shard_sequence(sequence_BT: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's tokens of full sequences: an early chunk of each, then a late one."""
    ranks = mesh.size("cp")
    if ranks == 1:
        return sequence_BT
    chunks = sequence_BT.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[index] for index in chunk_indices(mesh.index("cp"), ranks)], dim=1)


def chunk_indices(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of the two chunks that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def shard_positions(rank: int, ranks: int, tokens: int, device: torch.device) -> Tensor:
    """Return the positions in the sequence of a rank's `tokens` tokens."""
    offset_P = torch.arange(tokens // 2, device=device)
    return torch.cat([offset_P + index * len(offset_P) for index in chunk_indices(rank, ranks)])


def cp_segments(rank: int, ranks: int, sequences: int, tokens: int) -> tuple[Segment, ...]:
    """Return the segments of a rank that holds `tokens` tokens of each sequence: two chunks, each after its context."""
    chunk = tokens // 2
    return tuple(
        Segment(start, start + chunk, context_start, context_start + index * chunk)
        for sequence in range(sequences)
        for context_start in (sequence * ranks * tokens,)
        for start, index in zip((sequence * tokens, sequence * tokens + chunk), chunk_indices(rank, ranks), strict=True)
    )


class PendingKeyValues(NamedTuple):
    """Keys and values, or their gradients, in a collective that may still run."""

    work: dist.Work | None  # None: done
    buffers: tuple[Tensor, Tensor]  # sent and received
    shapes: tuple[torch.Size, torch.Size]  # of one rank's keys and values

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, [ranks that were received, N, ...] each."""
        if self.work is not None:
            self.work.wait()
        sizes = [shape.numel() for shape in self.shapes]
        k, v = self.buffers[1].view(-1, sum(sizes)).split(sizes, dim=1)
        return k.unflatten(1, self.shapes[0]), v.unflatten(1, self.shapes[1])


class ContextParallel:
    """Collectives and attention of the ranks that share sequences, without autograd."""

    def __init__(self, mesh: DeviceMesh):
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def segments(self, sequences: int, tokens: int) -> tuple[Segment, ...]:
        """Return this rank's segments, with `tokens` tokens of each sequence on this rank."""
        return cp_segments(self.rank, self.ranks, sequences, tokens)

    def gather(self, k_NW: Tensor, v_NW: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Return all ranks' keys and values in sequence order; heads may be a dimension of their own."""
        return self._in_sequence_order(self._start_gather(k_NW, v_NW), sequences)

    def reduce_scatter(self, dk_TW: Tensor, dv_TW: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Return the sum over ranks of the gradients of this rank's keys and values."""
        (dk_NW,), (dv_NW,) = self._start_reduce_scatter(dk_TW, dv_TW, sequences).wait()
        return dk_NW, dv_NW

    def shard(self, x_TW: Tensor, sequences: int) -> Tensor:
        """Return this rank's rows of full sequences, copied."""
        return torch.cat([x_TW[rows] for rows in self._chunks(self.rank, x_TW, sequences)])

    def attention_forward(
        self,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        sequences: int,
        scale: float,
        key_block: int = KEY_BLOCK,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return output and log-sum-exp of this rank's queries, and the gathered keys and values.

        Values may be narrower than keys, as in MLA. Of torch's kernels only the memory-efficient one takes two head
        dims, and it is slow: values are padded with zeros to the head dim of the keys, after they were gathered.
        """
        segments, width = self.segments(sequences, len(q_NHD) // sequences), q_NHD.shape[-1]
        pending = self._start_gather(k_NGD, v_NGD)
        if (window := shorter_window(segments, window)) is not None:
            k_TGD, v_TGD = self._in_sequence_order(pending, sequences)
            attn = windowed_forward(q_NHD, k_NGD, v_NGD, k_TGD, v_TGD, segments, scale, window, softcap)
            return *attn, k_TGD, v_TGD
        out_NHD, lse_HN = causal_forward(q_NHD, k_NGD, _padded(v_NGD, width), segments, scale, softcap)
        k_TGD, v_TGD = self._in_sequence_order(pending, sequences)
        del pending  # its buffers
        context_forward(q_NHD, k_TGD, _padded(v_TGD, width), segments, out_NHD, lse_HN, scale, key_block, softcap)
        return out_NHD[..., : v_NGD.shape[-1]].contiguous(), lse_HN, k_TGD, v_TGD

    def attention_backward(
        self,
        dout_NHD: Tensor,
        q_NHD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
        sequences: int,
        scale: float,
        key_block: int = KEY_BLOCK,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's queries, keys and values, newly allocated."""
        segments = self.segments(sequences, len(q_NHD) // sequences)
        if (window := shorter_window(segments, window)) is not None:
            k_NGD, v_NGD = self.shard(k_TGD, sequences), self.shard(v_TGD, sequences)
            dk_TGD, dv_TGD = torch.zeros_like(k_TGD), torch.zeros_like(v_TGD)
            dq_NHD, *chunk_grads = windowed_backward(
                dout_NHD, q_NHD, k_NGD, v_NGD, k_TGD, v_TGD, out_NHD, lse_HN, segments, dk_TGD, dv_TGD, scale, window,
                softcap,
            )  # fmt: skip
            reduced = self.reduce_scatter(dk_TGD, dv_TGD, sequences)
            dk_NGD, dv_NGD = (x.to(q_NHD.dtype).add_(y) for x, y in zip(chunk_grads, reduced, strict=True))
            return dq_NHD.to(q_NHD.dtype), dk_NGD, dv_NGD
        width, value_width = q_NHD.shape[-1], v_TGD.shape[-1]
        dout_NHD, out_NHD, v_TGD = (_padded(x, width) for x in (dout_NHD, out_NHD, v_TGD))
        dq_NHD = torch.zeros_like(q_NHD)
        # A key is in two rectangles at most: their sum is rounded once, as it would be before it is communicated.
        dk_TGD, dv_TGD = torch.zeros_like(k_TGD), torch.zeros_like(v_TGD)
        context_backward(
            dout_NHD, q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, segments, dq_NHD, dk_TGD, dv_TGD, scale, key_block, softcap
        )
        pending = self._start_reduce_scatter(dk_TGD, dv_TGD[..., :value_width], sequences)
        del dk_TGD, dv_TGD
        k_NGD, v_NGD = (self.shard(x, sequences) for x in (k_TGD, v_TGD))
        causal_dq_NHD, dk_NGD, dv_NGD = causal_backward(
            dout_NHD, q_NHD, k_NGD, v_NGD, out_NHD, lse_HN, segments, scale, softcap=softcap
        )
        (context_dk_NGD,), (context_dv_NGD,) = pending.wait()
        return dq_NHD.add_(causal_dq_NHD), dk_NGD.add_(context_dk_NGD), dv_NGD[..., :value_width].add(context_dv_NGD)

    def _start_gather(self, k_NW: Tensor, v_NW: Tensor) -> PendingKeyValues:
        sent = torch.cat((k_NW.flatten(), v_NW.flatten()))
        received = sent.new_empty(self.ranks * sent.numel())
        return PendingKeyValues(self._all_gather(received, sent), (sent, received), (k_NW.shape, v_NW.shape))

    def _all_gather(self, received: Tensor, sent: Tensor) -> dist.Work | None:
        return all_gather_flat(received, sent, group=self.group, async_op=True)

    def _in_sequence_order(self, pending: PendingKeyValues, sequences: int) -> tuple[Tensor, Tensor]:
        k_RNW, v_RNW = pending.wait()
        return self._concatenated(k_RNW, sequences), self._concatenated(v_RNW, sequences)

    def _concatenated(self, x_RNW: Tensor, sequences: int) -> Tensor:
        """Return the chunks of all ranks in sequence order: one kernel that copies contiguous blocks."""
        tokens = x_RNW.shape[1] // sequences
        chunks = {
            segment.causal_start: x_NW[segment.start : segment.end]
            for rank, x_NW in enumerate(x_RNW)
            for segment in cp_segments(rank, self.ranks, sequences, tokens)
        }
        return torch.cat([chunks[row] for row in sorted(chunks)])

    def _start_reduce_scatter(self, dk_TW: Tensor, dv_TW: Tensor, sequences: int) -> PendingKeyValues:
        grads = dk_TW, dv_TW
        sent = torch.cat(
            [
                x[rows].flatten()
                for rank in range(self.ranks)
                for x in grads
                for rows in self._chunks(rank, x, sequences)
            ]
        )
        received = sent.new_empty(sent.numel() // self.ranks)
        shapes = [torch.Size((len(x) // self.ranks, *x.shape[1:])) for x in grads]
        return PendingKeyValues(self._reduce_scatter(received, sent), (sent, received), (shapes[0], shapes[1]))

    def _reduce_scatter(self, received: Tensor, sent: Tensor) -> dist.Work | None:
        return reduce_scatter_flat(received, sent, group=self.group, async_op=True)

    def _chunks(self, rank: int, x_TW: Tensor, sequences: int) -> Sequence[slice]:
        """Return the rows of full sequences that a rank holds, in its order."""
        segments = cp_segments(rank, self.ranks, sequences, len(x_TW) // self.ranks // sequences)
        return [slice(s.causal_start, s.causal_start + s.end - s.start) for s in segments]


def _padded(x_NHD: Tensor, width: int) -> Tensor:
    """Pad heads with zeros to this width."""
    missing = width - x_NHD.shape[-1]
    return F.pad(x_NHD, (0, missing)) if missing else x_NHD


def cp_attention(
    cp: ContextParallel,
    q_BHQD: Tensor,
    k_BHQD: Tensor,
    v_BHQD: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute `causal_attention` of this rank's two chunks over the full sequences.

    With a softcap our kernels compute each chunk in one call, over all keys up to its end: they take fewer queries than
    keys, and cuDNN has no softcap.
    """
    scale = scale or q_BHQD.shape[-1] ** -0.5
    sequences, queries = len(q_BHQD), q_BHQD.shape[2]
    q_NHD, k_NGD, v_NGD = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q_BHQD, k_BHQD, v_BHQD))
    if softcap is None:
        out_NHD = _Attention.apply(cp, sequences, scale, window, q_NHD, k_NGD, v_NGD, sinks_H)
        return out_NHD.unflatten(0, (sequences, queries)).transpose(1, 2)
    k_TGD, v_TGD = _GatherKeyValues.apply(cp, sequences, k_NGD, v_NGD)
    k_BHTD, v_BHTD = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (k_TGD, v_TGD))
    outputs = []
    for index, q_BHPD in zip(chunk_indices(cp.rank, cp.ranks), q_BHQD.chunk(2, dim=2), strict=True):
        end = (index + 1) * q_BHPD.shape[2]
        outputs.append(softcap_attention(q_BHPD, k_BHTD[:, :, :end], v_BHTD[:, :, :end], scale, softcap, window))
    return torch.cat(outputs, dim=2)


class _Attention(torch.autograd.Function):
    """Attention without a softcap."""

    @staticmethod
    def forward(
        ctx: Any,
        cp: ContextParallel,
        sequences: int,
        scale: float,
        window: int | None,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        sinks_H: Tensor | None,
    ) -> Tensor:
        out_NHD, lse_HN, k_TGD, v_TGD = cp.attention_forward(q_NHD, k_NGD, v_NGD, sequences, scale, window=window)
        if sinks_H is not None:
            lse_HN = add_sinks_(out_NHD, lse_HN, sinks_H)
        ctx.cp, ctx.sequences, ctx.scale, ctx.window = cp, sequences, scale, window
        ctx.save_for_backward(q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, sinks_H)
        return out_NHD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_NHD: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks_H = ctx.saved_tensors
        dout_NHD = dout_NHD.contiguous()
        grads = ctx.cp.attention_backward(dout_NHD, *saved, ctx.sequences, ctx.scale, window=ctx.window)
        out_NHD, lse_HN = saved[-2:]
        dsinks_H = None if sinks_H is None else sink_gradient(dout_NHD, out_NHD, lse_HN, sinks_H)
        return None, None, None, None, *grads, dsinks_H


class _GatherKeyValues(torch.autograd.Function):
    """All ranks' keys and values in sequence order."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, sequences: int, k_NGD: Tensor, v_NGD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.cp, ctx.sequences = cp, sequences
        return cp.gather(k_NGD, v_NGD, sequences)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dk_TGD: Tensor, dv_TGD: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.cp.reduce_scatter(dk_TGD, dv_TGD, ctx.sequences)
