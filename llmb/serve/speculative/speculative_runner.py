"""Model runner of speculative decoding: the draft model proposes, the target verifies, in one launch.

    SpeculativeRunner(target, draft, GreedyAcceptance()).launch(batch)

A batch names, for each decoding sequence, its newest token and the drafts after it, each as a row of its own: the
target computes them as so many decodes that share a block table, so that graphs and kernels of decodes serve, and its
arithmetic is that of plain decoding, whatever the dtype of the cache. Before, the draft model computes the newest token
and the one before it (which it has not seen if the target added it to drafts that were all accepted), then one draft
after another. Its KV cache has the blocks of the target, so a rejected token is rolled back in both by the scheduler.
Draft tokens stay on the device; the host reads them with those of the target, once for each launch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.serve.model_runner import LaunchedStep, TorchModelRunner
from llmb.serve.request import TokenLogprobs
from llmb.serve.speculative.acceptance import Acceptance, AcceptanceCounts, verify
from llmb.serve.step_batch import ScheduledChunk, StepBatch
from llmb.serve.step_graphs import GraphSize


@dataclass(frozen=True)
class SpeculativeStep:
    """A launched step of the target, and the draft tokens it verifies on their way to the host."""

    step: LaunchedStep
    chunks: list[ScheduledChunk]  # that sample
    draft_tokens: Tensor  # of all slots, as in `TorchModelRunner.last_tokens`
    slots: int
    acceptance: Acceptance
    counts: AcceptanceCounts

    @property
    def graph_size(self) -> GraphSize | None:
        return self.step.graph_size

    def is_done(self) -> bool:
        return self.step.is_done()

    def tokens(self) -> list[int]:
        tokens = self.step.tokens()  # waits for the drafts too, which were copied before
        by_slot = self.draft_tokens.tolist()
        drafts = [by_slot[chunk.draft * (self.slots + 1) + (chunk.sequence.slot or 0)] for chunk in self.chunks]
        return verify(self.chunks, tokens, drafts, self.acceptance, self.counts)

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return {}  # refused by the scheduler


class SpeculativeRunner:
    """A target with its draft model. `counts`: of what was accepted since they were reset."""

    def __init__(self, target: TorchModelRunner, draft: TorchModelRunner, acceptance: Acceptance):
        self.target, self.draft, self.acceptance = target, draft, acceptance
        self.counts = AcceptanceCounts.of(target.staging.num_drafts)

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> SpeculativeStep:
        """Launch the steps of the draft model and that of the target."""
        for draft_batch in draft_batches(batch):
            self.draft.run(draft_batch)
        draft_tokens = self.target.copy_to_host(self.target.last_tokens.clone()).tokens_S
        step = self.target.launch(batch)
        slots, chunks = self.target.staging.slots, batch.sampling_chunks
        return SpeculativeStep(step, chunks, draft_tokens, slots, self.acceptance, self.counts)


def draft_batches(batch: StepBatch) -> list[StepBatch]:
    """Return the steps of the draft model before the target computes a batch.

    The first computes everything that the sequences have, and proposes the first draft where there is to be one; step i
    computes draft i - 1 and proposes draft i. Prompts are computed with the first, as the target does.
    """
    has_drafts = {id(chunk.sequence) for chunk in batch.chunks if chunk.draft}
    chunks: list[ScheduledChunk] = []
    for chunk in batch.chunks:
        if chunk.draft:
            continue
        if chunk.num_tokens == 1 and chunk.start:
            chunks.append(ScheduledChunk(chunk.sequence, chunk.start - 1, 1, False))
        samples = id(chunk.sequence) in has_drafts
        chunks.append(ScheduledChunk(chunk.sequence, chunk.start, chunk.num_tokens, samples))
    batches = [StepBatch(chunks, repeats_sequences=True, samples_drafts=True)]
    most = max((chunk.draft for chunk in batch.chunks), default=0)
    for draft in range(1, most):
        followed = {id(chunk.sequence) for chunk in batch.chunks if chunk.draft == draft + 1}
        rows = [chunk for chunk in batch.chunks if chunk.draft == draft and id(chunk.sequence) in followed]
        batches.append(StepBatch(rows, samples_drafts=True))
    return batches
