"""Computes steps on one device: a plan's numbers go there, the stack runs, tokens are chosen and come back.

What was chosen stays on the device too, one token a slot, so that the next step can be launched before the host has
read this one. Steps in which every sequence generates are replays of CUDA graphs where those are on (`decode_graphs.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.serve.decode_graphs import DecodeGraphs, Outcome
from llmb.serve.input_staging import TURNS, Sizes, Staging, StepBuffer
from llmb.serve.layers.served_model import Stack
from llmb.serve.rank_groups import Travelling
from llmb.serve.sampler import greedy, sample, uniform
from llmb.serve.step_batch import Inputs, Part, Plan


@dataclass
class LaunchedStep:
    """Tokens on their way to the host, and whatever else of the step is still on its way to another rank."""

    tokens_S: Tensor
    ready: torch.cuda.Event | None = None
    travelling: Sequence[Travelling] = ()

    def tokens(self) -> list[int]:
        if self.ready is not None:
            self.ready.synchronize()
        for one in self.travelling:
            one.wait()
        tokens: list[int] = self.tokens_S.tolist()
        return tokens


NOTHING = LaunchedStep(torch.empty(0, dtype=torch.int64))


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
        turns = max(TURNS, stack.ranks.stage.size + 1)  # as many steps as stages are under way
        self.staging = Staging(slots, blocks, block_tokens, most_tokens, self.device, turns)
        self.newest = torch.zeros(slots + 1, dtype=torch.int64, device=self.device)  # the last is padding's
        self.graphs = DecodeGraphs(self.staging, self.compute, longest, self.newest, graph_sizes)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Begin the step, unless no rank that shares the experts has anything to compute."""
        if not self.stack.ranks.experts.begin(plan.tokens):
            return NOTHING
        outcome = self.graphs.launch(plan) or self.compute(*self.load(plan))
        return self.fetch(self.settle(outcome, plan.sampling))

    def compute(self, buffer: StepBuffer, inputs: Inputs) -> Outcome:
        """The whole step, from tokens to tokens."""
        return self.choose(self.stack.through(self.embed(buffer), inputs), buffer)

    def embed(self, buffer: StepBuffer) -> Tensor:
        """The stream as it enters the first layer; tokens that the host does not know are the slots' newest."""
        slot_N = (-1 - buffer.tokens_N).clamp(min=0)
        return self.stack.embed(torch.where(buffer.tokens_N < 0, self.newest[slot_N], buffer.tokens_N))

    def choose(self, x_NC: Tensor, buffer: StepBuffer) -> Outcome:
        """The logits of the rows that sample and their likeliest tokens, which become their slots' newest."""
        logits_SV = self.stack.logits(x_NC, buffer.rows_S)
        tokens_S = greedy(logits_SV)
        self.newest[buffer.targets_S] = tokens_S
        return Outcome(logits_SV, tokens_S, buffer.targets_S)

    def settle(self, outcome: Outcome, parts: list[Part]) -> Tensor:
        """The tokens: the likeliest, or drawn ones where any are asked for, which then are the slots' newest."""
        count = len(parts)
        if all(part.sequence.request.sampling.temperature == 0 for part in parts):
            return outcome.tokens_S[:count]
        tokens_S = self.stack.ranks.dense.agree(drawn(outcome.logits_SV[:count], parts))
        self.newest[outcome.targets_S[:count]] = tokens_S
        return tokens_S

    def load(self, plan: Plan) -> tuple[StepBuffer, Inputs]:
        """In exactly the plan's sizes, for no graph; an empty one gets a row of padding, as kernels want one."""
        longest = max((part.end for part in plan.parts), default=1)
        sizes = Sizes(
            tokens=max(1, plan.tokens),
            parts=max(1, len(plan.parts)),
            samples=len(plan.sampling),
            blocks=-(-longest // self.staging.block_tokens),
        )
        buffer = StepBuffer.on(self.device, sizes)
        self.staging.load(plan, buffer)
        return buffer, buffer.inputs(plan, longest, plan.decodes if plan.parts else 1)

    def fetch(self, tokens_S: Tensor) -> LaunchedStep:
        """The tokens begin to travel to the host."""
        if self.device.type != "cuda":
            return LaunchedStep(tokens_S)
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
