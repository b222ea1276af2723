"""Acceptance of draft tokens: by greedy equality, or forced by probabilities where weights are random.

    GreedyAcceptance()                          output exactly as without drafts
    ForcedAcceptance((0.8, 0.7, 0.6), seed=1)   draft i is accepted with this probability if all before it were

A draft of random weights never guesses what a model of random weights says. With forced acceptance both are computed as
ever and only the comparison is replaced, so that the speed of a stated acceptance is measured. The text is then not
what the model would say. Whether a draft is accepted follows from the seed, the request and the position alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmb.serve.sampler import uniform
from llmb.serve.step_batch import REJECTED, ScheduledChunk


class Acceptance(Protocol):
    """Rule by which a draft token is accepted."""

    def accepts(self, chunk: ScheduledChunk, draft_token: int, model_token: int) -> bool:
        """Return whether the draft token of a chunk stands, where the model itself says `model_token`."""
        ...


class GreedyAcceptance:
    """Accept what greedy decoding would have produced, and nothing else."""

    def accepts(self, chunk: ScheduledChunk, draft_token: int, model_token: int) -> bool:
        return draft_token == model_token


@dataclass(frozen=True)
class ForcedAcceptance:
    """Accept by chance, with a probability for each draft position."""

    probabilities: tuple[float, ...]
    seed: int

    def accepts(self, chunk: ScheduledChunk, draft_token: int, model_token: int) -> bool:
        draw = uniform(self.seed + chunk.sequence.request.request_id, chunk.start)
        return draw < self.probabilities[chunk.draft - 1]


@dataclass
class AcceptanceCounts:
    """Counts of verified drafts; lists have one entry for each draft position."""

    verifications: int = 0  # of a sequence's newest token and at least one draft
    trials: list[int] = field(default_factory=list)  # drafts that were compared: all before them were accepted
    accepted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, num_drafts: int) -> "AcceptanceCounts":
        return cls(0, [0] * num_drafts, [0] * num_drafts)

    def reset(self) -> None:
        """Begin again, as after a warm-up."""
        self.verifications = 0
        for counts in (self.trials, self.accepted):
            counts[:] = [0] * len(counts)


def verify(
    chunks: Sequence[ScheduledChunk],
    tokens: Sequence[int],
    drafts: Sequence[int],
    acceptance: Acceptance,
    counts: AcceptanceCounts,
) -> list[int]:
    """Return the tokens that follow each chunk, REJECTED after a rejected draft and all drafts behind it.

    `tokens`: what the model says after each chunk; `drafts`: the draft tokens of the chunks, any number at the others.
    """
    verified = list(tokens)
    for index, chunk in enumerate(chunks):
        if not chunk.draft:
            continue
        counts.verifications += chunk.draft == 1
        before = verified[index - 1]
        if before == REJECTED:
            verified[index] = REJECTED
            continue
        accepted = acceptance.accepts(chunk, drafts[index], before)
        counts.trials[chunk.draft - 1] += 1
        counts.accepted[chunk.draft - 1] += accepted
        if not accepted:
            verified[index] = REJECTED
    return verified
