"""Model runner of a pipeline stage: receives the residual from the previous stage and sends it to the next.

Every stage schedules for itself, with the same result, so that no batch has to be sent. The last stage samples the
tokens and broadcasts them; the other stages wait for them only when the step is read. By then further steps have been
launched, one for each stage, and all stages are busy.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.serve.input_staging import StepBuffer
from llmb.serve.model_runner import EMPTY_STEP, LaunchedStep, TorchModelRunner
from llmb.serve.rank_groups import PendingTransfer
from llmb.serve.sampler import LogprobRows
from llmb.serve.step_batch import StepBatch


class PipelineStageRunner(TorchModelRunner):
    """The layers of one pipeline stage and their KV cache."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.stage = self.model.groups.stage
        self.copy_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> LaunchedStep:
        """Launch the step, unless no rank of the expert group has tokens to compute."""
        if not self.model.groups.experts.begin_step(batch.num_tokens):
            return EMPTY_STEP
        buffer, inputs = self.upload(batch)
        x_NC = self.model.forward(self._stage_input(batch, buffer), inputs)
        if self.stage.is_last:
            output, chunks = self.sample_greedy(x_NC, buffer), batch.sampling_chunks
            tokens_S = self.sample(output, chunks)
            return self._broadcast_tokens(tokens_S, self.logprobs(output, tokens_S, chunks))
        return self._send(x_NC, batch)

    def _stage_input(self, batch: StepBatch, buffer: StepBuffer) -> Tensor:
        """Return the residual that enters this stage. Steps of padding only are not transferred."""
        if self.stage.is_first:
            return self.embed(buffer)
        x_NC = torch.zeros(len(buffer.tokens_N), self.model.spec.hidden, dtype=self.model.dtype, device=self.device)
        return self.stage.receive(x_NC) if batch.chunks else x_NC

    def _broadcast_tokens(self, tokens_S: Tensor, logprob_rows: LogprobRows | None) -> LaunchedStep:
        step = self.copy_to_host(tokens_S, logprob_rows)
        if len(tokens_S) and (transfer := self.stage.broadcast_tokens(tokens_S)):
            step.transfers = [transfer]
        return step

    def _send(self, x_NC: Tensor, batch: StepBatch) -> LaunchedStep:
        sent = self.stage.send(x_NC) if batch.chunks else None
        tokens_S = torch.empty(len(batch.sampling_chunks), dtype=torch.int64, device=self.device)
        received = self.stage.broadcast_tokens(tokens_S) if batch.sampling_chunks else None
        step = self._copy_received(tokens_S, received)
        step.transfers = [transfer for transfer in (received, sent) if transfer is not None]
        return step

    def _copy_received(self, tokens_S: Tensor, received: PendingTransfer | None) -> LaunchedStep:
        if received is None or self.copy_stream is None:
            return self.copy_to_host(tokens_S)
        with torch.cuda.stream(self.copy_stream):  # the compute stream must not wait for the tokens
            received.wait()
            step = self.copy_to_host(tokens_S)
        tokens_S.record_stream(self.copy_stream)
        return step
