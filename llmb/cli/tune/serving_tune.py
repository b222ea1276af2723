"""Tune of a serving engine: the row or model to start from, the search under an SLO, its output."""

import argparse
import copy
import json
import time
from dataclasses import replace
from typing import Any

from llmb.cli.predictions.stored_rates import gpu_name, stored_rates
from llmb.cli.recipe_row import resolve_row
from llmb.config.load_settings import parse_slo
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.serving_time.serving_constants import parse_engine
from llmb.perfmodel.serving_time.serving_fields import build_serving_setup, parse_serving_settings, serving_setup_of
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.serving_time.serving_setup import WAVES, ServingSetup
from llmb.perfmodel.shapes.hf_shape import find_or_read_shape
from llmb.perfmodel.step_time.cluster_fabric import FABRICS
from llmb.perfmodel.step_time.setup_fields import parse_scales
from llmb.perfmodel.tune.serving_candidate import ServingCandidate
from llmb.perfmodel.tune.serving_search import ServingSearch, search_serving
from llmb.perfmodel.tune.serving_space import SERVING_DIMENSIONS
from llmb.report.terminal.colour import print_report
from llmb.report.tune.serving_tune_table import TunedServing, engine_text, serving_tune_data, serving_tune_text

MOST_GPUS = 64  # that a remedy proposes for one engine


def tune_serving(options: argparse.Namespace) -> int:
    """Search the settings of one engine and print the best; measure them if requested."""
    fixed, settings = _split(options.set)
    limits = _limits(options.slo)
    recipe, base, gpus, config = _start(options, settings)
    if base.osl == 1 and "tpot_ms" in limits:
        raise ConfigError("--slo: one output token has no TPOT; limits of osl 1 are: ttft, e2e")
    if recipe is not None and not limits:
        fixed.setdefault("concurrency", recipe.setup.concurrency)  # the load of the benchmark
    elif recipe is not None:
        base = replace(base, waves=WAVES)
    start = time.perf_counter()
    search = search_serving(base, gpus, limits, fixed, runs_natively if base.engine == "native" else None)
    if not search.candidates:
        raise ConfigError(_why_nothing_fits(base, search, fixed))
    tuned = TunedServing(search=search, recipe=recipe, top=options.top, seconds=time.perf_counter() - start)
    data = serving_tune_data(tuned)
    if not options.json:
        print_report(serving_tune_text(tuned))
    code = 0
    if options.measure is not None:
        from llmb.cli.tune.measured_serving import measure_serving

        assert config is not None
        code, data["measured"] = measure_serving(options, settings, tuned, config)
    if options.json:
        print(json.dumps(data))
    return code


def runs_natively(setup: ServingSetup) -> bool:
    """Return whether the native engine runs a layout: attention replicas on all ranks of a stage or on none."""
    return setup.attention_dp == 1 or setup.tp == 1


def _split(settings: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fixed dimensions, checked, and the other settings."""
    fixed, others = {}, []
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: expected FIELD=VALUE; searched are: {', '.join(SERVING_DIMENSIONS)}")
        if name not in SERVING_DIMENSIONS:
            others.append(text)
        elif not value.isascii() or not value.isdigit() or not int(value):
            raise ConfigError(f"{name} must be a whole number, 1 or more, got {value!r}")
        else:
            fixed[name] = int(value)
    return fixed, others


def _limits(slo: str | None) -> dict[str, float]:
    """Return the limits of an SLO that is predicted: ttft, tpot and e2e."""
    if slo is None:
        return {}
    limits = {name: value for name, value in vars(parse_slo(slo)).items() if value is not None}
    if unpredicted := [name.removesuffix("_ms") for name in limits if name not in ("ttft_ms", "tpot_ms", "e2e_ms")]:
        raise ConfigError(f"--slo: {unpredicted[0]} is not predicted; limits are: ttft, tpot, e2e")
    return limits


def _start(
    options: argparse.Namespace, settings: list[str]
) -> tuple[ServingCandidate | None, ServingSetup, int, RunConfig | None]:
    """Return the recipe's row, the settings to start from, the GPUs, and the row's configuration."""
    if options.workload is None:
        return None, *_model_run(options, settings), None
    chosen = copy.copy(options)
    chosen.set, chosen.scale = settings, None
    config, listed = resolve_row(chosen)
    if not isinstance(config.workload, Inference):
        raise ConfigError(f"{config.target} is not an inference workload; leave out --task serve")
    engine = parse_engine(options.engine or "native")
    rates = stored_rates(config.machine.gpu, engine == "native", config.precision.dtype)
    setup = serving_setup_of(config, engine, rates)
    lengths = {name: getattr(options, name) for name in ("isl", "osl") if getattr(options, name) is not None}
    setup = replace(setup, **lengths)
    gpus = _one_scale(parse_scales(options.scale)) if options.scale else listed[0]
    return ServingCandidate(setup, predict_serving(setup)), setup, gpus, config


def _model_run(options: argparse.Namespace, settings: list[str]) -> tuple[ServingSetup, int]:
    missing = [name for name in ("gpu_type", "scale", "isl", "osl") if getattr(options, name) is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"--model with --task serve needs {flags}; GPU types are: {', '.join(FABRICS)}")
    gpu = gpu_name(options.gpu_type)
    shape, engine = find_or_read_shape(options.model), parse_engine(options.engine or "vllm")
    dtype = (options.dtype or shape.checkpoint or "bf16").lower()
    lengths, values = (options.isl, options.osl), parse_serving_settings(settings)
    rates = stored_rates(gpu, engine == "native", dtype)
    base = build_serving_setup(shape, gpu, dtype, engine, lengths, 1, values, rates)
    return base, _one_scale(parse_scales(options.scale))


def _one_scale(scales: list[int]) -> int:
    if len(scales) > 1:
        raise ConfigError(f"tune takes one number of GPUs; --scale names {', '.join(map(str, scales))}")
    return scales[0]


def _why_nothing_fits(base: ServingSetup, search: ServingSearch, fixed: dict[str, Any]) -> str:
    """Return what was found instead of settings within the SLO, and what would be possible."""
    name = f"{base.shape.model.name} on {search.gpus} x {base.gpu}"
    if search.predicted:
        least = ", ".join(
            f"{metric.removesuffix('_ms')} {getattr(c.prediction, metric):.1f} ms ({engine_text(c.setup)}, "
            f"{c.setup.concurrency} client{'s' if c.setup.concurrency > 1 else ''})"
            for metric, c in search.least.items()
        )
        return f"no setting of {name} keeps the SLO; the least predicted are {least}; relax --slo or raise --scale"
    if search.misfit is None:
        return f"no layout divides {name}" + (f" with {fixed}" if fixed else "") + "; change --scale or --set"
    gpus = 2 * search.gpus
    while gpus <= MOST_GPUS:
        if search_serving(base, gpus, {}, fixed | {"concurrency": 1, "max_num_tokens": 8192}).candidates:
            return f"{name} does not fit: {search.misfit.partition('; ')[0]}; possible with --scale {gpus}"
        gpus *= 2
    return f"{name} does not fit: {search.misfit}"
