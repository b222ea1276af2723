"""Goodput of a run in figures, as result.json has them. Null: not known, or not applicable."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class FaultCost:
    """One fault and what it cost."""

    kind: str  # of the plan, or `unplanned`: a failure that nobody injected
    step: int  # at which it struck
    rank: int | None = None
    at_s: float  # since the launch of the run
    detect_s: float | None = None  # until the run was known to have failed and all its processes had ended
    restart_s: float | None = None  # from then until the next start trained at its usual speed
    steps_lost: int | None = None  # done, and done again after the restart
    lost_s: float  # time of the work that was thrown away; of a slow rank, what it delayed the others
    reason: str | None = None  # of the failure, as it was detected


@dataclass(frozen=True, kw_only=True)
class KindCost:
    """All faults of one kind: means, and the sum of the steps lost."""

    faults: int
    detect_s: float | None
    restart_s: float | None
    steps_lost: int | None
    lost_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointAdvice:
    """The interval between checkpoints beside the best one, sqrt(2 * checkpoint cost * mean time between faults)."""

    every_steps: int
    interval_s: float  # work between two checkpoints
    checkpoint_s: float  # that a checkpoint blocks training
    between_faults_s: float  # mean, of time in which the run trained
    between_faults_source: str
    expected_fraction: float  # goodput that the same model expects at this interval, with the measured outages
    best_interval_s: float
    best_every_steps: int
    best_expected_fraction: float


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Useful tokens over wall time, of a run that restarts after failures."""

    injected: str | None  # which faults were injected on purpose; null: none, failures were real
    planned_faults: int
    restarts: int
    wall_s: float  # from the launch of the run to its end
    useful_tokens: int  # of every step once
    tokens_per_s: float  # useful tokens over wall time
    fraction: float | None  # of the throughput between faults, 0 to 1
    seconds: dict[str, float]  # wall time by what it went into
    faults: tuple[FaultCost, ...] = ()
    by_kind: dict[str, KindCost] = field(default_factory=dict)
    repeated_steps: int = 0  # done again after restarts
    repeated_losses_differ: int = 0  # steps of these, with another loss or gradient norm than before
    largest_loss_difference: float = 0.0  # of these
    checkpoints: CheckpointAdvice | None = None
