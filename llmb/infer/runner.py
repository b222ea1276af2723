"""Computes steps on one device: a plan's numbers go there, the stack runs, tokens are chosen and come back.

What was chosen stays on the device too, one token a slot, so that the next step can be launched before the host has
read this one. Steps in which every sequence generates are replays of CUDA graphs where those are on (`graphs.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.infer.graphs import DecodeGraphs
from llmb.infer.sampler import greedy, sample, uniform
from llmb.infer.stack import Stack
from llmb.infer.staging import Sizes, Staging, StepTensors, cut
from llmb.infer.step import Plan


@dataclass
class LaunchedStep:
    """Tokens on their way to the host."""

    tokens_S: Tensor
    ready: torch.cuda.Event | None

    def tokens(self) -> list[int]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.tokens_S.tolist()


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
        self.blocks = -(-longest // block_tokens)
        self.longest = longest
        self.staging = Staging(slots, self.blocks, block_tokens, max(most_tokens, slots), self.device)
        self.newest = torch.zeros(slots + 1, dtype=torch.int64, device=self.device)  # the last is padding's
        self.graphs = DecodeGraphs(self.staging, self.compute, longest, self.newest, graph_sizes)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        parts = plan.sampling
        made = self.graphs.launch(plan)
        if made is None:
            step = self._upload(plan)
            logits_SV, tokens_S = self.compute(step)
            made = logits_SV, tokens_S, step.targets_S
        logits_SV, tokens_S, targets_S = made
        if any(part.sequence.request.sampling.temperature > 0 for part in parts):
            tokens_S = self._sampled(plan, logits_SV[: len(parts)])
            self.newest[targets_S[: len(parts)]] = tokens_S
        return self._fetched(tokens_S[: len(parts)])

    def compute(self, step: StepTensors) -> tuple[Tensor, Tensor]:
        """The logits of the rows that sample and their likeliest tokens, which become their slots' newest."""
        slot = (-1 - step.tokens_N).clamp(min=0)
        tokens_N = torch.where(step.tokens_N < 0, self.newest[slot], step.tokens_N)
        x_NC = self.stack.through(self.stack.embed(tokens_N), step.inputs)
        logits_SV = self.stack.logits(x_NC, step.rows_S)
        tokens_S = greedy(logits_SV)
        self.newest[step.targets_S] = tokens_S
        return logits_SV, tokens_S

    def _upload(self, plan: Plan) -> StepTensors:
        sizes = Sizes(plan.tokens, len(plan.parts), len(plan.sampling))
        longest = max((part.end for part in plan.parts), default=0)
        blocks = max(-(-longest // self.staging.block_tokens), 1)
        longs = torch.empty(sizes.longs, dtype=torch.int64, device=self.device)
        ints = torch.empty(sizes.ints(blocks), dtype=torch.int32, device=self.device)
        self.staging.load(plan, longs, ints, sizes, blocks)
        return cut(longs, ints, sizes, plan, longest, plan.decodes)

    def _sampled(self, plan: Plan, logits_SV: Tensor) -> Tensor:
        asked = [part.sequence for part in plan.sampling]
        # The step has counted its token as pending already: the place of the one that comes is one less.
        draws = [uniform(one.request.sampling.seed, part.end - len(one.request.prompt)) for one, part in zip(asked, plan.sampling, strict=True)]
        return sample(logits_SV, [one.request.sampling for one in asked], draws)

    def _fetched(self, tokens_S: Tensor) -> LaunchedStep:
        if self.device.type != "cuda":
            return LaunchedStep(tokens_S, None)
        host_S = torch.empty(tokens_S.shape, dtype=tokens_S.dtype, pin_memory=True)
        host_S.copy_(tokens_S, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return LaunchedStep(host_S, ready)
