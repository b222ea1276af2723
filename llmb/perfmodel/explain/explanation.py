"""Explanation of a measured figure: is it possible, how far from the limit and the prediction, and where time goes.

explain_training(setup, step_time_s=4.19, measured_terms={})     -> Explanation(verdict="possible", ...)
explain_serving(setup, ServedFigures(output_tokens_per_s=9446))  -> Explanation(verdict="impossible", ...)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from llmb.config.spec import Predicted
from llmb.errors import ConfigError
from llmb.perfmodel.chip_limits import Limit, StepAmount, training_limits
from llmb.perfmodel.explain.impossible_causes import holds, serving_causes, training_causes
from llmb.perfmodel.explain.published_matches import PublishedMatch
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.params import active_parameters
from llmb.perfmodel.serving_time.serving_bounds import ServedFigures, serving_limits
from llmb.perfmodel.serving_time.serving_predictor import ServingPrediction, predict_serving
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.step_time.predictor import predict, spared_macs
from llmb.perfmodel.step_time.run_description import run_model
from llmb.perfmodel.step_time.step_setup import StepSetup

# Kind of work, as the profiler of a run names it -> terms of the predictor. Recompute counts as matrix products.
KINDS = {
    "matrix products": ("gemm", "recompute"),
    "attention": ("attention",),
    "memory-bound work": ("memory_bound", "quantization", "scan"),
    "optimizer": ("optimizer",),
    "communication": ("tp", "cp", "ep", "pp", "dp", "fsdp", "offload", "copies"),
    "idle": ("bubble", "launch", "host", "overhead", "jitter"),
    "engine": ("engine",),
}
# Usual reasons of a possible figure outside the interval, by direction; a run's own warnings say more.
USUAL = {
    (
        "training",
        "faster",
    ): "less work than described, experts that drop tokens, other FLOP conventions, a higher power limit",
    ("training", "slower"): "other work on the machine, a lower power limit, tracing, a slow rank, a host-bound engine",
    ("serving", "faster"): "prefix caching, speculative decoding, outputs that end early, prompt tokens counted too",
    ("serving", "slower"): "a load generator that is late, few requests, a host-bound engine, a lower power limit",
}
CONTRADICTION = 1.1  # times what clients with these latencies can receive: means of medians differ by less
Verdict = Literal["possible", "impossible", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Prediction beside the measured value; `ratio` above 1: faster than predicted."""

    metric: str
    measured: float
    predicted: float
    interval_80: tuple[float, float]
    ratio: float
    within: bool  # the interval


