"""Measurement of the best layouts of a search on this machine, through the same path as `submit`.

In full where the machine has the GPUs, else as proxies: layouts scaled down to the ranks here, of the real layers on
GPUs and of a small model on a CPU. Two candidates whose proxies are the same are measured once.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmb.cli.run_options import gpu_here, load_recipes
from llmb.cli.tune.measured_runs import MeasuredRuns, NamedRun
from llmb.config.overrides import Setting, from_arguments
from llmb.config.parallel_layout import max_layers_per_rank
from llmb.config.proxy_layout import shrink_layout
from llmb.config.spec import RunConfig
from llmb.launch.local_machine import gpu_names
from llmb.perfmodel.step_time.cluster_fabric import FABRICS
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.step_setup import DTYPES, StepSetup, setup_of
from llmb.perfmodel.tune.layout_reasons import layout_fields
from llmb.perfmodel.tune.layout_search import Candidate
from llmb.report.tune.measured_table import RECIPE, MeasuredLayout, measured_data, measured_text
from llmb.report.tune.tune_table import TunedRun, layout_text

CPU_RANKS = 2  # of a proxy on a machine without a GPU
PROXY_SIZES = ("gbs", "seqlen")  # which a proxy has of its own


@dataclass(frozen=True)
class Here:
    """The part of this machine that candidates run on."""

    gpu: str | None  # none: its CPU
    ranks: int
    proxy: Literal["small", "true-width"] | None  # none: in full


def machine_for(setup: StepSetup, ranks: int | None) -> Here:
    """Return how candidates run on this machine."""
    gpu, count = gpu_here(), len(gpu_names())
    if gpu == setup.gpu and count >= setup.gpus and ranks is None:
        return Here(gpu, setup.gpus, None)
    if gpu is None:
        return Here(None, ranks or min(CPU_RANKS, setup.gpus), "small")
    return Here(gpu, ranks or min(count, setup.gpus), "true-width")


def measure_layouts(
    options: argparse.Namespace, settings: list[str], tuned: TunedRun
) -> tuple[int, list[dict[str, Any]]]:
    """Run the best layouts and the recipe's row one after the other; return the exit code and the figures."""
    here = machine_for(tuned.best.setup, options.ranks)
    runs = MeasuredRuns(list(_runs(options, settings, tuned, here)), options.json)
    measured = [
        MeasuredLayout(names=names, config=config, predicted_s=_predicted(config), result=result)
        for names, config, result in runs
    ]
    if not options.json:
        print(f"\n{measured_text(measured)}")
    return runs.code, measured_data(measured)


def _runs(options: argparse.Namespace, settings: list[str], tuned: TunedRun, here: Here) -> Iterator[NamedRun]:
    """Yield the configurations to measure, with the candidates that each stands for."""
    named: list[tuple[str, Candidate]] = []
    for place, candidate in enumerate(tuned.search.candidates[: options.measure], 1):
        named.append((f"{place}. {layout_text(candidate.setup)} mbs{candidate.setup.mbs}", candidate))
    if (recipe := tuned.recipe_candidate) is not None:
        named.append((f"{RECIPE} {layout_text(recipe.setup)} mbs{recipe.setup.mbs}", recipe))
    configs: dict[str, tuple[list[str], RunConfig]] = {}
    for name, candidate in named:
        config = _resolved(options, settings, candidate.setup, here)
        key = repr((config.parallel, config.workload))
        configs.setdefault(key, ([], config))[0].append(name)
    for names, config in configs.values():
        yield tuple(names), config


def _resolved(options: argparse.Namespace, settings: list[str], setup: StepSetup, here: Here) -> RunConfig:
    """Return the run of a candidate on this machine, resolved as `submit` resolves it."""
    chosen = [s for s in from_arguments(settings) if here.proxy is None or s.field not in PROXY_SIZES]
    if here.proxy is None:
        return _resolve(options, [*chosen, *_settings(layout_fields(setup))], setup, here)
    split = shrink_layout(replace(setup.parallel, dp=setup.dp), here.ranks)
    fields = {name: getattr(split, name) for name in ("tp", "pp", "cp", "vp", "ep", "etp", "fsdp")} | {"mbs": setup.mbs}
    config = _resolve(options, [*chosen, *_settings(fields)], setup, here)
    layers, counts = max_layers_per_rank(config.model.layers, config.parallel), layout_fields(setup)
    scaled = {name: -(-counts[name] * layers // setup.most_layers) for name in ("recompute_layers", "offload_layers")}
    if not any(scaled.values()):
        return config
    return _resolve(options, [*chosen, *_settings(fields | scaled)], setup, here)


def _settings(fields: dict[str, Any]) -> list[Setting]:
    values = {name: None if name == "vp" and (value or 1) == 1 else value for name, value in fields.items()}
    return [Setting(field=name, value=value, source="tune") for name, value in values.items()]


def _resolve(options: argparse.Namespace, settings: list[Setting], setup: StepSetup, here: Here) -> RunConfig:
    from llmb.config.resolve import resolve_all
    from llmb.config.run_list import RunSelection, split_target, tasks_for
    from llmb.launch.install_root import install_root

    recipes = load_recipes()
    recipe, size = split_target(options.workload, recipes)
    selection = RunSelection(
        targets=(recipe.workload,), size=options.size or size or recipe.default_size, dtypes=(setup.dtype,),
        scales=(here.ranks,), gpu=here.gpu, proxy=here.proxy, settings=tuple(settings),
        layout=setup.gpu if here.proxy and here.ranks > 1 else None,
    )  # fmt: skip
    resolved, _ = resolve_all(tasks_for(selection, recipes), recipes, install_root(os.environ))
    config: RunConfig = resolved[0][1]
    return config


def _predicted(config: RunConfig) -> float | None:
    """Return the predicted step time of what ran; none: the speed of a CPU is not predicted."""
    if config.machine.gpu not in FABRICS or config.precision.dtype not in DTYPES:
        return None
    return predict(setup_of(config)).step_time_s
