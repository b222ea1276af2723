"""Predicted beside measured figures of the best serving settings, and whether their order agrees."""

from dataclasses import dataclass
from typing import Any

from llmb.config.parallel_layout import format_layout
from llmb.config.spec import Inference, RunConfig
from llmb.perfmodel.serving_time.serving_predictor import ServingPrediction
from llmb.report.table import render
from llmb.report.tune.measured_table import order_lines
from llmb.results.result import Result


@dataclass(frozen=True, kw_only=True)
class MeasuredServing:
    """One measured run and the candidates that it stands for, best predicted first."""

    names: tuple[str, ...]
    config: RunConfig
    predicted: ServingPrediction | None  # of what ran; none: not predicted
    result: Result

    @property
    def tokens_per_s(self) -> float | None:
        return self.result.output_tokens_per_s


def measured_serving_data(runs: list[MeasuredServing]) -> list[dict[str, Any]]:
    """Return the figures as plain data; null: not predicted, or the run failed."""
    return [
        {
            "candidates": list(run.names), "name": run.config.name, "proxy": run.config.proxy,
            "status": run.result.status,
            "predicted_output_tokens_per_s": run.predicted and run.predicted.output_tokens_per_s,
            "measured_output_tokens_per_s": run.tokens_per_s,
            "ttft_ms": run.result.ttft_ms, "tpot_ms": run.result.tpot_ms,
        }
        for run in runs
    ]  # fmt: skip


def measured_serving_text(runs: list[MeasuredServing]) -> str:
    """Return the table, the order and the fastest."""
    header = ("candidate", "ran as", "predicted tokens/s", "measured", "ratio", "TTFT ms", "TPOT ms", "status")
    lines = [render(header, [_row(run) for run in runs])]
    if runs[0].config.proxy:
        lines.append(f"proxies, not the model: {runs[0].config.proxy}; only their order says something")
    if all(run.predicted is None for run in runs):
        lines.append("the speed of this machine is not predicted: only the order is compared")
    return "\n".join([*lines, *order_lines([(run.names, run.tokens_per_s) for run in runs])])


def _row(run: MeasuredServing) -> tuple[Any, ...]:
    work = run.config.workload
    assert isinstance(work, Inference)
    ran_as = f"{format_layout(run.config.parallel)}, clients {work.concurrency} batch {work.max_batch_size} budget "
    predicted, rate = run.predicted, run.tokens_per_s
    return (
        "; ".join(run.names), f"{ran_as}{work.max_num_tokens}",
        predicted and f"{predicted.output_tokens_per_s:,.0f}", rate and f"{rate:,.0f}",
        f"{rate / predicted.output_tokens_per_s:.3f}" if rate and predicted else None,
        _mean(run.result.ttft_ms, 0), _mean(run.result.tpot_ms, 2), run.result.status,
    )  # fmt: skip


def _mean(summary: dict[str, float] | None, digits: int) -> str | None:
    return None if summary is None else f"{summary['mean']:,.{digits}f}"
