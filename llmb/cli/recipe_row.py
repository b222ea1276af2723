"""The recipe row that a command line names with -w, -s, --dtype, --gpu-type, --scale and --set."""

import argparse
import copy
import os
import sys

from llmb.cli.predictions.stored_rates import gpu_name, stored_rates
from llmb.cli.run_options import flag_or_variable, load_recipes
from llmb.config.overrides import from_arguments, from_environment
from llmb.config.resolve import resolve_all
from llmb.config.run_list import RunSelection, only_proxies, split_target, tasks_for
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.launch.install_root import install_root
from llmb.perfmodel.step_time.recipe_settings import as_configured
from llmb.perfmodel.step_time.setup_fields import parse_scales
from llmb.perfmodel.step_time.step_constants import parse_engine

EXTERNAL = "engine=megatron_bridge"  # rows as published, without departures of the native engine
BF16_STATE = ("master_weights", "gradients", "moments", "reduce_dtype")  # formats that only the native engine has


def published_row(options: argparse.Namespace, settings: list[str]) -> tuple[RunConfig, list[int]]:
    """Return a training row as the engine that published it runs it, and the requested scales.

    A row made for the native engine, with its training state in bf16, is resolved for that. A printed cell that the
    published run did not have is named on stderr.
    """
    recipe, _ = split_target(options.workload, load_recipes())
    if recipe.kind != "training":
        return native_row(options, settings)
    config, scales = native_row(options, [*settings, EXTERNAL])
    if any(getattr(config.workload, name, None) == "bf16" for name in BF16_STATE):
        return native_row(options, settings)
    configured = as_configured(config)
    for change in configured.overrides[len(config.overrides) :]:
        line = f"{change.field}={change.value}, as its release configures it; the printed table has {change.replaced}"
        print(f"note: {line}", file=sys.stderr)
    return configured, scales


def native_row(options: argparse.Namespace, settings: list[str]) -> tuple[RunConfig, list[int]]:
    """Return a row as `submit` would run it with these settings, and the requested scales."""
    chosen = copy.copy(options)
    chosen.set = settings
    return resolve_row(chosen)


def split_engine(settings: list[str]) -> tuple[str | None, list[str]]:
    """Return the engine whose constants predict, and the other settings."""
    names = [parse_engine(text.partition("=")[2]) for text in settings if text.startswith("engine=")]
    return (names[-1] if names else None), [text for text in settings if not text.startswith("engine=")]


def resolve_row(options: argparse.Namespace) -> tuple[RunConfig, list[int]]:
    """Return the resolved row with the most GPUs up to the first scale, and the requested scales.

    Environment variables choose and override it as those of `submit` do.
    """
    recipes = load_recipes()
    recipe, target_size = split_target(options.workload, recipes)
    if not recipe.rows:
        raise ConfigError(only_proxies(recipe.workload))
    size = flag_or_variable(options.size, "MODEL_SIZE", "-s") or target_size or recipe.default_size
    gpu = gpu_name(flag_or_variable(options.gpu_type, "GPU_TYPE", "--gpu-type") or recipe.default_gpu)
    dtype = (flag_or_variable(options.dtype, "DTYPE", "--dtype") or recipe.default_dtype).lower()
    scale = flag_or_variable(options.scale, "JOB_TOTAL_GPUS", "--scale")
    rates = stored_rates(gpu, native=False, dtype=dtype)
    listed = recipe.values("gpus", size=size, dtype=dtype, gpu=gpu)
    scales = parse_scales(scale) if scale else listed[:1] or [1]  # not listed: refused below
    base = max((scale for scale in listed if scale <= scales[0]), default=listed[0] if listed else scales[0])
    selection = RunSelection(
        targets=(recipe.workload,), size=size, dtypes=(dtype,), scales=(base,), gpu=gpu,
        gpu_memory_bytes=int(rates.device_memory_bytes) if rates and rates.device_memory_bytes else None,
        gpu_here=rates is not None,
        settings=(*from_environment(os.environ), *from_arguments(options.set)),
    )  # fmt: skip
    resolved, bad = resolve_all(tasks_for(selection, recipes), recipes, install_root(os.environ))
    if bad:
        raise ConfigError(bad[0])
    return resolved[0][1], scales
