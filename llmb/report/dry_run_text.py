"""Text of a dry run: memory, FLOPs and collectives of one rank in a step, and whether it fits its GPU."""

from collections.abc import Iterator
from typing import Any

from llmb.config.spec import RunConfig
from llmb.perfmodel import hardware
from llmb.perfmodel.dry_run_summary import DryRunSummary
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.report.table import number, render


def describe_dry_run(config: RunConfig, summary: DryRunSummary) -> str:
    """Return the page that `llmb-run show --memory` prints."""
    parts = [config.name, render(("one rank", "value", "unit"), list(_memory_rows(config, summary)))]
    if summary.collectives:
        header = ("collective", "group", "ranks", "per step", "GiB per step", "MiB each")
        parts.append(render(header, list(_collective_rows(summary))))
    return "\n\n".join(parts)


def _memory_rows(config: RunConfig, summary: DryRunSummary) -> Iterator[tuple[str, Any, str]]:
    estimate = memory_estimate(config)
    yield "rank", summary.rank, f"of {config.machine.gpus}"
    yield "parameters updated here", f"{summary.parameters:,}", ""
    state = (
        ("weights", summary.weight_bytes),
        ("gradients", summary.gradient_bytes),
        ("optimizer", summary.optimizer_bytes),
    )
    for kind, size in (*state, ("activations", summary.activation_bytes)):
        yield f"{kind} at the peak", number(size / hardware.GIB), "GiB"
    yield "peak", number(summary.peak_bytes / hardware.GIB), "GiB"
    yield "peak, by the closed form", number(estimate.total / hardware.GIB), "GiB"
    if summary.host_bytes:
        yield "offloaded to the host", number(summary.host_bytes / hardware.GIB), "GiB"
    budget = estimate.device_budget
    yield "memory of one GPU", number(budget / hardware.GIB) if budget else None, "GiB"
    yield "fits", None if budget is None else summary.peak_bytes <= budget, ""
    yield f"FLOPs per step ({config.flops_convention})", number(summary.flops / hardware.TERA), "TFLOP"
    if config.parallel.pp > 1:
        yield "pipeline bubble", number(100 * summary.bubble), "% of the time"


def _collective_rows(summary: DryRunSummary) -> Iterator[tuple[Any, ...]]:
    for collective in sorted(summary.collectives, key=lambda collective: (collective.dimension, collective.kind)):
        each = collective.bytes / collective.count / 2**20
        yield (
            collective.kind,
            collective.dimension,
            collective.ranks,
            collective.count,
            number(collective.bytes / hardware.GIB),
            number(each),
        )
