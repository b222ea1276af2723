"""Lines of a running sweep: the plan with its cost, each point as it starts and ends, and the time that is left."""

import sys
from collections.abc import Sequence
from typing import TextIO

from llmb.events import Event, ServingSample
from llmb.loadgen.sweep.sweep_plan import PointLoad, SweepPlan
from llmb.report.status_line import StatusLine
from llmb.report.table import number
from llmb.report.terminal.clock_time import format_duration
from llmb.results.sweep.sweep_points import PointKey, SweepPoint, exclusion
from llmb.results.sweep.sweep_result import SweepResult


def describe_plan(plan: SweepPlan) -> str:
    """Return what will be measured and what it costs, before it starts."""
    cost = plan.estimate()
    loads = ", ".join(f"{load:g}" for load in plan.ladder)
    if plan.search:
        loads = f"searched from {plan.ladder[0]:g} to {plan.ladder[-1]:g}"
    lines = [f"sweep of {plan.target or plan.name}", f"{plan.load_kind}: {loads}"]
    lines += [f"variants: {', '.join(plan.variants)}"] if plan.variants != ("",) else []
    lines += [f"tier {name}: {limits}" for name, limits in plan.tiers.items()]
    tokens = "" if cost.tokens is None else f", {number(cost.tokens)} tokens"
    least = "" if plan.search else "at least "
    longer = "the server falls behind" if plan.load_kind == "rate" else f"{plan.waves:g} requests per user take longer"
    most = "at most " if plan.search else ""
    time = format_duration(cost.seconds)
    lines.append(f"{most}{cost.points} points of about {plan.point_s:g} s: {time}, and more where {longer}")
    if not plan.search:
        lines.append(f"{least}{cost.requests:,} requests{tokens}")
    return "\n".join(lines)


class SweepProgress:
    """Printer of a sweep's progress; on a terminal the current point has a live line."""

    def __init__(self, plan: SweepPlan, output: TextIO):
        self._plan, self._output = plan, output
        self._label, self._line = "", StatusLine()

    def start(self, key: PointKey, load: PointLoad, points: Sequence[SweepPoint]) -> None:
        """Announce a point."""
        self._label = f"{key.load_kind} {key.load:g}" + (f" ({key.variant})" if key.variant else "")
        if self._plan.repeats > 1:
            self._label += f", repeat {key.repeat}"
        counted = load.for_s is None or self._plan.mode == "in_process"
        amount = f"{load.requests} requests" if counted else f"requests for {load.for_s:g} s"
        planned = f"of at most {self._plan.most_points}" if self._plan.search else f"of {self._plan.most_points}"
        self.say(f"[{len(points) + 1} {planned}] {self._label}: {amount}{self._left(points)}")

    def _left(self, points: Sequence[SweepPoint]) -> str:
        """Return the expected time of this point and those after it, from the latencies so far."""
        seconds = self._plan.seconds_left({p.key.load: (p.result.e2e_ms or {}).get("p50") for p in points})
        return "" if seconds is None else f"; about {format_duration(seconds)} left"

    def done(self, point: SweepPoint, result: SweepResult) -> None:
        """Print the figures of a finished point."""
        self.clear()
        figures, words = point.result, []
        for value, unit in (
            (figures.output_tokens_per_s, "output tokens/s"),
            (figures.output_tokens_per_s_per_user, "tokens/s/user"),
            ((figures.ttft_ms or {}).get("p99"), "ms TTFT p99"),
            ((figures.tpot_ms or {}).get("p99"), "ms TPOT p99"),
        ):
            words += [f"{number(value)} {unit}"] if value is not None else []
        problem = exclusion(point)
        words += [f"EXCLUDED: {problem}"] if problem else []
        print(f"  {', '.join(words)} ({point.wall_s:.1f} s)", file=self._output, flush=True)

    def say(self, line: str) -> None:
        """Print a line."""
        self.clear()
        print(line, file=self._output, flush=True)

    def on_event(self, event: Event) -> None:
        """Show the requests of the current point on a terminal."""
        if isinstance(event, ServingSample) and sys.stderr.isatty():
            total = "" if event.requests is None else f" of {event.requests}"
            fraction = event.done / event.requests if event.requests else None
            self._line.draw(f"{self._label}: {event.done}{total} done, {event.running or 0} running", fraction=fraction)

    def clear(self) -> None:
        """Erase the live line."""
        self._line.erase()
