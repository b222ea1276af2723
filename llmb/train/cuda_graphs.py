"""The forward and backward pass of a micro-batch, captured as CUDA graphs and then replayed.

Launching a kernel costs the host a few microseconds, and the device a pause; a graph launches all kernels of a
micro-batch at once. It fixes every address: tokens go in through the same two tensors each time, and gradients stay
where they were when it was captured. There are two: one of the first micro-batch of a step, which writes gradients, one
of the others, which add to them; both use the same memory in between.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARMUP_CALLS = 3  # eager: kernels are compiled and chosen, libraries take their workspaces

AddGradients = Callable[[Tensor, Tensor], Tensor]  # tokens, labels -> a micro-batch's share of the loss


class MicroBatchGraph:
    """Does what `add_gradients` does, for one model and one shape of micro-batch; the first calls are eager."""

    def __init__(self) -> None:
        self._eager_calls = 0
        self._retired = False
        self._captured: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by whether gradients begin; and the loss
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

    def __call__(self, model: nn.Module, add_gradients: AddGradients, tokens: Tensor, labels: Tensor) -> Tensor:
        """The share of the loss; valid until the next call."""
        if self._retired:
            return add_gradients(tokens, labels)
        begins = all(parameter.grad is None for parameter in model.parameters())
        if begins not in self._captured:
            # Gradients that later micro-batches add to must be those that the first one's graph writes.
            if self._eager_calls < WARMUP_CALLS or not (begins or self._captured):
                return self._warm_up(add_gradients, tokens, labels)
            self._captured[begins] = self._capture(add_gradients, tokens, labels)
            self._gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        elif begins:
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
        graph, loss = self._captured[begins]
        self._tokens.copy_(tokens)
        self._labels.copy_(labels)
        graph.replay()
        return loss

    def retire(self) -> None:
        """Every call from now on is eager; the memory of the graphs is given back."""
        self._retired = True
        self._captured, self._gradients = {}, []

    def _warm_up(self, add_gradients: AddGradients, tokens: Tensor, labels: Tensor) -> Tensor:
        """On the stream that will be captured, so that what is made once for each stream is there already."""
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
        """Record what a call does without doing it."""
        if not self._captured:
            self._tokens, self._labels = tokens.clone(), labels.clone()
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            loss = add_gradients(self._tokens, self._labels)
        return graph, loss
