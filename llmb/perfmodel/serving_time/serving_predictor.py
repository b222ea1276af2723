"""Prediction of TTFT, TPOT and throughput of a serving engine, with memory, terms and 80 % intervals.

predict_serving(setup).tpot_ms
predict_serving(setup).interval_80["tpot_ms"]      -> (shortest, longest)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmb.config.model import Model
from llmb.perfmodel.hardware import GIB, with_article
from llmb.perfmodel.serving_time.cache_slots import memory_bytes_of
from llmb.perfmodel.serving_time.closed_loop import Load, LoopTimes, load_of, loop_times, prefill_times
from llmb.perfmodel.serving_time.native_step import NativeStep
from llmb.perfmodel.serving_time.scheduled_run import run_times
from llmb.perfmodel.serving_time.serving_constants import calibrated_serving, serving_interval
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import serving_rates
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.serving_time.speculative_step import Speculation, speculation, speculative_step
from llmb.perfmodel.step_time.cluster_fabric import Device, device
from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.measured_device import measured_device

MS = 1e3
NATIVE_GPUS = ("h200",)  # on which bench/RESULTS.md measured the native engine
UNPROVEN_BLOCKS: dict[str, Callable[[Model], object]] = {  # of which no published row was compared
    "gated DeltaNet layers": lambda model: model.delta_net,
    "Mamba layers": lambda model: model.mamba,
    "sparse attention": lambda model: model.mla and model.mla.index_topk,
}


@dataclass(frozen=True, kw_only=True)
class ServingPrediction:
    """Predicted means over all requests of a benchmark."""

    ttft_ms: float
    tpot_ms: float | None  # none: one output token, which the prefill computes
    e2e_ms: float  # ttft + (osl - 1) x tpot
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    batch: float  # requests that run at once: the concurrency, or what the KV cache holds
    memory_gib: float  # of one GPU, with that batch
    interval_80: dict[str, tuple[float, float] | None]  # by name of the metric
    terms: dict[str, dict[str, float]]  # seconds of a decode step, of the prefill of a request, and of waiting

    @property
    def tokens_per_s_per_user(self) -> float:
        """Speed of one request's output; of a single token, over the whole request."""
        return MS / (self.e2e_ms if self.tpot_ms is None else self.tpot_ms)


def predict_serving(setup: ServingSetup, on: Device | None = None, c: Constants | None = None) -> ServingPrediction:
    """Predict a serving benchmark, on a GPU of the table or one with what-if changes."""
    c = c or calibrated_serving()
    on = on or serving_device(setup)
    work = serving_work(setup)
    load = load_of(setup, work)
    rates = serving_rates(setup, on, c)
    if setup.engine == "native":
        steps = (
            NativeStep.of(setup, work, rates, on, c) if setup.draft_shape is None else speculative_step(setup, on, c)
        )
        times = run_times(steps, int(load.slots), c)
    elif setup.osl == 1:
        times = prefill_times(work, load, rates)
    else:
        times = loop_times(work, load, rates, c["queue"])
    ttft, tpot = float(times.ttft), None if setup.osl == 1 else float(times.tpot)
    e2e = ttft + (setup.osl - 1) * (tpot or 0.0)
    rate = _output_rate(setup, load, times, e2e)
    values: dict[str, Any] = {
        "ttft_ms": ttft * MS, "tpot_ms": None if tpot is None else tpot * MS, "e2e_ms": e2e * MS,
        "output_tokens_per_s": rate, "output_tokens_per_s_per_gpu": rate / setup.gpus,
    }  # fmt: skip
    return ServingPrediction(
        **values,
        batch=float(load.slots),
        memory_gib=memory_bytes_of(setup, work, load.slots) / GIB,
        interval_80={name: None if value is None else _interval(setup, name, value) for name, value in values.items()},
        terms=_terms(load, times, tpot),
    )


def predict_speculation(setup: ServingSetup, acceptance: tuple[float, ...]) -> Speculation:
    """Return the model of speculative decoding with as many requests as run at once."""
    c, on = calibrated_serving(), serving_device(setup)
    return speculation(setup, acceptance, running_requests(setup), on, c)


