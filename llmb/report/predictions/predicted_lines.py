"""Predicted time and memory of a run, one line each, for `show` and `submit --dry-run`."""

from dataclasses import replace

from llmb.config.native.departures import is_departure
from llmb.config.spec import Inference, RunConfig, Training
from llmb.perfmodel.explain.run_prediction import predict_run
from llmb.perfmodel.hardware import GIB, memory_bytes
from llmb.perfmodel.metrics import tokens_per_s
from llmb.perfmodel.serving_time.serving_setup import expected_tokens
from llmb.report.table import number

TITLES = {"step_time_s": "predicted step time", "output_tokens_per_s": "predicted output"}
UNITS = {"step_time_s": "s", "output_tokens_per_s": "tokens/s"}


def predicted_lines(config: RunConfig) -> list[str]:
    """Return the lines of predicted time, its causes and memory; none without a prediction."""
    if config.predicted is None:
        return []
    return [_time_line(config), *_graphs_line(config), *_speedup_line(config), _memory_line(config)]


def _graphs_line(config: RunConfig) -> list[str]:
    """Return what it costs that the engine captures no CUDA graphs although the recipe has them."""
    work = config.workload
    is_without = any(o.field == "cuda_graphs" and is_departure(o) for o in config.overrides)
    if not (is_without and isinstance(work, Training)):
        return []
    without, captured = (
        predict_run(replace(config, workload=replace(work, cuda_graphs=graphs))).value for graphs in (False, True)
    )
    if without is None or captured is None:
        return []
    return [f"predicted cost of running without CUDA graphs: {without / captured - 1:.1%} of the step time"]


def _speedup_line(config: RunConfig) -> list[str]:
    work, p = config.workload, config.predicted
    if p is None or p.speculative_speedup is None or not isinstance(work, Inference) or work.draft_acceptance is None:
        return []
    tokens = f"{expected_tokens(work.draft_acceptance):.2f} tokens a step at the stated acceptance"
    return [f"predicted speed-up by drafts: {p.speculative_speedup:.2f} x plain decoding, {tokens}"]


def _time_line(config: RunConfig) -> str:
    p = config.predicted
    assert p is not None
    title, unit = TITLES[p.metric] + (" of one rank" if config.one_rank else ""), UNITS[p.metric]
    if p.value is None:
        return f"{title}: unknown ({p.note})"
    interval = ""
    if p.interval_80 is not None:
        interval = f" (80 % interval {number(p.interval_80[0])} to {number(p.interval_80[1])})"
    rate = ""  # one rank computes the step of no whole batch
    if not isinstance(config.workload, Inference) and config.workload.gbs is not None and not config.one_rank:
        rate = f", {tokens_per_s(config.workload.seqlen, config.workload.gbs, p.value):,.0f} tokens/s"
    return f"{title}: {number(p.value)} {unit}{interval}{rate}; by {p.source}"


def _memory_line(config: RunConfig) -> str:
    p, capacity = config.predicted, memory_bytes(config.launch_machine)
    assert p is not None
    if p.memory_gib is None:
        return "predicted memory: unknown"
    of = f" of {capacity / GIB:,.0f}" if capacity else ""
    where = "per process" if config.launch_machine.gpu == "cpu" else "on the fullest GPU"
    return f"predicted memory: {number(p.memory_gib)}{of} GiB {where}"
