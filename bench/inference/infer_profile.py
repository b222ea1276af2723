"""Table of a profiled step: each class of kernels against its lower bound, host time, and idle time."""

from dataclasses import asdict

from inference.infer_bench import Bench
from inference.infer_ceilings import SAMPLING, SMALL, Rates, Step, Term, by_kind, small_bytes
from inference.infer_kernels import CLASSES, Profiled
from llmb.config.model import Model
from llmb.config.spec import Precision
from llmb.perfmodel.params import BYTES


def small_kernel_bounds(model: Model, precision: Precision, step: Step, read: float) -> dict[str, float]:
    """Return lower bounds of the classes that the ceiling leaves out, by the bytes they move."""
    moved = small_bytes(model, precision)
    floors = {SAMPLING: step.samples * model.vocab * BYTES["bf16"] / read}
    return floors if moved is None else floors | {SMALL: moved * step.tokens / read}


def print_profile(
    bench: Bench, title: str, profile: Profiled, needed: list[Term], rates: Rates, other_bounds: dict[str, float]
) -> None:
    floors = by_kind(needed, rates) | other_bounds
    rows = []
    for kind in CLASSES:
        spent, floor = profile.kinds.get(kind), floors.get(kind)
        if spent is not None or floor:
            ratio = floor / spent if floor and spent else None
            rows.append((kind, _us(spent), _us(floor), ratio, (spent or 0.0) / profile.span))
    rows.append(("idle", _us(profile.idle), None, None, profile.idle / profile.span))
    total = sum(floors.values())
    rows.append(("step, under the profiler", _us(profile.span), _us(total), total / profile.span, 1.0))
    rows.append(("step, without it", _us(profile.wall), _us(total), total / profile.wall, None))
    step = profile.step
    host = ", ".join(f"{name} {_us(seconds):,.0f}" for name, seconds in profile.host.items())
    busy = sum(seconds for name, seconds in profile.host.items() if "waiting" not in name)
    prompts = f"{step.prompt_tokens:.0f} prompt tokens"
    bench.print_table(
        title,
        ("class", "us/step", "lower bound us", "bound / time", "fraction"),
        rows,
        f"a step: {step.decodes:.0f} decodes, each with {step.context:.0f} cached tokens, and {prompts}",
        f"host, us/step: {host}; busy {busy / profile.wall:.0%} of the step",
        *(f"other: {_us(seconds):.0f} us {name[:90]}" for name, seconds in profile.unclassified),
    )
    bench.record("profile", asdict(profile) | {"title": title, "floors": floors, "idle": profile.idle})


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds
