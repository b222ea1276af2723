"""Reasons to doubt a comparison of two runs: what else than their speed may make their figures differ."""

from collections.abc import Iterator

from llmb.config.spec import OutOfCore, Training
from llmb.report.compare.clock_doubts import Labels, Run, clock_doubts
from llmb.report.compare.compare_serving import load_doubts
from llmb.results.compare.speed_ratio import tokens_per_step
from llmb.results.result import Result

# Warnings of a Result that say that its figures may not be those of the configuration.
MEASUREMENT_WARNINGS = {
    "FEW_SAMPLES", "NOISY_STEPS", "SLOW_RANK", "PROFILER_ON", "OTHER_GPU",
    "FAILED_REQUESTS", "FEW_REQUESTS", "NOT_STEADY", "CLIENT_BOUND", "PREFIX_CACHE_ON", "PREFIX_CACHED",
    "CLIENT_LATE", "CLIENT_BUSY", "RATE_MISSED", "WRONG_LENGTHS", "WRONG_INPUT_LENGTHS",
    "TOKEN_COUNTS_DIFFER", "POWER_LIMIT", "THROTTLED", "PCIE_NARROW", "UNEQUAL_GPUS", "FAULT_INJECTION",
}  # fmt: skip


def doubts(a: Run, b: Run, labels: Labels = ("A", "B")) -> Iterator[str]:
    """Yield one clause for each reason: a bad run, other hardware, another model, other lengths."""
    for label, (_, result) in zip(labels, (a, b), strict=True):
        if result.status != "ok":
            yield f"{label} is {result.status}" + (f": {result.reason}" if result.reason else "")
        for warning in result.warnings:
            if warning.code in MEASUREMENT_WARNINGS:
                yield f"{label}: {warning.text}"
    yield from _about_hardware(a[1], b[1], labels)
    yield from clock_doubts(a, b, labels)
    yield from _about_ranks(a[1], b[1], labels)
    yield from _about_model(a, b, labels)
    yield from _about_work(a, b, labels)


def _about_hardware(a: Result, b: Result, labels: Labels) -> Iterator[str]:
    first, second = labels
    names = [r.gpu_name or r.gpu or "unknown hardware" for r in (a, b)]
    if names[0] == names[1] and a.gpus == b.gpus:
        return
    if names[0] == names[1] and a.gpu == b.gpu == "cpu":  # whose ranks share its cores
        yield f"the ranks that share {names[0]} differ in number: {first} has {a.gpus}, {second} has {b.gpus}"
    else:
        places = [f"{label} on {r.gpus or '?'} x {name}" for label, r, name in zip(labels, (a, b), names, strict=True)]
        yield f"they ran on other hardware: {', '.join(places)}"


def _about_ranks(a: Result, b: Result, labels: Labels) -> Iterator[str]:
    """Yield that a run of one rank is compared with another rank, or with all of them."""
    ranks = [None if r.one_rank is None else f"rank {r.one_rank.rank} of {r.one_rank.ranks}" for r in (a, b)]
    if ranks[0] != ranks[1]:
        texts = [rank or "all its ranks" for rank in ranks]
        yield f"without communication one rank runs alone: {labels[0]} is {texts[0]}, {labels[1]} is {texts[1]}"


def _about_model(a: Run, b: Run, labels: Labels) -> Iterator[str]:
    first, second = labels
    (config_a, result_a), (config_b, result_b) = a, b
    if config_a is None or config_b is None or config_a.model == config_b.model:
        return
    if result_a.proxy and result_b.proxy:
        yield f"they are proxies of different shapes: {first} has {result_a.proxy}; {second} has {result_b.proxy}"
    elif result_a.proxy or result_b.proxy:
        label, proxy = (first, result_a.proxy) if result_a.proxy else (second, result_b.proxy)
        yield f"only {label} is a proxy: {proxy}"
    else:
        yield f"they run different models: {first} {config_a.model.name}, {second} {config_b.model.name}"


def _about_work(a: Run, b: Run, labels: Labels) -> Iterator[str]:
    first, second = labels
    work_a, work_b = (config.workload if config is not None else None for config, _ in (a, b))
    yield from load_doubts(a, b, labels)
    seqlens = [work.seqlen for work in (work_a, work_b) if isinstance(work, Training | OutOfCore)]
    if len(seqlens) == 2 and seqlens[0] != seqlens[1]:
        lengths = f"{first} has {seqlens[0]} tokens, {second} {seqlens[1]}"
        yield f"a token of a longer sequence needs more attention FLOPs: {lengths}"
    if a[1].step_time_s and b[1].step_time_s and None in (tokens_per_step(*a), tokens_per_step(*b)):
        yield "the tokens of a step are unknown: their steps may differ in size"
