"""Part `kernels` of `train_gpu.py`: time of a step by class of kernels, against lower bounds, and idle time."""

from collections.abc import Iterable
from typing import Any

from llmb.config.spec import RunConfig
from llmb.perfmodel.hardware import TERA
from training.train_bench import Bench
from training.train_calls import step_seconds
from training.train_lower_bounds import gemm_lower_bound, lower_bounds
from training.train_rows import Row
from training.train_run import PROFILED, Trained
from training.train_trace import CLASSES, COPIES, IDLE, OTHER, StepBreakdown, split_trace

IDLE_AIM = 0.01  # of the timeline
NAMED = (COPIES, OTHER)  # classes whose longest kernels are named, so that nothing hides


def kernels(bench: Bench, row: Row, config: RunConfig, trained: Trained) -> None:
    """Print two tables: classes of kernels, and GEMMs by size."""
    breakdown = split_trace(trained.trace, bench.device.type == "cuda", PROFILED)
    bounds = lower_bounds(config, bench.seconds, bench.memory)
    lines = [
        (
            kind,
            *_with_excess(breakdown.kinds.get(kind), bounds.get(kind)),
            breakdown.kinds.get(kind, 0.0) / breakdown.span,
        )
        for kind in CLASSES
        if kind in breakdown.kinds or bounds.get(kind)
    ]
    ceiling = step_seconds(config, bench.seconds)
    idle, untraced_idle = breakdown.idle / breakdown.span, _untraced_idle(breakdown, trained)
    lines.append((IDLE, *_with_excess(breakdown.idle, 0.0), idle))
    lines.append(("step, under the profiler", *_with_excess(breakdown.span, ceiling), 1.0))
    lines.append(("step, without it", *_with_excess(trained.step_s, ceiling), None))
    bench.print_table(
        f"{row.title}: time of a step",
        ("class", "ms", "lower bound ms", "excess ms", "fraction"),
        lines,
        f"idle {idle:.2%} of the timeline, aim less than {IDLE_AIM:.0%}; of the untraced step {untraced_idle:.2%}",
        "recomputation, and GEMMs cut smaller than the libraries' best, are excess",
        *(f"{kind}: {1e3 * s:.2f} ms {name[:100]}" for kind in NAMED for name, s in breakdown.longest.get(kind, [])),
        *(f"{IDLE}: {1e3 * s:.2f} ms before {name[:100]}" for name, s in breakdown.gaps),
    )
    _print_gemms(bench, row, breakdown)
    bench.record("kernels", _record(row, breakdown, bounds, trained))


def _print_gemms(bench: Bench, row: Row, breakdown: StepBreakdown) -> None:
    lines = []
    for size, (calls, seconds) in sorted(breakdown.products.items(), key=lambda item: -item[1][1]):
        rate = size.flops * calls / seconds / TERA if size.flops else None
        lines.append((str(size), calls, *_with_excess(seconds, gemm_lower_bound(size, calls, bench.seconds)), rate))
    bench.print_table(
        f"{row.title}: GEMMs of a step, by size",
        ("GEMM", "calls", "ms", "lower bound ms", "excess ms", "TFLOP/s"),
        lines,
        "lower bound: the library's best time of this size, else the mean rate of the dtype",
    )


def _untraced_idle(breakdown: StepBreakdown, trained: Trained) -> float:
    """Return the idle fraction of a step without the profiler, which delays the host."""
    return max(0.0, 1 - (breakdown.span - breakdown.idle) / trained.step_s)


def _with_excess(spent: float | None, floor: float | None) -> tuple[float | None, ...]:
    """Return both and their difference, in milliseconds."""
    excess = None if spent is None or floor is None else spent - floor
    return tuple(None if seconds is None else 1e3 * seconds for seconds in (spent, floor, excess))


def _record(row: Row, breakdown: StepBreakdown, bounds: dict[str, float], trained: Trained) -> dict[str, Any]:
    return {
        "title": row.title,
        "span_s": breakdown.span,
        "step_s": trained.step_s,
        "idle_s": breakdown.idle,
        "idle_share": breakdown.idle / breakdown.span,
        "idle_share_untraced": _untraced_idle(breakdown, trained),
        "kinds_s": breakdown.kinds,
        "floors_s": bounds,
        "products": [
            {"product": str(size), "calls": calls, "seconds": seconds}
            for size, (calls, seconds) in breakdown.products.items()
        ],
        "longest": {kind: _named(names) for kind, names in breakdown.longest.items()},
        "gaps": _named(breakdown.gaps),
    }


def _named(names: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"name": name, "seconds": seconds} for name, seconds in names]
