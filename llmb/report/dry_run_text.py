"""A rehearsal for a person: what one rank holds, computes and sends in a step, and whether that fits its GPU."""

from collections.abc import Iterator
from typing import Any

from llmb.config.spec import RunConfig
from llmb.perfmodel import hardware
from llmb.perfmodel.dry_run_summary import Rehearsal
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.report.table import number, render


def describe_rehearsal(config: RunConfig, found: Rehearsal) -> str:
    """The page `llmb-run show --memory` prints."""
    parts = [config.name, render(("one rank", "value", "unit"), list(_held(config, found)))]
    if found.collectives:
        header = ("exchange", "among", "ranks", "a step", "GiB a step", "MiB each")
        parts.append(render(header, list(_sent(found))))
    return "\n\n".join(parts)


def _held(config: RunConfig, found: Rehearsal) -> Iterator[tuple[str, Any, str]]:
    estimate = memory_estimate(config)
    yield "rank", found.rank, f"of {config.machine.gpus}"
    yield "parameters updated here", f"{found.parameters:,}", ""
    held = ("weights", found.weight_bytes), ("gradients", found.gradient_bytes), ("optimizer", found.optimizer_bytes)
    for what, size in (*held, ("activations", found.activation_bytes)):
        yield f"{what} at the peak", number(size / hardware.GIB), "GiB"
    yield "peak", number(found.peak_bytes / hardware.GIB), "GiB"
    yield "peak, by the closed form", number(estimate.total / hardware.GIB), "GiB"
    if found.host_bytes:
        yield "offloaded to the host", number(found.host_bytes / hardware.GIB), "GiB"
    budget = estimate.device_budget
    yield "memory of one GPU", number(budget / hardware.GIB) if budget else None, "GiB"
    yield "fits", None if budget is None else found.peak_bytes <= budget, ""
    yield f"FLOPs a step ({config.flops_convention})", number(found.flops / hardware.TERA), "TFLOP"
    if config.parallel.pp > 1:
        yield "pipeline bubble", number(100 * found.bubble), "% of the time"


def _sent(found: Rehearsal) -> Iterator[tuple[Any, ...]]:
    for one in sorted(found.collectives, key=lambda one: (one.dimension, one.kind)):
        each = one.bytes / one.count / 2**20
        yield one.kind, one.dimension, one.ranks, one.count, number(one.bytes / hardware.GIB), number(each)
