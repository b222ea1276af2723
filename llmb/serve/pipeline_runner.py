"""Computes one pipeline stage's layers of each step: the stream comes from the stage before and goes on to the next.

Every stage plans for itself, alike, so that nobody has to be told what comes. The last one chooses the tokens and tells
all others, where they are awaited only when the step is read: until then other steps have been launched, one for
each stage, and all stages are busy.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.serve.input_staging import StepBuffer
from llmb.serve.model_runner import NOTHING, LaunchedStep, TorchRunner
from llmb.serve.rank_groups import Travelling
from llmb.serve.step_batch import Plan


class StageRunner(TorchRunner):
    """A stage's layers and their cache."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.stage = self.stack.ranks.stage
        self.reading = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Begin the step, unless no rank that shares the experts has anything to compute."""
        if not self.stack.ranks.experts.begin(plan.tokens):
            return NOTHING
        buffer, inputs = self.load(plan)
        x_NC = self.stack.through(self._enter(plan, buffer), inputs)
        if self.stage.last:
            return self._tell(self.settle(self.choose(x_NC, buffer), plan.sampling))
        return self._pass_on(x_NC, plan)

    def _enter(self, plan: Plan, buffer: StepBuffer) -> Tensor:
        """The stream as it enters this stage. What is only padding does not travel."""
        if self.stage.first:
            return self.embed(buffer)
        x_NC = torch.zeros(len(buffer.tokens_N), self.stack.model.hidden, dtype=self.stack.dtype, device=self.device)
        return self.stage.receive(x_NC) if plan.parts else x_NC

    def _tell(self, tokens_S: Tensor) -> LaunchedStep:
        launched = self.fetch(tokens_S)
        if len(tokens_S) and (told := self.stage.share(tokens_S)):
            launched.travelling = [told]
        return launched

    def _pass_on(self, x_NC: Tensor, plan: Plan) -> LaunchedStep:
        sent = self.stage.send(x_NC) if plan.parts else None
        tokens_S = torch.empty(len(plan.sampling), dtype=torch.int64, device=self.device)
        told = self.stage.share(tokens_S) if plan.sampling else None
        launched = self._await(tokens_S, told)
        launched.travelling = [one for one in (told, sent) if one is not None]
        return launched

    def _await(self, tokens_S: Tensor, told: Travelling | None) -> LaunchedStep:
        if told is None or self.reading is None:
            return self.fetch(tokens_S)
        with torch.cuda.stream(self.reading):  # the stream that computes must not wait for what will be chosen
            told.wait()
            launched = self.fetch(tokens_S)
        tokens_S.record_stream(self.reading)
        return launched
