"""CUDA graphs for decode-only steps: hundreds of kernels in one launch.

A graph has fixed sizes, so there is one for each of a few batch sizes; a step takes the next larger one and is padded.
All graphs share one memory pool, which is as large as the largest graph needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmb.serve.input_staging import InputStaging, StepBuffer, StepSizes
from llmb.serve.step_batch import StepBatch, StepInputs

WARMUP_CALLS = 2  # before a capture: kernels are compiled and libraries create their handles


class StepOutput(NamedTuple):
    """Output of a step, one row for each sampling sequence; rows of padding come last."""

    logits_SV: Tensor
    tokens_S: Tensor  # greedy
    sample_slots_S: Tensor  # slots whose last tokens these are


ComputeStep = Callable[[StepBuffer, StepInputs], StepOutput]


def capture_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: small ones densely, then a quarter more each, up to the batch limit."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    while sizes[-1] < max_batch_size:
        sizes.append(-(-sizes[-1] * 5 // 4 // 16) * 16)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


@dataclass(frozen=True)
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    buffer: StepBuffer
    output: StepOutput


class DecodeGraphs:
    """The graphs of all batch sizes, captured before the first request."""

    def __init__(
        self,
        staging: InputStaging,
        compute: ComputeStep,
        max_seq_len: int,
        last_tokens: Tensor,
        sizes: tuple[int, ...],
    ):
        self._staging, self._compute, self._max_seq_len = staging, compute, max_seq_len
        self._captured: dict[int, _CapturedGraph] = {}
        if sizes and last_tokens.is_cuda:
            pool = torch.cuda.graph_pool_handle()
            for size in sorted(sizes, reverse=True):  # the largest determines the size of the pool
                self._captured[size] = self._capture(size, pool)
        self._sizes = sorted(self._captured)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def launch(self, batch: StepBatch) -> StepOutput | None:
        """Replay the graph of this batch; None if there is none."""
        batch_size = len(batch.chunks)
        if not batch_size or not self._sizes or batch_size > self._sizes[-1] or not batch.is_decode_only:
            return None
        captured = self._captured[next(size for size in self._sizes if size >= batch_size)]
        self._staging.upload(batch, captured.buffer)
        captured.graph.replay()
        return captured.output

    def _capture(self, size: int, pool: Any) -> _CapturedGraph:
        staging, empty = self._staging, StepBatch()
        sizes = StepSizes(num_tokens=size, num_seqs=size, num_samples=size, num_blocks=staging.num_blocks)
        buffer = StepBuffer.on(staging.device, sizes)
        staging.upload(empty, buffer)
        inputs = buffer.inputs(empty, self._max_seq_len, num_decodes=size)
        for _ in range(WARMUP_CALLS):
            self._compute(buffer, inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._compute(buffer, inputs)
        return _CapturedGraph(graph, buffer, output)
