"""CUDA graphs of the forward and backward pass of a micro-batch.

A kernel launch costs the host a few microseconds and leaves a gap on the device; a graph launches all kernels of a
micro-batch at once. Addresses are fixed: tokens and labels are copied into static tensors, and gradients stay where
they were at capture. There are two graphs, which share a memory pool: the first micro-batch of a step writes gradients,
the others accumulate.

On several ranks a graph contains the collectives of a micro-batch: those of tp, cp and ep and, with fsdp, those of
weights and gradients. Otherwise weights are gathered before the first micro-batch and gradients are reduced after the
last, outside of the graphs and without overlap.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from llmb.train.parallel.fsdp import Gradients, ShardedParameters

WARMUP_CALLS = 3  # eager: kernels are compiled and tuned, libraries allocate their workspaces

AddGradients = Callable[[Tensor, Tensor], Tensor]  # tokens, labels -> a micro-batch's term of the mean loss


class MicroBatchGraph:
    """Graphed `add_gradients` of one model and one micro-batch shape; the first calls are eager."""

    def __init__(self) -> None:
        self._eager_calls = 0
        self._disabled = False
        self._captured: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by is_first; graph and loss
        self._gradients: dict[bool, Gradients] = {}  # by is_first

    def __call__(
        self, parameters: ShardedParameters, add_gradients: AddGradients, tokens: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the loss term; valid until the next call."""
        if self._disabled:
            return add_gradients(tokens, labels)
        is_first = not parameters.has_gradients
        if is_first not in self._captured:
            # Later micro-batches must accumulate into the gradients that the first one's graph writes.
            if self._eager_calls < WARMUP_CALLS or not (is_first or self._captured):
                return self._warm_up(add_gradients, tokens, labels)
            self._captured[is_first] = self._capture(add_gradients, tokens, labels)
            self._gradients[is_first] = parameters.gradients
        graph, loss = self._captured[is_first]
        self._tokens.copy_(tokens)
        self._labels.copy_(labels)
        graph.replay()
        parameters.gradients = self._gradients[is_first]
        return loss

    def disable(self) -> None:
        """Run every later call eagerly, and free the memory of the graphs."""
        self._disabled = True
        self.reset()

    def reset(self) -> None:
        """Free the graphs and capture others after another warm-up, because shapes inside have changed."""
        self._eager_calls = 0
        self._captured, self._gradients = {}, {}

    def _warm_up(self, add_gradients: AddGradients, tokens: Tensor, labels: Tensor) -> Tensor:
        """Run eagerly on the capture stream, so that per-stream state is initialized."""
        if self._eager_calls == 0:
            self._stream = torch.cuda.Stream()
        self._eager_calls += 1
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            loss = add_gradients(tokens, labels)
        main.wait_stream(self._stream)
        return loss

    def _capture(
        self, add_gradients: AddGradients, tokens: Tensor, labels: Tensor
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a call without executing it."""
        if not self._captured:
            self._tokens, self._labels = tokens.clone(), labels.clone()
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            loss = add_gradients(self._tokens, self._labels)
        return graph, loss
