"""The forward and backward pass of a micro-batch, captured once as a CUDA graph and then replayed.

Launching a kernel costs the host a few microseconds, which a small model on a fast GPU does not hide. A graph launches
all kernels of a micro-batch at once. It fixes every address: tokens go in through the same two tensors each time, and
gradients are added up in tensors that stay, zeroed at the first micro-batch of a step instead of made anew.
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
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

    def __call__(self, model: nn.Module, add_gradients: AddGradients, tokens: Tensor, labels: Tensor) -> Tensor:
        """The share of the loss; valid until the next call."""
        self._attach_gradients()
        if self._eager_calls < WARMUP_CALLS:
            self._eager_calls += 1
            return self._warm_up(model, add_gradients, tokens, labels)
        if self._graph is None:
            self._graph = self._capture(add_gradients, tokens, labels)
        self._tokens.copy_(tokens)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._loss

    def clear(self) -> None:
        """Give back the memory of the graph and of its gradients; the next call begins anew."""
        self._eager_calls = 0
        self._graph = None
        self._gradients = []

    def _warm_up(self, model: nn.Module, add_gradients: AddGradients, tokens: Tensor, labels: Tensor) -> Tensor:
        """On the stream that will be captured, so that what is made once for each stream is there already."""
        if self._eager_calls == 1:
            self._stream = torch.cuda.Stream()
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            loss = add_gradients(tokens, labels)
        main.wait_stream(self._stream)
        self._gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        return loss

    def _capture(self, add_gradients: AddGradients, tokens: Tensor, labels: Tensor) -> torch.cuda.CUDAGraph:
        """Record what a call does without doing it."""
        self._tokens, self._labels = tokens.clone(), labels.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = add_gradients(self._tokens, self._labels)
        return graph

    def _attach_gradients(self) -> None:
        """After an optimizer step, which dropped them, the same tensors again, as zeros."""
        dropped = [(parameter, gradient) for parameter, gradient in self._gradients if parameter.grad is None]
        if dropped:
            torch._foreach_zero_([gradient for _, gradient in dropped])
        for parameter, gradient in dropped:
            parameter.grad = gradient
