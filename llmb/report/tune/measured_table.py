"""Predicted beside measured figures of the best candidates, and whether their order agrees."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from llmb.config.parallel_layout import format_layout
from llmb.config.spec import RunConfig, Training
from llmb.report.table import render
from llmb.results.result import Result

RECIPE = "recipe"  # how the name of the recipe's own row begins


@dataclass(frozen=True, kw_only=True)
class MeasuredLayout:
    """One measured run and the candidates that it stands for, best predicted first."""

    names: tuple[str, ...]
    config: RunConfig
    predicted_s: float | None  # of what ran; none: not predicted
    result: Result

    @property
    def tokens_per_s(self) -> float | None:
        return self.result.tokens_per_s

    @property
    def step_s(self) -> float | None:
        return self.result.step_time_s.median if self.result.step_time_s else None


def measured_data(runs: list[MeasuredLayout]) -> list[dict[str, Any]]:
    """Return the figures as plain data; null: not predicted, or the run failed."""
    return [
        {
            "candidates": list(run.names), "name": run.config.name, "proxy": run.config.proxy,
            "status": run.result.status, "predicted_s": run.predicted_s, "measured_s": run.step_s,
            "tokens_per_s": run.tokens_per_s,
        }
        for run in runs
    ]  # fmt: skip


def measured_text(runs: list[MeasuredLayout]) -> str:
    """Return the table, the order and the fastest."""
    is_proxy = any(run.config.proxy for run in runs)
    header = ("candidate", "ran as", "predicted s", "measured s", "ratio", "tokens/s", "status")
    lines = [render(header, [_row(run) for run in runs])]
    if is_proxy:
        lines.append(f"proxies, not the model: {runs[0].config.proxy}; only their order says something")
    if all(run.predicted_s is None for run in runs):
        lines.append("the speed of this machine is not predicted: only the order is compared")
    lines += order_lines([(run.names, run.tokens_per_s) for run in runs])
    return "\n".join(lines)


def _row(run: MeasuredLayout) -> tuple[Any, ...]:
    work = run.config.workload
    assert isinstance(work, Training)
    layout = f"{format_layout(run.config.parallel)}, mbs{work.mbs} gbs{work.gbs}"
    layout += f" recompute{work.recompute_layers}" if work.recompute_layers else ""
    layout += f" offload{work.offload_layers}" if work.offload_layers else ""
    step, predicted = run.step_s, run.predicted_s
    return (
        "; ".join(run.names), layout, predicted and f"{predicted:.3f}", step and f"{step:.3f}",
        f"{step / predicted:.3f}" if step and predicted else None,
        run.tokens_per_s and f"{run.tokens_per_s:,.0f}", run.result.status,
    )  # fmt: skip


def order_lines(rates: Sequence[tuple[tuple[str, ...], float | None]]) -> list[str]:
    """Return how many pairs are in the predicted order, and the fastest; runs come by prediction, the recipe's last."""
    ranked = [(names, rate) for names, rate in rates if rate]
    if not ranked:
        return ["no run was measured"]
    lines = []
    if len(ranked) > 1:
        pairs = list(combinations([rate for _, rate in ranked], 2))
        agree = sum(first >= second for first, second in pairs)
        lines.append(f"order: {agree} of {len(pairs)} pairs are measured in the predicted order")
    fastest, best = max(ranked, key=lambda pair: pair[1])
    recipe = next((rate for names, rate in ranked if any(name.startswith(RECIPE) for name in names)), None)
    ratio = "" if recipe is None else f", {best / recipe:.3f} times the recipe's own"
    return [*lines, f"fastest measured: {fastest[0]}{ratio}"]
