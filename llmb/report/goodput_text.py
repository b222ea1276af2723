"""Text of a run with faults: the plan before it, goodput and the cost of each kind of fault after it."""

from llmb.config.faults.fault_plan import FaultInjection
from llmb.report.table import number, render
from llmb.results.goodput.goodput_result import CheckpointAdvice, Goodput

KIND_HEADER = ("fault", "count", "detect", "restart", "steps lost", "time lost")


def goodput_text(goodput: Goodput, width: int | None = None) -> str:
    """Return goodput, where the wall time went, the cost by kind of fault, and the best checkpoint interval."""
    lines = [
        headline(goodput),
        "wall time: " + ", ".join(f"{name} {number(seconds)} s" for name, seconds in goodput.seconds.items()),
    ]
    if goodput.repeated_steps:
        differ = goodput.repeated_losses_differ
        outcome = "each with the same loss, bit for bit"
        if differ:
            outcome = f"{differ} WITH ANOTHER LOSS, by at most {goodput.largest_loss_difference:.3g}"
        lines.append(f"steps done again after restarts: {goodput.repeated_steps}, {outcome}")
    if goodput.by_kind:
        rows = [
            (
                kind,
                cost.faults,
                _seconds(cost.detect_s),
                _seconds(cost.restart_s),
                cost.steps_lost,
                _seconds(cost.lost_s),
            )
            for kind, cost in goodput.by_kind.items()
        ]
        lines += ["", render(KIND_HEADER, rows, width), "(detect and restart are means over the faults of a kind)"]
    if goodput.checkpoints is not None:
        lines += ["", *checkpoint_lines(goodput.checkpoints, goodput.fraction)]
    return "\n".join(lines)


def headline(goodput: Goodput) -> str:
    """Return goodput and the kind of its failures in one line."""
    kind = f"faults injected on purpose: {goodput.injected}" if goodput.injected else "failures were real"
    fraction = f", {100 * goodput.fraction:.1f} % of the throughput" if goodput.fraction is not None else ""
    rate = f"{number(goodput.tokens_per_s)} useful tokens/s over {number(goodput.wall_s)} s of wall time"
    return f"goodput: {rate}{fraction} ({restarts(goodput)}; {kind})"


def restarts(goodput: Goodput) -> str:
    """Return the number of restarts with its noun."""
    return f"{goodput.restarts} restart{'' if goodput.restarts == 1 else 's'}"


def fault_lines(plan: FaultInjection) -> str:
    """Return the faults that a run will inject, in one line."""
    faults = ", ".join(f"{fault.kind} at step {fault.step} on rank {fault.rank}" for fault in plan.faults)
    return f"faults injected on purpose ({plan.source}): {faults}"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{number(value)} s"


def checkpoint_lines(advice: CheckpointAdvice, fraction: float | None) -> list[str]:
    """Return the interval between checkpoints in use, and the best one, with the goodput expected of each."""
    terms = f"sqrt(2 x {number(advice.checkpoint_s)} s x {number(advice.between_faults_s)} s)"
    has_ratio = fraction is not None and advice.expected_fraction > 0
    measured = f"; measured is {(fraction or 0.0) / advice.expected_fraction:.3f} of that" if has_ratio else ""
    return [
        f"checkpoints: every {advice.every_steps} steps ({number(advice.interval_s)} s), each blocks training for "
        f"{number(advice.checkpoint_s)} s; expected goodput {100 * advice.expected_fraction:.1f} %{measured}",
        f"best interval: {number(advice.best_interval_s)} s = {terms}, checkpoint cost and mean time between faults "
        f"({advice.between_faults_source}): every {advice.best_every_steps} steps, expected goodput "
        f"{100 * advice.best_expected_fraction:.1f} %",
    ]
