"""Part `kernels` of `train_gpu.py`: one step taken apart, each class of kernels beside its floor, and what is idle."""

from collections.abc import Iterable
from typing import Any

from train_bench import Bench
from train_calls import step_seconds
from train_floors import floors, product_floor
from train_rows import Row
from train_run import PROFILED, Trained
from train_trace import CLASSES, COPIES, IDLE, OTHER, TakenApart, taken_apart

from llmb.config.spec import RunConfig
from llmb.perfmodel.hardware import TERA

IDLE_AIM = 0.01  # of the timeline
NAMED = (COPIES, OTHER)  # classes whose longest kernels are named, so that nothing hides


def kernels(bench: Bench, row: Row, config: RunConfig, trained: Trained) -> None:
    """Two tables: classes, and matrix products by size."""
    found = taken_apart(trained.trace, bench.device.type == "cuda", PROFILED)
    least = floors(config, bench.seconds, bench.memory)
    lines = [
        (kind, *_beside(found.kinds.get(kind), least.get(kind)), found.kinds.get(kind, 0.0) / found.span)
        for kind in CLASSES
        if kind in found.kinds or least.get(kind)
    ]
    ceiling = step_seconds(config, bench.seconds)
    idle, rest = found.idle / found.span, _rest(found, trained)
    lines.append((IDLE, *_beside(found.idle, 0.0), idle))
    lines.append(("step, under the profiler", *_beside(found.span, ceiling), 1.0))
    lines.append(("step, without it", *_beside(trained.step_s, ceiling), None))
    bench.say(
        f"{row.title}: where a step goes",
        ("class", "ms", "floor ms", "excess ms", "share"),
        lines,
        f"idle {idle:.2%} of the timeline, aim less than {IDLE_AIM:.0%}; of the step without the profiler {rest:.2%}",
        "what is computed again, and products that are cut smaller than the libraries' best, are excess",
        *(f"{kind}: {1e3 * s:.2f} ms {name[:100]}" for kind in NAMED for name, s in found.longest.get(kind, [])),
        *(f"{IDLE}: {1e3 * s:.2f} ms before {name[:100]}" for name, s in found.gaps),
    )
    _say_products(bench, row, found)
    bench.keep("kernels", _record(row, found, least, trained))


def _say_products(bench: Bench, row: Row, found: TakenApart) -> None:
    lines = []
    for size, (calls, seconds) in sorted(found.products.items(), key=lambda item: -item[1][1]):
        rate = size.flops * calls / seconds / TERA if size.flops else None
        lines.append((str(size), calls, *_beside(seconds, product_floor(size, calls, bench.seconds)), rate))
    bench.say(
        f"{row.title}: matrix products of a step, by size",
        ("product", "calls", "ms", "floor ms", "excess ms", "TFLOP/s"),
        lines,
        "floor: the library's best time of this size, else the mean rate of the format",
    )


def _rest(found: TakenApart, trained: Trained) -> float:
    """What kernels leave of a step that nobody traces, which the host reaches sooner."""
    return max(0.0, 1 - (found.span - found.idle) / trained.step_s)


def _beside(spent: float | None, floor: float | None) -> tuple[float | None, ...]:
    """Both and their difference, in milliseconds."""
    excess = None if spent is None or floor is None else spent - floor
    return tuple(None if seconds is None else 1e3 * seconds for seconds in (spent, floor, excess))


def _record(row: Row, found: TakenApart, least: dict[str, float], trained: Trained) -> dict[str, Any]:
    return {
        "title": row.title,
        "span_s": found.span,
        "step_s": trained.step_s,
        "idle_s": found.idle,
        "idle_share": found.idle / found.span,
        "idle_share_untraced": _rest(found, trained),
        "kinds_s": found.kinds,
        "floors_s": least,
        "products": [
            {"product": str(size), "calls": calls, "seconds": seconds}
            for size, (calls, seconds) in found.products.items()
        ],
        "longest": {kind: _named(names) for kind, names in found.longest.items()},
        "gaps": _named(found.gaps),
    }


def _named(names: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"name": name, "seconds": seconds} for name, seconds in names]
