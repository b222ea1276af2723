"""CUDA graphs for steps in which every sequence generates: hundreds of kernels by one launch.

A graph has fixed sizes, so there is one for each of a few batch sizes; a step takes the next larger and is padded. All
share one pool of memory, which is as large as the largest needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmb.serve.input_staging import Sizes, Staging, StepBuffer
from llmb.serve.step_batch import Inputs, Plan

WARMUP_CALLS = 2  # before a capture: kernels are compiled and libraries make their handles


class Outcome(NamedTuple):
    """What a step gives, one row for each part that samples; those of padding come last."""

    logits_SV: Tensor
    tokens_S: Tensor  # the likeliest
    targets_S: Tensor  # the slots whose newest token that is


Compute = Callable[[StepBuffer, Inputs], Outcome]


def graph_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: small ones closely, then a quarter more each; the largest is the batch limit."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    while sizes[-1] < max_batch_size:
        sizes.append(-(-sizes[-1] * 5 // 4 // 16) * 16)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffer: StepBuffer
    outcome: Outcome


class DecodeGraphs:
    """The graphs, captured before the first request comes."""

    def __init__(self, staging: Staging, compute: Compute, longest: int, newest: Tensor, sizes: tuple[int, ...]):
        self._staging, self._compute, self._longest = staging, compute, longest
        self._captured: dict[int, _Captured] = {}
        if sizes and newest.is_cuda:
            pool = torch.cuda.graph_pool_handle()
            for size in sorted(sizes, reverse=True):  # the largest makes the pool
                self._captured[size] = self._capture(size, pool)
        self._sizes = sorted(self._captured)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def launch(self, plan: Plan) -> Outcome | None:
        """Compute the step; none if there is no graph for it."""
        parts = len(plan.parts)
        if not parts or not self._sizes or parts > self._sizes[-1] or not plan.generates:
            return None
        one = self._captured[next(size for size in self._sizes if size >= parts)]
        self._staging.load(plan, one.buffer)
        one.graph.replay()
        return one.outcome

    def _capture(self, size: int, pool: Any) -> _Captured:
        staging, empty = self._staging, Plan()
        sizes = Sizes(tokens=size, parts=size, samples=size, blocks=staging.blocks)
        buffer = StepBuffer.on(staging.device, sizes)
        staging.load(empty, buffer)
        inputs = buffer.inputs(empty, self._longest, decodes=size)
        for _ in range(WARMUP_CALLS):
            self._compute(buffer, inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outcome = self._compute(buffer, inputs)
        return _Captured(graph, buffer, outcome)
