"""Computes steps on one device: a plan's numbers go there, the stack runs, tokens are chosen and come back.

What was chosen stays on the device too, one token a slot, so that the next step can be launched before the host has
read this one. Steps in which every sequence generates are replays of CUDA graphs where those are on (`graphs.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.infer.graphs import DecodeGraphs, Outcome
from llmb.infer.sampler import greedy, sample, uniform
from llmb.infer.stack import Stack
from llmb.infer.staging import Sizes, Staging, StepBuffer
from llmb.infer.step import Inputs, Part, Plan


@dataclass
class LaunchedStep:
    """Tokens on their way to the host."""

    tokens_S: Tensor
    ready: torch.cuda.Event | None

    def tokens(self) -> list[int]:
        if self.ready is not None:
            self.ready.synchronize()
        tokens: list[int] = self.tokens_S.tolist()
        return tokens


class TorchRunner:
    """One stack, its cache, and what each slot's newest token is."""

    def __init__(
        self,
        stack: Stack,
        slots: int,
        longest: int,
        block_tokens: int,
        most_tokens: int,
        graph_sizes: tuple[int, ...] = (),
    ):
        self.stack, self.device = stack, stack.ranks.device
        blocks = -(-longest // block_tokens)
        self.staging = Staging(slots, blocks, block_tokens, most_tokens, self.device)
        self.newest = torch.zeros(slots + 1, dtype=torch.int64, device=self.device)  # the last is padding's
        self.graphs = DecodeGraphs(self.staging, self.compute, longest, self.newest, graph_sizes)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Begin the step. Its likeliest tokens come with it; drawn ones take their place where any are asked for."""
        logits_SV, tokens_S, targets_S = self.graphs.launch(plan) or self._computed(plan)
        parts = plan.sampling
        if any(part.sequence.request.sampling.temperature > 0 for part in parts):
            tokens_S = drawn(logits_SV[: len(parts)], parts)
            self.newest[targets_S[: len(parts)]] = tokens_S
        return self._fetched(tokens_S[: len(parts)])

    def compute(self, buffer: StepBuffer, inputs: Inputs) -> Outcome:
        """The logits of the rows that sample and their likeliest tokens, which become their slots' newest."""
        slot_N = (-1 - buffer.tokens_N).clamp(min=0)
        tokens_N = torch.where(buffer.tokens_N < 0, self.newest[slot_N], buffer.tokens_N)
        x_NC = self.stack.through(self.stack.embed(tokens_N), inputs)
        logits_SV = self.stack.logits(x_NC, buffer.rows_S)
        tokens_S = greedy(logits_SV)
        self.newest[buffer.targets_S] = tokens_S
        return Outcome(logits_SV, tokens_S, buffer.targets_S)

    def _computed(self, plan: Plan) -> Outcome:
        """Without a graph, in exactly the plan's sizes."""
        longest = max((part.end for part in plan.parts), default=0)
        sizes = Sizes(
            tokens=plan.tokens,
            parts=len(plan.parts),
            samples=len(plan.sampling),
            blocks=max(1, -(-longest // self.staging.block_tokens)),
        )
        buffer = StepBuffer.on(self.device, sizes)
        self.staging.load(plan, buffer)
        return self.compute(buffer, buffer.inputs(plan, longest, plan.decodes))

    def _fetched(self, tokens_S: Tensor) -> LaunchedStep:
        if self.device.type != "cuda":
            return LaunchedStep(tokens_S, None)
        host_S = torch.empty(tokens_S.shape, dtype=tokens_S.dtype, pin_memory=True)
        host_S.copy_(tokens_S, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return LaunchedStep(host_S, ready)


def drawn(logits_SV: Tensor, parts: list[Part]) -> Tensor:
    """A token for each part that samples, by its request's settings.

    The draw follows from the seed and the place in the answer of the token that comes: the part ends just before it.
    """
    requests = [part.sequence.request for part in parts]
    places = [part.end - len(request.prompt) for part, request in zip(parts, requests, strict=True)]
    samplings = [request.sampling for request in requests]
    draws = [uniform(sampling.seed, place) for sampling, place in zip(samplings, places, strict=True)]
    return sample(logits_SV, samplings, draws)
