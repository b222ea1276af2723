"""A serving setting with its prediction, and the settings of a search that none surpasses so far.

front.is_hopeless(setup, speed)      so far from the best that the scheduler need not be followed
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmb.perfmodel.serving_time.serving_predictor import ServingPrediction, steady_state
from llmb.perfmodel.serving_time.serving_setup import ServingSetup

# What following the scheduler finds beyond its steady state, at most, and the part of the best throughput below which a
# surpassed load is of no interest.
BEYOND_ESTIMATE, NEAR_BEST = 1.05, 0.9
Limits = Mapping[str, float]  # ttft_ms, tpot_ms, e2e_ms


@dataclass(frozen=True)
class ServingCandidate:
    """Settings of an engine with their prediction."""

    setup: ServingSetup
    prediction: ServingPrediction

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.prediction.output_tokens_per_s_per_gpu

    @property
    def tokens_per_s_per_user(self) -> float:
        return self.prediction.tokens_per_s_per_user

    def keeps(self, limits: Limits) -> bool:
        """Return whether every limited mean is within its limit."""
        return all(getattr(self.prediction, name) <= limit for name, limit in limits.items())


@dataclass
class ServingFront:
    """Candidates within the limits that no other surpasses in throughput and speed, so far."""

    limits: Limits
    candidates: list[ServingCandidate] = field(default_factory=list)

    def add(self, new: ServingCandidate) -> None:
        """Take a candidate that is not surpassed, for those that it surpasses."""
        throughput, speed = new.tokens_per_s_per_gpu, new.tokens_per_s_per_user
        if new.keeps(self.limits) and not self.surpasses(throughput, speed):
            self.candidates = [
                *(c for c in self.candidates if c.tokens_per_s_per_gpu > throughput or c.tokens_per_s_per_user > speed),
                new,
            ]

    def surpasses(self, throughput: float, speed: float) -> bool:
        """Return whether a candidate has as much of both."""
        return any(c.tokens_per_s_per_gpu >= throughput and c.tokens_per_s_per_user >= speed for c in self.candidates)

    def is_hopeless(self, setup: ServingSetup, speed: float) -> bool:
        """Return whether a load whose users get at most this speed is surpassed by far, without predicting it."""
        if setup.engine != "native" or not self.candidates:  # other engines are predicted as fast as estimated
            return False
        rate, tpot = steady_state(setup)
        throughput = BEYOND_ESTIMATE * rate / setup.gpus
        most = max(c.tokens_per_s_per_gpu for c in self.candidates)
        return throughput < NEAR_BEST * most and self.surpasses(throughput, min(speed, BEYOND_ESTIMATE / tpot))
