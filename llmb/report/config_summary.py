"""Text of a RunConfig: settings, requirements, published and expected results."""

from collections.abc import Iterator
from typing import Any

from llmb.config.native.departures import departures, is_departure
from llmb.config.native.one_rank import describe_rank
from llmb.config.serialization import to_plain
from llmb.config.spec import Inference, OutOfCore, RunConfig
from llmb.perfmodel import flops, hardware, params
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.memory_fit import misfit
from llmb.report.goodput_text import fault_lines
from llmb.report.predictions.predicted_lines import predicted_lines
from llmb.report.setting_text import override_rows, settings
from llmb.report.table import number, render, terminal_width


def describe(config: RunConfig, command: str) -> str:
    """Return the page that `llmb-run show` prints."""
    width = terminal_width()
    parts = [
        "\n".join(
            [
                config.name,
                *([f"proxy: {config.proxy}"] if config.proxy else []),
                *([one_rank_text(config)] if config.one_rank else []),
                *([fault_lines(config.fault_injection)] if config.fault_injection else []),
                *(f"departs from the recipe: {line}" for line in departures(config)),
                *predicted_lines(config),
            ]
        ),
        render(("setting", "value"), list(settings(config)), width),
        render(("what it needs", "value", "unit"), list(_needs(config)), width),
    ]
    rows = override_rows(o for o in config.overrides if not is_departure(o))
    if rows:
        parts.append(render(("changed", "recipe", "here", "by"), rows, width))
    if config.reference is not None:
        published = {k: v for k, v in to_plain(config.reference).items() if v is not None}
        published.pop("plan", None)  # shown beside our own plan
        parts.append(render(("published", "value"), list(published.items()), width))
    if isinstance(config.workload, OutOfCore):
        from llmb.report.plan_figures import plan_figures
        from llmb.report.plan_text import describe_plan

        parts.append(describe_plan(plan_figures(config)))
    parts.append(f"memory {memory_estimate(config).assumptions}")
    parts.append(f"command: {command}")
    return "\n\n".join(parts)


def one_rank_text(config: RunConfig) -> str:
    """Return which rank runs where, without the others."""
    machine = hardware.gpu(config.launch_machine.gpu).title
    return f"one rank only: {describe_rank(config)}, on {machine}; communication and bubble are modelled"


def _needs(config: RunConfig) -> Iterator[tuple[str, Any, str]]:
    total, active = params.parameters(config.model), params.active_parameters(config.model)
    yield "parameters", f"{total:,}", ""
    if active != total:
        yield "active parameters", f"{active:,}", ""
    work, convention = config.workload, config.flops_convention
    if isinstance(work, Inference):
        prefill = flops.prefill_flops(config.model, work.isl, convention)
        decode = flops.decode_flops(config.model, work.isl + work.osl // 2)
        yield "FLOPs of a prompt", number(prefill / hardware.TERA), "TFLOP"
        yield "FLOPs of an output token", number(decode / 1e9), "GFLOP"
    else:
        sequence_flops = flops.run_flops_per_sequence(config)
        yield f"FLOPs of a sequence ({convention})", number(sequence_flops / hardware.TERA), "TFLOP"
        yield "FLOPs of a token", number(sequence_flops / work.seqlen / 1e9), "GFLOP"
        if work.gbs:
            yield "FLOPs of a step", number(sequence_flops * work.gbs / hardware.TERA), "TFLOP"
            yield "tokens of a step", f"{work.gbs * work.seqlen:,}", ""
    peak = hardware.peak_flops(config.machine.gpu, config.precision.dtype)
    yield "peak of one GPU", number(peak / hardware.TERA) if peak else None, "TFLOP/s"
    estimate = memory_estimate(config)
    for part, value in to_plain(estimate).items():
        if value and part not in ("assumptions", "device_budget", "host_budget"):
            where = "GiB of host per GPU" if part == "host" else "GiB per GPU"
            yield f"memory estimate: {part}", number(value / hardware.GIB), where
    budget = estimate.device_budget
    yield "memory of one GPU", number(budget / hardware.GIB) if budget else None, "GiB"
    yield "fits, by the estimate", None if estimate.fits is None else misfit(config) is None, ""
