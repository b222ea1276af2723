"""Tune of a training run: the row or model to start from, the search, its output."""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

from llmb.cli.predictions.engine_option import other_engine_note, print_note, settings_with_engine
from llmb.cli.predictions.stored_rates import gpu_name, stored_rates
from llmb.cli.recipe_row import native_row, published_row, split_engine
from llmb.cli.run_options import load_recipes
from llmb.cli.tune.measured_layouts import machine_for, measure_layouts
from llmb.config.parallel_layout import divisors
from llmb.config.run_list import split_target
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB, with_article
from llmb.perfmodel.step_time.cluster_fabric import FABRICS
from llmb.perfmodel.step_time.setup_fields import build_setup, parse_scales, parse_settings, scaled
from llmb.perfmodel.step_time.step_setup import StepSetup, setup_of
from llmb.perfmodel.tune.fixed_fields import split_settings
from llmb.perfmodel.tune.layout_remedies import layout_remedies
from llmb.perfmodel.tune.layout_search import LayoutSearch, search_layouts
from llmb.perfmodel.tune.memory_savings import external_room
from llmb.perfmodel.tune.native_layouts import native_room, runs_natively
from llmb.report.terminal.colour import print_report
from llmb.report.tune.tune_table import TunedRun, tuned_data, tuned_text


def tune_training(options: argparse.Namespace) -> int:
    """Search the layouts of one run and print the best; measure them if requested."""
    fixed, settings = split_settings(settings_with_engine(options))
    engine, settings = split_engine(settings)
    config, setup = _recipe_run(options, settings) if options.workload else (None, _model_run(options, settings))
    setup = replace(setup, engine=engine or setup.engine)
    setup = replace(setup, rates=stored_rates(setup.gpu, setup.engine == "native", setup.dtype))
    start = time.perf_counter()
    search = _search(options, setup, fixed, config)
    if not search.candidates:
        raise ConfigError(_why_nothing_fits(setup, fixed, search))
    recipe = setup if options.workload else None
    tuned = TunedRun(search=search, recipe=recipe, top=options.top, seconds=time.perf_counter() - start)
    data = tuned_data(tuned)
    if not options.json:
        print_report(tuned_text(tuned))
        print_note(other_engine_note(options, setup.engine))
    code = 0
    if options.measure is not None:
        code, data["measured"] = measure_layouts(options, settings, tuned)
    if options.json:
        print(json.dumps(data))
    return code


def _search(
    options: argparse.Namespace, setup: StepSetup, fixed: dict[str, Any], config: RunConfig | None
) -> LayoutSearch:
    """Search layouts that the native engine supports if it will run them, with its exact memory unless proxies run."""
    if config is None or config.engine != "native":
        return search_layouts(setup, fixed)
    in_full = options.measure is None or machine_for(setup, options.ranks).proxy is None
    room = native_room(config) if in_full else external_room(setup)
    return search_layouts(setup, fixed, room, runs_natively(config))


def _model_run(options: argparse.Namespace, settings: list[str]) -> StepSetup:
    """Return a description of any model; the batch is one sequence per GPU unless set."""
    from llmb.perfmodel.shapes.hf_shape import find_or_read_shape

    if options.size:
        raise ConfigError("-s names a size of -w; with --model write the whole name, such as llama3.1-8b")
    if options.gpu_type is None or options.scale is None:
        raise ConfigError(f"--model needs --gpu-type ({', '.join(FABRICS)}) and --scale, a number of GPUs")
    shape = find_or_read_shape(options.model)
    gpu, gpus = gpu_name(options.gpu_type), _one_scale(parse_scales(options.scale))
    stored_rates(gpu, native=False)
    values = {"gbs": gpus, **parse_settings(settings)}
    # Any layout will do to start from whose replicas divide the batch.
    values["cp"] = next(ranks for ranks in divisors(gpus) if values["gbs"] % (gpus // ranks) == 0)
    return build_setup(shape, gpu, gpus, (options.dtype or "bf16").lower(), values)


def _recipe_run(options: argparse.Namespace, settings: list[str]) -> tuple[RunConfig, StepSetup]:
    """Return a recipe row as published; or as the native engine runs it, where it is measured or made for it."""
    recipe, _ = split_target(options.workload, load_recipes())
    if recipe.kind != "training":
        hint = "; add --task serve" if recipe.kind == "inference" else "; llmb-run plan searches its plan"
        raise ConfigError(f"{recipe.workload} is not a training workload{hint}")
    if options.measure is None:
        config, scales = published_row(options, settings)
    else:
        config, scales = native_row(options, settings)
    gpus = _one_scale(scales)
    setup = scaled(setup_of(config), gpus)
    return replace(config, machine=replace(config.machine, gpus=gpus)), setup


def _one_scale(scales: list[int]) -> int:
    if len(scales) > 1:
        raise ConfigError(f"tune takes one number of GPUs; --scale names {', '.join(map(str, scales))}")
    return scales[0]


def _why_nothing_fits(setup: StepSetup, fixed: dict[str, Any], search: LayoutSearch) -> str:
    """Return what was found instead of a layout that fits, and what would be possible."""
    name = f"{setup.shape.model.name} on {setup.gpus} x {setup.gpu}"
    if search.smallest is None:
        return (
            f"no layout divides {name}: tp x pp x cp x dp = {setup.gpus}, gbs {setup.gbs} must be a multiple of "
            "dp x mbs, with a micro-batch for every pipeline stage; change --scale or --set gbs"
        )
    needed, usable = search.smallest.memory / GIB, search.limit / GIB
    remedies = ", or ".join(layout_remedies(setup, fixed)) or "nothing that was tried"
    layers = search.smallest.setup.recompute_layers or 0
    recomputed = f"with {layers} layers recomputed" if "recompute_layers" in fixed else "with every layer recomputed"
    return (
        f"no layout of {name} fits: the smallest of {search.considered} needs {needed:,.0f} GiB {recomputed}, "
        f"{with_article(setup.gpu)} has {usable:,.0f} GiB usable; possible with {remedies}"
    )