def steady_state(setup: ServingSetup) -> tuple[float, float]:
    """Return about the most output tokens/s and the least TPOT of the native engine, its scheduler not followed."""
    c, on, work = calibrated_serving(), serving_device(setup), serving_work(setup)
    steps = NativeStep.of(setup, work, serving_rates(setup, on, c), on, c)
    return steps.steady_state(int(load_of(setup, work).slots))


def running_requests(setup: ServingSetup) -> int:
    """Return how many requests run at once: all clients', or what the batch limit and the KV cache admit."""
    return int(load_of(setup, serving_work(setup)).slots)


def serving_device(setup: ServingSetup) -> Device:
    """Return the GPU of a setup: as `probe` measured it, or else of the table."""
    return device(setup.gpu) if setup.rates is None else measured_device(setup.rates)


def _output_rate(setup: ServingSetup, load: Load, times: LoopTimes, e2e: float) -> float:
    """Return output tokens/s of a whole run; where only the steady state is known, of requests that always run."""
    if times.seconds is not None:
        return setup.waves * setup.concurrency * times.mean_osl / times.seconds
    return float(load.slots) * setup.osl / (e2e - float(times.queue))


def _terms(load: Load, times: LoopTimes, tpot: float | None) -> dict[str, dict[str, float]]:
    """Return seconds by kind; `scheduler` holds what is neither a decode step nor a request's own prefill."""
    decode = {name: float(seconds) for name, seconds in times.decode.items()}
    prefill = {name: float(seconds) for name, seconds in times.prefill.items()}
    waiting = {
        "prefill_of_others_per_token": 0.0 if tpot is None else tpot - sum(decode.values()) / load.emitted,
        "kv_cache_queue": float(times.queue),
        "ttft_besides_own_prefill": float(times.ttft - times.queue) - sum(prefill.values()),
    }
    return {"decode_step": decode, "prefill": prefill, "scheduler": waiting}


def interval_kind(setup: ServingSetup, metric: str) -> str:
    """Return the kind of run whose left-out residuals give the width of the interval of `ttft`, `tpot` or `e2e`.

    TTFT holds what an engine does before and after the prefill, and so differs by engine; the others by kind of model.
    """
    if metric == "ttft":
        return setup.engine
    return "experts" if setup.shape.model.experts else "dense"


def crowding(setup: ServingSetup) -> float:
    """Return how many times as wide an interval is for many clients, each doubling of which adds as much.

    Their times are mostly those of prompts of others and of waiting, which depend on settings that nobody publishes.
    """
    data = serving_interval()
    return 1.0 + float(data["per_doubling"]) * max(0.0, math.log2(setup.concurrency / data["few_clients"]))


def log_half_width(setup: ServingSetup, metric: str) -> float:
    """Return half the width of the 80 % interval in log space; wider for unproven GPUs and for many clients."""
    widths = serving_interval()["half_width" if unproven_note(setup) is None else "unseen_half_width"]
    name = {"ttft_ms": "ttft", "tpot_ms": "tpot"}.get(metric, "e2e")
    return float(widths[name][interval_kind(setup, name)]) * crowding(setup)


def unproven_note(setup: ServingSetup) -> str | None:
    """Return why a prediction is unproven; None: measurements of such blocks on this GPU were compared."""
    gpus = NATIVE_GPUS if setup.engine == "native" else serving_interval()["gpus"]
    if setup.gpu in gpus:
        blocks = [name for name, cost in UNPROVEN_BLOCKS.items() if cost(setup.shape.model)]
        if not blocks:
            return None
        return f"unproven: no measured TTFT or TPOT of a model with {blocks[0]} was compared; the interval is widened"
    engine = "this engine" if setup.engine == "native" else "any engine"
    return (
        f"unproven: no measured TTFT or TPOT of {engine} on {with_article(setup.gpu)} was compared, only on "
        f"{', '.join(gpus)}; the interval is that of GPUs left out of the fit, widened"
    )


def _interval(setup: ServingSetup, name: str, value: float) -> tuple[float, float]:
    width = log_half_width(setup, name)
    return value * math.exp(-width), value * math.exp(width)
