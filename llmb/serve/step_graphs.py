"""CUDA graphs of steps: hundreds of kernels in one launch.

A graph has fixed sizes, so there is one for each of a few sizes; a step takes the next larger one and is padded. Steps
of decodes only differ in their batch size. Mixed steps, decodes with prefill chunks, differ in the tokens they compute
and, coarsely, in the decodes among them; chunk lengths stay on the device. Up to about MAX_MIXED_TOKENS the host would
take longer to launch a mixed step kernel by kernel than the device to compute it; larger ones have no graph.

All graphs share one memory pool, which is as large as the largest graph needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmb.ops.gemm.skinny_gemm import MAX_TOKENS
from llmb.perfmodel.serving_time.graph_sizes import decode_graph_sizes, mixed_graph_tokens
from llmb.serve.input_staging import InputStaging, StepBuffer, StepSizes
from llmb.serve.step_batch import StepBatch, StepInputs

WARMUP_CALLS = 2  # before the first capture: kernels are compiled and libraries create their handles
MAX_MIXED_PREFILLS = 16  # prefill chunks of a mixed step


class StepOutput(NamedTuple):
    """Output of a step, one row for each sampling sequence; rows of padding come last."""

    logits_SV: Tensor
    tokens_S: Tensor  # greedy
    sample_slots_S: Tensor  # slots whose last tokens these are
    graph_size: "GraphSize | None" = None  # None: computed without a graph


ComputeStep = Callable[[StepBuffer, StepInputs], StepOutput]


class GraphSize(NamedTuple):
    """Most that a captured step can compute; without prefill chunks it takes steps of decodes only."""

    num_decodes: int
    num_tokens: int
    num_prefills: int = 0

    def fits(self, batch: "BatchSize") -> bool:
        return (
            self.num_decodes >= batch.num_decodes
            and self.num_tokens >= batch.num_tokens
            and self.num_prefills >= batch.num_prefills
            and bool(self.num_prefills) == bool(batch.num_prefills)
        )


BatchSize = GraphSize  # of a batch: exactly what it computes


def decode_sizes(max_batch_size: int) -> tuple[GraphSize, ...]:
    """Return the sizes of steps of decodes only to capture."""
    return tuple(GraphSize(size, size) for size in decode_graph_sizes(max_batch_size))


def mixed_sizes(max_batch_size: int, max_num_tokens: int) -> tuple[GraphSize, ...]:
    """Return the sizes of mixed steps to capture: token counts densely, as they cost time, decodes coarsely."""
    tokens = mixed_graph_tokens(max_num_tokens)
    decodes = (*(count for count in (64, 256, 512, 1024) if count < max_batch_size), max_batch_size)
    # Padding decodes are rows of the attention output too, of which there is one for each token.
    return tuple(GraphSize(most, count, MAX_MIXED_PREFILLS) for most in decodes for count in tokens if count >= most)


@dataclass(frozen=True)
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    buffer: StepBuffer
    output: StepOutput


class StepGraphs:
    """The graphs of all sizes, captured before the first request."""

    def __init__(
        self,
        staging: InputStaging,
        compute: ComputeStep,
        max_seq_len: int,
        last_tokens: Tensor,
        sizes: tuple[GraphSize, ...],
    ):
        self._staging, self._compute, self._max_seq_len = staging, compute, max_seq_len
        self._captured: dict[GraphSize, _CapturedGraph] = {}
        if sizes and last_tokens.is_cuda:
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for size in sorted(sizes, key=lambda size: size.num_tokens, reverse=True):  # the largest sizes the pool
                    self._captured[size] = self._capture(size, pool)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()
        self._sizes = sorted(self._captured)

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Batch sizes of captured steps of decodes only."""
        return tuple(size.num_decodes for size in self._sizes if not size.num_prefills)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Token counts of captured mixed steps."""
        return tuple(sorted({size.num_tokens for size in self._sizes if size.num_prefills}))

    def launch(self, batch: StepBatch) -> StepOutput | None:
        """Replay the graph of this batch; None if there is none."""
        if not self._sizes or not batch.chunks:
            return None
        needed = batch_size(batch)
        if not (needed.num_prefills or batch.is_decode_only or batch.samples_drafts):
            return None
        if batch.repeats_sequences:  # the attention of smaller graphs writes the cache that other rows read
            rows = max(needed.num_decodes, MAX_TOKENS + 1)
            needed = needed._replace(num_decodes=rows, num_tokens=max(needed.num_tokens, rows))
        size = next((size for size in self._sizes if size.fits(needed)), None)
        if size is None:
            return None
        captured = self._captured[size]
        self._staging.upload(batch, captured.buffer)
        captured.graph.replay()
        return captured.output

    def _capture(self, size: GraphSize, pool: Any) -> _CapturedGraph:
        """Capture a step on the current stream.

        `torch.cuda.graph` would also free the cache of the allocator each time, and the warm-up fill it again, which
        takes longer than the capture.
        """
        staging = self._staging
        buffer = StepBuffer.on(staging.device, padded_sizes(size, staging))
        staging.upload(StepBatch(), buffer)
        inputs = padded_inputs(buffer, size, self._max_seq_len)
        for _ in range(1 if self._captured else WARMUP_CALLS):
            self._compute(buffer, inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool)
        try:
            output = self._compute(buffer, inputs)
        finally:
            graph.capture_end()
        return _CapturedGraph(graph, buffer, output._replace(graph_size=size))


def batch_size(batch: StepBatch) -> BatchSize:
    """Return what a batch computes."""
    decodes = batch.num_decodes
    return BatchSize(decodes, batch.num_tokens, len(batch.chunks) - decodes)


def padded_sizes(size: GraphSize, staging: InputStaging) -> StepSizes:
    """Return the sizes of the tensors of a captured step; no more rows sample than there are."""
    return StepSizes(
        num_tokens=size.num_tokens,
        num_decodes=size.num_decodes,
        num_prefills=size.num_prefills,
        num_samples=min(size.num_decodes + size.num_prefills, staging.max_rows),
        num_blocks=staging.num_blocks,
        num_tables=staging.num_tables,
    )


def padded_inputs(buffer: StepBuffer, size: GraphSize, max_seq_len: int) -> StepInputs:
    """Return the inputs of a captured step, in which the host knows limits only."""
    return buffer.inputs(StepBatch(), max_seq_len, size.num_decodes, size.num_tokens if size.num_prefills else 0)
