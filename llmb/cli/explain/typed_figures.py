"""Explanation of figures typed by hand: a model, a GPU type, and how fast it is said to be."""

import argparse
from dataclasses import replace

from llmb.cli.predictions.stored_rates import gpu_name, stored_rates
from llmb.cli.run_options import load_recipes
from llmb.errors import ConfigError
from llmb.perfmodel.chip_limits import training_limits
from llmb.perfmodel.explain.explanation import Explanation, explain_serving, explain_training, step_amount
from llmb.perfmodel.explain.impossible_causes import holds
from llmb.perfmodel.explain.published_matches import serving_matches, training_matches
from llmb.perfmodel.flops import train_flops_per_sequence
from llmb.perfmodel.hardware import TERA
from llmb.perfmodel.serving_time.serving_bounds import ServedFigures
from llmb.perfmodel.serving_time.serving_constants import parse_engine
from llmb.perfmodel.serving_time.serving_fields import build_serving_setup, parse_serving_settings
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.shapes.hf_shape import find_or_read_shape
from llmb.perfmodel.step_time.predictor import model_flops
from llmb.perfmodel.step_time.setup_fields import build_setup, parse_settings
from llmb.perfmodel.step_time.step_setup import StepSetup

MOST_CLIENTS = 4096  # where no concurrency is given: the KV cache then bounds the batch
FIGURES = ("tokens_per_s", "step_time_s", "tflops_per_gpu", "ttft_ms", "tpot_ms")


def explain_typed(options: argparse.Namespace) -> Explanation:
    """Explain a serving figure if lengths are given, else a training figure."""
    for name in FIGURES:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{_flag(name)} must be a number above 0, got {value:g}")
    if options.model is None or options.gpu_type is None:
        raise ConfigError("figures typed by hand need --model (a name of the catalog or a config.json) and --gpu-type")
    options.gpu_type = gpu_name(options.gpu_type)
    return _serving(options) if options.isl or options.osl else _training(options)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _serving(options: argparse.Namespace) -> Explanation:
    if not (options.isl and options.osl):
        raise ConfigError("serving needs both --isl and --osl")
    for name in ("step_time_s", "tflops_per_gpu", "scale"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{_flag(name)} is for training; leave out --isl and --osl")
    shape = find_or_read_shape(options.model)
    dtype = (options.dtype or shape.checkpoint or "bf16").lower()
    engine = parse_engine(options.engine or "vllm")
    setup = build_serving_setup(
        shape, options.gpu_type, dtype, engine, (options.isl, options.osl), options.concurrency or MOST_CLIENTS,
        parse_serving_settings(options.set), stored_rates(options.gpu_type, engine == "native", dtype),
    )  # fmt: skip
    figures = _served(options, setup)
    explanation = explain_serving(_serving_subject(options, setup), setup, figures)
    rate = figures.output_tokens_per_s / setup.gpus
    lengths = (options.isl, options.osl)
    matches = serving_matches(load_recipes().values(), shape.model, setup.gpu, setup.dtype, lengths, rate)
    return replace(explanation, published=tuple(matches))


def _served(options: argparse.Namespace, setup: ServingSetup) -> ServedFigures:
    """Return the figures; a rate follows from latencies and concurrency."""
    latency = None
    if setup.osl == 1 and options.tpot_ms is not None:
        raise ConfigError("--tpot-ms: one output token has no TPOT; give --tokens-per-s")
    if options.ttft_ms is not None or options.tpot_ms is not None:
        if options.ttft_ms is None or options.tpot_ms is None or not options.concurrency:
            raise ConfigError("latencies need all of --ttft-ms, --tpot-ms and --concurrency")
        latency = (options.ttft_ms, options.tpot_ms)
    rate = options.tokens_per_s
    if rate is None and latency is not None:
        rate = setup.concurrency * setup.osl / (latency[0] + (setup.osl - 1) * latency[1]) * 1e3
    if rate is None:
        raise ConfigError(
            "serving needs --tokens-per-s, output tokens of all GPUs, or --ttft-ms, --tpot-ms, --concurrency"
        )
    return ServedFigures(output_tokens_per_s=rate, latency_ms=latency)


def _serving_subject(options: argparse.Namespace, setup: ServingSetup) -> str:
    clients = (
        f"concurrency {options.concurrency}" if options.concurrency else "concurrency not given: the most that fits"
    )
    return (
        f"{setup.shape.model.name}, {setup.dtype}, {setup.gpus} x {setup.gpu}, isl {setup.isl}, osl {setup.osl}, "
        f"{clients}, engine {setup.engine}"
    )


def _training(options: argparse.Namespace) -> Explanation:
    figures = [name for name in ("step_time_s", "tokens_per_s", "tflops_per_gpu") if getattr(options, name) is not None]
    if len(figures) != 1:
        raise ConfigError(
            "give one figure: --step-time-s, --tokens-per-s or --tflops-per-gpu; serving: --isl and --osl too"
        )
    for name in ("concurrency", "ttft_ms", "tpot_ms"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{_flag(name)} is for serving; add --isl and --osl")
    values = parse_settings(options.set) | ({"engine": options.engine} if options.engine else {})
    dtype = (options.dtype or "bf16").lower()
    rates = stored_rates(options.gpu_type, values.get("engine") == "native", dtype)
    setup = build_setup(find_or_read_shape(options.model), options.gpu_type, options.scale or 1, dtype, values)
    setup = replace(setup, rates=rates)
    seconds = {
        "step_time_s": lambda value: value,
        "tokens_per_s": lambda value: setup.gbs * setup.seqlen / value,
        "tflops_per_gpu": lambda value: model_flops(setup) / setup.gpus / value / TERA,
    }[figures[0]](getattr(options, figures[0]))
    subject = (
        f"{setup.shape.model.name}, {setup.dtype}, {setup.gpus} x {setup.gpu}, seqlen {setup.seqlen}, gbs {setup.gbs}, "
        f"step time {seconds:.4g} s, engine {setup.engine}"
    )
    explanation = explain_training(subject, setup, seconds, {})
    rate = setup.gbs * setup.seqlen / seconds / setup.gpus
    matches = training_matches(load_recipes().values(), setup.shape.model, setup.gpu, setup.peak_dtype, rate)
    explanation = replace(explanation, published=tuple(matches))
    if options.tflops_per_gpu is None:
        return explanation
    return _with_conventions(explanation, setup, options.tflops_per_gpu)


def _with_conventions(explanation: Explanation, setup: StepSetup, tflops: float) -> Explanation:
    """Return the explanation of a typed TFLOP/s with what it is by our convention, if it has another.

    A convention that makes an impossible figure possible is a cause, before those of other runs.
    """
    amount = step_amount(setup)
    causal, full = (train_flops_per_sequence(amount.model, setup.seqlen, name) for name in ("causal", "full"))
    causes, notes = [], []
    for counted, factor in (("attention in full, not causal", causal / full), ("recomputed forwards too (HFU)", 3 / 4)):
        text = f"it counts {counted}: {tflops * factor:,.0f} TFLOP/s/GPU by our convention"
        seconds = model_flops(setup) / setup.gpus / (tflops * factor * TERA)
        if explanation.verdict != "impossible":
            notes.append(f"if {text}")
        elif holds(training_limits(amount, seconds)):
            causes.append(text)
    return replace(explanation, causes=(*causes, *explanation.causes), notes=(*explanation.notes, *notes))
