"""The table of a profiled step: each class of kernels against its floor, the host, and what is idle."""

from dataclasses import asdict

from infer_bench import Bench
from infer_ceilings import SAMPLING, SMALL, Rates, Step, Term, by_kind, small_bytes
from infer_kernels import CLASSES, Profiled

from llmb.config.spec import Model, Precision
from llmb.perfmodel.params import BYTES


def small_floors(model: Model, precision: Precision, step: Step, read: float) -> dict[str, float]:
    """Classes that the ceiling leaves out, by the bytes they move."""
    moved = small_bytes(model, precision)
    floors = {SAMPLING: step.samples * model.vocab * BYTES["bf16"] / read}
    return floors if moved is None else floors | {SMALL: moved * step.tokens / read}


def say_profile(
    bench: Bench, title: str, found: Profiled, needed: list[Term], rates: Rates, more: dict[str, float]
) -> None:
    floors = by_kind(needed, rates) | more
    rows = []
    for kind in CLASSES:
        spent, floor = found.kinds.get(kind), floors.get(kind)
        if spent is not None or floor:
            ratio = floor / spent if floor and spent else None
            rows.append((kind, _us(spent), _us(floor), ratio, (spent or 0.0) / found.span))
    rows.append(("idle", _us(found.idle), None, None, found.idle / found.span))
    total = sum(floors.values())
    rows.append(("step, under the profiler", _us(found.span), _us(total), total / found.span, 1.0))
    rows.append(("step, without it", _us(found.wall), _us(total), total / found.wall, None))
    step = found.step
    host = ", ".join(f"{name} {_us(seconds):,.0f}" for name, seconds in found.host.items())
    busy = sum(seconds for name, seconds in found.host.items() if "waiting" not in name)
    prompts = f"{step.prompt_tokens:.0f} tokens of prompts"
    bench.say(
        title,
        ("class", "us a step", "floor us", "of floor", "share"),
        rows,
        f"a step: {step.decodes:.0f} generate, each with {step.context:.0f} tokens in the cache, and {prompts}",
        f"host, us a step: {host}; busy {busy / found.wall:.0%} of the step",
        *(f"other: {_us(seconds):.0f} us {name[:90]}" for name, seconds in found.others),
    )
    bench.keep("profile", asdict(found) | {"title": title, "floors": floors, "idle": found.idle})


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds
