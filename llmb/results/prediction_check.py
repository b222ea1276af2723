"""Comparison of a run with its prediction, and the likely reason where it is outside the stated interval."""

from collections.abc import Iterable, Mapping
from typing import Any

from llmb.config.spec import OutOfCore, Predicted, RunConfig
from llmb.results.result import Caution, PredictionCheck

# Warnings that make a run slower than a quiet machine would be, with the words of a reason; the first counts.
SLOWING = {
    "OTHER_GPU": "it ran on another GPU than predicted for",
    "THROTTLED": "the GPU was slowed down when it started",
    "POWER_LIMIT": "the power limit is not the part's default",
    "PCIE_NARROW": "the PCIe link is narrower than it could be",
    "UNEQUAL_GPUS": "the others wait for the slowest GPU",
    "PROFILER_ON": "tracing slows it",
    "SLOW_RANK": "the others wait for a slow rank",
    "CLIENT_BOUND": "requests were sent late",
    "FEW_REQUESTS": "ramp-up and drain weigh much",
    "NOISY_STEPS": "step times vary, so other work may share the machine",
    "DEQUANTISED": "weights are dequantized for every GEMM",
    "RANDOM_ROUTING": "random weights route tokens unevenly",
}
FASTER = {
    "OTHER_GPU": SLOWING["OTHER_GPU"],
    "POWER_LIMIT": SLOWING["POWER_LIMIT"],
    "PREFIX_CACHE_ON": "prompts were read from the prefix cache",
    "PREFIX_CACHED": "prompts were read from the prefix cache",
}


def check_prediction(
    config: RunConfig | None, fields: Mapping[str, Any], warnings: Iterable[Caution]
) -> PredictionCheck | None:
    """Compare the measured figure with the prediction in config.json, or in older files with that of the plan."""
    if config is None or fields["status"] != "ok":
        return None
    predicted = _prediction(config)
    measured = fields.get(predicted.metric) if predicted is not None else None
    if predicted is None or predicted.value is None or measured is None:
        return None
    is_time = predicted.metric == "step_time_s"
    value = measured.median if is_time else measured
    ratio = predicted.value / value if is_time else value / predicted.value
    return PredictionCheck(
        metric=predicted.metric,
        value=predicted.value,
        measured=value,
        ratio=ratio,
        source=predicted.source or "",
        interval_80=predicted.interval_80,
        likely_reason=_likely_reason(predicted, value, ratio, {w.code for w in warnings}),
    )


def _prediction(config: RunConfig) -> Predicted | None:
    """Return the stored prediction; that of an older out-of-core run is in its plan only."""
    if config.predicted is None and isinstance(config.workload, OutOfCore):
        from llmb.perfmodel.explain.run_prediction import predict_run  # imported here: it is slow to import

        return predict_run(config)
    return config.predicted


def _likely_reason(predicted: Predicted, measured: float, ratio: float, codes: set[str]) -> str | None:
    """Return why a figure is outside the 80 % interval; None within it, or where none is known."""
    if predicted.interval_80 is None or predicted.interval_80[0] <= measured <= predicted.interval_80[1]:
        return None
    causes = FASTER if ratio > 1 else SLOWING
    reasons = [text for code, text in causes.items() if code in codes]
    if reasons:
        return reasons[0]
    if ratio > 1:
        return "not known from its warnings; compare clocks, power limit and the amount of work: llmb-run explain RUN"
    return "not known from its warnings; profile it (--set profile=true) and see llmb-run explain RUN"
