"""The recipe row that a command line names with -w, -s, --dtype, --gpu-type, --scale and --set."""

import argparse
import os

from llmb.cli.predictions.stored_rates import gpu_name, stored_rates
from llmb.cli.run_options import load_recipes
from llmb.config.overrides import from_arguments
from llmb.config.resolve import resolve_all
from llmb.config.run_list import RunSelection, split_target, tasks_for
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.launch.install_root import install_root
from llmb.perfmodel.step_time.setup_fields import parse_scales


def resolve_row(options: argparse.Namespace) -> tuple[RunConfig, list[int]]:
    """Return the resolved row with the most GPUs up to the first scale, and the scales asked for."""
    recipes = load_recipes()
    recipe, size = split_target(options.workload, recipes)
    size, gpu = options.size or size or recipe.default_size, gpu_name(options.gpu_type or recipe.default_gpu)
    dtype = (options.dtype or recipe.default_dtype).lower()
    rates = stored_rates(gpu, native=False, dtype=dtype)
    listed = recipe.values("gpus", size=size, dtype=dtype, gpu=gpu)
    scales = parse_scales(options.scale) if options.scale else listed[:1] or [1]  # not listed: refused below
    base = max((scale for scale in listed if scale <= scales[0]), default=listed[0] if listed else scales[0])
    selection = RunSelection(
        targets=(recipe.workload,), size=size, dtypes=(dtype,), scales=(base,), gpu=gpu,
        gpu_memory_bytes=int(rates.device_memory_bytes) if rates and rates.device_memory_bytes else None,
        gpu_here=rates is not None,
        settings=tuple(from_arguments(options.set)),
    )  # fmt: skip
    resolved, bad = resolve_all(tasks_for(selection, recipes), recipes, install_root(os.environ))
    if bad:
        raise ConfigError(bad[0])
    return resolved[0][1], scales