@dataclass(frozen=True, kw_only=True)
class TermPair:
    """Seconds of one kind of work in a step. Null: not measured, or not predicted."""

    kind: str
    measured_s: float | None
    predicted_s: float | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything `llmb-run explain` says."""

    subject: str
    verdict: Verdict
    limits: tuple[Limit, ...] = ()
    causes: tuple[str, ...] = ()  # of an impossible figure
    expected: tuple[Expected, ...] = ()
    published: tuple[PublishedMatch, ...] = ()
    terms: tuple[TermPair, ...] = ()
    notes: tuple[str, ...] = field(default=())


def verdict_of(limits: list[Limit]) -> Verdict:
    """Return whether a figure is within all limits; unknown without any."""
    if not limits:
        return "unknown"
    return "possible" if holds(limits) else "impossible"


def step_amount(setup: StepSetup) -> StepAmount:
    """Return the work of a described step: of the layers that ran, with attention inside packed documents only."""
    model = run_model(replace(setup, shape=replace(setup.shape, mtp_depth=0)))
    seqlen = min(setup.document_tokens or setup.seqlen, setup.seqlen)
    return StepAmount(
        model=model, seqlen=seqlen, sequences=setup.gbs * setup.seqlen / seqlen, gpus=setup.gpus, gpu=setup.gpu,
        dtype=setup.peak_dtype, frozen=setup.task == "lora",
        spared_macs=spared_macs(setup.shape, seqlen) * setup.layer_count / setup.shape.model.layers,
    )  # fmt: skip


def explain_training(
    subject: str,
    setup: StepSetup,
    step_time_s: float,
    measured_terms: Mapping[str, float],
    predicted: Predicted | None = None,
    gpu: str | None = None,
) -> Explanation:
    """Explain a step time.

    `measured_terms`: seconds by kind, of a profiled run; `predicted`: stored with the run, where it is not that of the
    whole setup; `gpu`: where a rank ran alone, if not on the GPU of its layout.
    """
    amount = replace(step_amount(setup), gpu=gpu or setup.gpu)
    limits = training_limits(amount, step_time_s)
    verdict = verdict_of(limits)
    memory: tuple[str, ...] = ()
    if predicted is not None and predicted.value is not None and predicted.interval_80 is not None:
        value, (low, high), terms = predicted.value, predicted.interval_80, predicted.terms
    else:
        prediction = predict(setup)
        value, (low, high), terms = prediction.step_time_s, prediction.interval_80, prediction.terms
        memory = _too_much_memory(setup, prediction.memory_gib)
    expected = Expected(
        metric="step_time_s", measured=step_time_s, predicted=value, interval_80=(low, high),
        ratio=value / step_time_s, within=low <= step_time_s <= high,
    )  # fmt: skip
    return Explanation(
        subject=subject,
        verdict=verdict,
        limits=tuple(limits),
        causes=tuple(training_causes(amount, step_time_s, setup.ga)) if verdict == "impossible" else (),
        expected=(expected,),
        terms=_term_pairs(terms, measured_terms, step_time_s),
        notes=(*memory, *_usual_reasons("training", verdict, expected)),
    )


def _too_much_memory(setup: StepSetup, memory_gib: float) -> tuple[str, ...]:
    """Return that a layout does not fit, by an estimate that is no proof."""
    capacity = setup.gpu_memory_bytes
    if capacity is None or setup.fits(memory_gib):
        return ()
    return (
        f"the layout does not fit as described: memory estimate {memory_gib:,.0f} of {capacity / GIB:.0f} GiB; state "
        "how it is split (--set fsdp=true, tp=, pp=, recompute=full)",
    )


def _usual_reasons(task: str, verdict: Verdict, expected: Expected) -> tuple[str, ...]:
    """Return what usually moves a possible figure out of the interval."""
    if verdict == "impossible" or expected.within:
        return ()
    direction = "faster" if expected.ratio > 1 else "slower"
    return (f"{direction} than predicted; usual reasons: {USUAL[task, direction]}",)


def _term_pairs(
    predicted: Mapping[str, float], measured: Mapping[str, float], step_time_s: float
) -> tuple[TermPair, ...]:
    """Return both breakdowns by kind; without a profile, what the prediction does not explain is one line."""
    pairs = []
    for kind, names in KINDS.items():
        seconds = sum(predicted.get(name, 0.0) for name in names)
        if abs(seconds) > 1e-4 * step_time_s or kind in measured:
            pairs.append(TermPair(kind=kind, measured_s=measured.get(kind), predicted_s=seconds))
    if not measured:
        difference = step_time_s - sum(predicted.values())
        pairs.append(TermPair(kind="not explained", measured_s=difference, predicted_s=None))
    return tuple(pairs)


def explain_serving(subject: str, setup: ServingSetup, figures: ServedFigures) -> Explanation:
    """Explain the figures of a serving run."""
    limits = serving_limits(setup, figures)
    verdict = verdict_of(limits)
    prediction, refusal = _served_prediction(setup)
    expected = [] if prediction is None else _served_expected(prediction, figures)
    return Explanation(
        subject=subject,
        verdict=verdict,
        limits=tuple(limits),
        causes=tuple(serving_causes(setup, figures)) if verdict == "impossible" else (),
        expected=tuple(expected),
        terms=() if prediction is None else _served_terms(prediction),
        notes=(
            *refusal,
            *(_usual_reasons("serving", verdict, expected[0]) if expected else ()),
            *_contradiction(setup, figures),
            _plain_flops(setup, figures),
        ),
    )


def _served_expected(prediction: ServingPrediction, figures: ServedFigures) -> list[Expected]:
    """Return every measured figure beside its prediction, the rate first."""
    measured = {"output_tokens_per_s": figures.output_tokens_per_s}
    if figures.latency_ms is not None:
        measured |= dict(zip(("ttft_ms", "tpot_ms"), figures.latency_ms, strict=True))
    expected = []
    for metric, value in measured.items():
        predicted, interval = getattr(prediction, metric), prediction.interval_80[metric]
        if interval is None:
            continue
        low, high = interval
        ratio = value / predicted if metric == "output_tokens_per_s" else predicted / value
        expected.append(
            Expected(
                metric=metric, measured=value, predicted=predicted, interval_80=(low, high), ratio=ratio,
                within=low <= value <= high,
            )
        )  # fmt: skip
    return expected


def _served_terms(prediction: ServingPrediction) -> tuple[TermPair, ...]:
    return tuple(
        TermPair(kind=f"{phase.replace('_', ' ')}: {name.replace('_', ' ')}", measured_s=None, predicted_s=seconds)
        for phase in ("decode_step", "prefill")
        for name, seconds in prediction.terms[phase].items()
        if seconds
    )


def _served_prediction(setup: ServingSetup) -> tuple[ServingPrediction | None, tuple[str, ...]]:
    """Return the prediction, or why there is none."""
    try:
        return predict_serving(setup), ()
    except ConfigError as error:
        return None, (f"not predicted: {error}",)


def _contradiction(setup: ServingSetup, figures: ServedFigures) -> tuple[str, ...]:
    """Return that the rate is more than so many requests at once can have with their latencies (Little's law)."""
    if figures.latency_ms is None:
        return ()
    ttft_ms, tpot_ms = figures.latency_ms
    most = setup.concurrency * setup.osl / (ttft_ms + (setup.osl - 1) * tpot_ms) * 1e3
    if figures.output_tokens_per_s <= CONTRADICTION * most:
        return ()
    return (
        f"the figures are not of one run: {setup.concurrency} requests at once with this TTFT and TPOT give at most "
        f"{most:,.0f} output tokens/s",
    )


def _plain_flops(setup: ServingSetup, figures: ServedFigures) -> str:
    """Return the rate by the usual rule of thumb, which counts the LM head for prompt tokens too."""
    model = setup.shape.model
    weights = active_parameters(model) - (0 if model.tied_embeddings else model.vocab * model.hidden)
    tokens = figures.output_tokens_per_s * (setup.isl + setup.osl) / setup.osl / setup.gpus
    return (
        f"at 2 FLOPs for each of {weights / 1e9:.2f}e9 weights and every prompt and output token: "
        f"{2 * weights * tokens / 1e12:,.0f} TFLOP/s/GPU"
    )
