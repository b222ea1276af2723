"""Likely causes of a figure above the limit of its chip: each is tried, and named if it makes the figure possible."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from llmb.perfmodel.chip_limits import BURST, SPREAD, SUSTAINED, Limit, StepAmount, training_limits
from llmb.perfmodel.hardware import GPUS
from llmb.perfmodel.serving_time.serving_bounds import MEMORY, ServedFigures, serving_limits
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.step_time.cluster_fabric import FABRICS

LOWER = {"fp32": ("bf16", "fp8"), "bf16": ("fp8",), "fp8": ("nvfp4",)}  # dtypes that a run may have had instead
MORE_GPUS = (2, 4, 8, 16)
BISECTIONS = 20


def holds(limits: list[Limit]) -> bool:
    """Return whether no limit is exceeded."""
    return all(limit.fraction <= 1 for limit in limits)


def serving_causes(setup: ServingSetup, figures: ServedFigures) -> Iterator[str]:
    """Yield what would explain an impossible serving figure, the usual suspects first."""

    def possible(changed: ServedFigures) -> bool:
        return holds(serving_limits(setup, changed))

    limits = serving_limits(setup, figures)
    for limit in limits:
        if limit.name == MEMORY:
            ranks = setup.gpus * math.ceil(limit.fraction)
            yield f"weights split over {ranks} GPUs or more (tp, pp, ep), not {setup.gpus}"
    hits = _least(lambda rate: possible(replace(figures, prefix_hit_rate=rate)))
    if hits is not None:
        yield f"prefix caching: at least {100 * hits:.0f} % of the prompt tokens were read from the cache, not computed"
    output = figures.output_tokens_per_s * setup.osl / (setup.isl + setup.osl)
    if possible(replace(figures, output_tokens_per_s=output)):
        counted = f"{output:,.0f}" if output >= 10 else f"{output:.2g}"
        yield f"input and output tokens are counted: then {counted} tokens/s are output"
    shorter = _least(
        lambda cut: possible(replace(figures, output_tokens_per_s=figures.output_tokens_per_s * (1 - cut)))
    )
    produced = math.floor((1 - (shorter or 0.0)) * setup.osl)
    if shorter is not None and 0 < produced < setup.osl:
        possible_tokens = f"at most {produced} of {setup.osl} tokens are possible"
        yield f"outputs end early but count at the requested length: {possible_tokens}"
    if figures.latency_ms and not possible(figures) and possible(replace(figures, latency_ms=None)):
        yield "speculative decoding: several tokens of a request in one step"
    yield from _common(
        setup.gpu,
        setup.dtype,
        limits,
        lambda gpu, dtype: serving_limits(replace(setup, gpu=gpu, dtype=dtype), figures),
    )
    for factor in MORE_GPUS:
        rate = figures.output_tokens_per_s / factor
        if possible(replace(figures, output_tokens_per_s=rate)):
            yield f"the figure is of {factor * setup.gpus} GPUs, not {setup.gpus}"
            break


def training_causes(amount: StepAmount, step_time_s: float, micro_batches: int = 1) -> Iterator[str]:
    """Yield what would explain an impossible step time."""

    def possible(changed: StepAmount, seconds: float = step_time_s) -> bool:
        return holds(training_limits(changed, seconds))

    if micro_batches > 1 and possible(amount, step_time_s * micro_batches):
        yield f"the time is of one micro-batch, not of a step of {micro_batches}"
    if not amount.frozen and possible(replace(amount, frozen=True)):
        yield "weights are frozen (LoRA): no weight gradients are computed"
    layers = _least(lambda cut: possible(replace(amount, sequences=1), step_time_s / (1 - cut) / amount.sequences))
    if layers is not None:
        yield (
            f"less work than described: at most {100 * (1 - layers):.0f} % of it is possible "
            "(fewer layers, shorter sequences, dropped tokens, a smaller batch)"
        )
    yield from _common(
        amount.gpu,
        amount.dtype,
        training_limits(amount, step_time_s),
        lambda gpu, dtype: training_limits(replace(amount, gpu=gpu, dtype=dtype), step_time_s),
    )
    for factor in MORE_GPUS:
        if possible(replace(amount, gpus=factor * amount.gpus)):
            yield f"the figure is of {factor * amount.gpus} GPUs, not {amount.gpus}"
            break


def _common(gpu: str, dtype: str, limits: list[Limit], on: Callable[[str, str], list[Limit]]) -> Iterator[str]:
    """Yield causes in the hardware: another dtype, a burst at higher clocks, another GPU."""
    compute = next((limit for limit in limits if limit.name == "compute"), None)
    if compute is not None and 1 < compute.fraction <= BURST[dtype] / SUSTAINED[dtype] / SPREAD:
        yield "a short run at clocks that the chip does not sustain, or a chip with a higher power limit"
    for lower in LOWER.get(dtype, ()):
        if lower in GPUS[gpu].peak_flops and holds(on(gpu, lower)):
            yield f"GEMMs in {lower}, not {dtype}"
    others = [key for key in FABRICS if key != gpu and holds(on(key, dtype))]
    if others:
        yield f"another GPU: {', '.join(others)}"


def _least(possible: Callable[[float], bool]) -> float | None:
    """Return the least fraction, 0 to 1, with which a figure is possible; None: with none below 1."""
    low, high = 0.0, 0.999
    if not possible(high):
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return high
