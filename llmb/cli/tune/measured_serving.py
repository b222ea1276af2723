"""Measurement of the best serving settings on this machine, one engine at a time, through the same path as `submit`.

In full where the machine has the GPUs of an engine, else as proxies whose clients, batch and token budget are to those
of the proxy's row as the candidate's are to those of the recipe's.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any, Literal

from llmb.cli.run_options import gpu_here, load_recipes
from llmb.cli.tune.measured_layouts import CPU_RANKS
from llmb.cli.tune.measured_runs import MeasuredRuns, NamedRun
from llmb.config.overrides import Setting, from_arguments
from llmb.config.proxy_layout import shrink_layout
from llmb.config.spec import Inference, Parallel, RunConfig
from llmb.errors import ConfigError
from llmb.launch.local_machine import gpu_names
from llmb.perfmodel.memory_fit import misfit
from llmb.perfmodel.serving_time.serving_fields import serving_setup_of
from llmb.perfmodel.serving_time.serving_predictor import ServingPrediction, predict_serving
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.step_time.cluster_fabric import FABRICS
from llmb.report.tune.measured_serving_table import MeasuredServing, measured_serving_data, measured_serving_text
from llmb.report.tune.measured_table import RECIPE
from llmb.report.tune.serving_tune_table import TunedServing, engine_text

LOADS = ("concurrency", "max_batch_size", "max_num_tokens")


def measure_serving(
    options: argparse.Namespace, settings: list[str], tuned: TunedServing, row: RunConfig
) -> tuple[int, list[dict[str, Any]]]:
    """Run the best settings and the recipe's row one after the other; return the exit code and the figures."""
    runs = MeasuredRuns(list(_runs(options, settings, tuned, row)), options.json)
    measured = [
        MeasuredServing(names=names, config=config, predicted=_predicted(config), result=result)
        for names, config, result in runs
    ]
    if not options.json:
        print(f"\n{measured_serving_text(measured)}")
    return runs.code, measured_serving_data(measured)


def _runs(options: argparse.Namespace, settings: list[str], tuned: TunedServing, row: RunConfig) -> Iterator[NamedRun]:
    """Yield the configurations to measure, with the candidates that each stands for."""
    configs: dict[str, tuple[list[str], RunConfig]] = {}

    def add(name: str, setup: ServingSetup) -> bool:
        """Add a candidate, unless the engine refuses it or it does not fit beside its own buffers."""
        try:
            config = _resolved(options, settings, setup, row)
        except ConfigError:
            return False
        if misfit(config) is not None:
            return False
        configs.setdefault(repr((config.parallel, config.workload)), ([], config))[0].append(name)
        return True

    remaining = options.measure
    for place, candidate in enumerate(tuned.search.candidates, 1):
        if remaining and add(f"{place}. {_name(candidate.setup)}", candidate.setup):
            remaining -= 1
    if tuned.recipe is not None:
        add(f"{RECIPE} {_name(tuned.recipe.setup)}", tuned.recipe.setup)
    if not configs:
        raise ConfigError("the native engine runs none of these settings here; fix others with --set")
    for names, config in configs.values():
        yield tuple(names), config


def _name(setup: ServingSetup) -> str:
    return f"{engine_text(setup)}, batch {setup.max_batch_size} budget {setup.max_num_tokens}"


def _resolved(options: argparse.Namespace, settings: list[str], setup: ServingSetup, row: RunConfig) -> RunConfig:
    """Return one engine with the settings of a candidate on this machine, resolved as `submit` resolves it."""
    gpu, count = gpu_here(), len(gpu_names())
    work = row.workload
    assert isinstance(work, Inference)
    split = Parallel(tp=setup.tp * setup.attention_dp, pp=setup.pp, ep=setup.ep)
    loads: dict[str, int] = {name: getattr(setup, name) for name in LOADS}
    chosen = from_arguments(settings)
    if gpu == setup.gpu and count >= setup.gpus and options.ranks is None:
        return _resolve(options, [*chosen, *_settings(split, setup, loads)], setup.gpus, gpu, None)
    ranks = options.ranks or min(setup.gpus, count or CPU_RANKS)
    kind: Literal["small", "true-width"] = "small" if gpu is None else "true-width"
    chosen = [setting for setting in chosen if setting.field not in ("isl", "osl", "num_requests")]
    proxy = _resolve(options, chosen, ranks, gpu, kind).workload
    assert isinstance(proxy, Inference)
    scaled = {name: max(1, getattr(proxy, name) * loads[name] // getattr(work, name)) for name in LOADS}
    scaled["max_num_tokens"] = max(scaled["max_num_tokens"], scaled["max_batch_size"])
    return _resolve(
        options, [*chosen, *_settings(shrink_layout(split, ranks), setup, scaled)], ranks, gpu, kind
    )  # fmt: skip


def _settings(split: Parallel, setup: ServingSetup, loads: dict[str, int]) -> list[Setting]:
    fields: dict[str, Any] = {"tp": split.tp, "pp": split.pp, "ep": split.ep, **loads}
    if setup.attention_dp > 1 and split.tp > 1:
        fields["attention_dp"] = True
    return [Setting(field=name, value=value, source="tune") for name, value in fields.items()]


def _resolve(
    options: argparse.Namespace,
    settings: list[Setting],
    gpus: int,
    gpu: str | None,
    proxy: Literal["small", "true-width"] | None,
) -> RunConfig:
    from llmb.config.resolve import resolve_all
    from llmb.config.run_list import RunSelection, split_target, tasks_for
    from llmb.launch.install_root import install_root

    recipes = load_recipes()
    recipe, size = split_target(options.workload, recipes)
    size, dtype = options.size or size or recipe.default_size, (options.dtype or recipe.default_dtype).lower()
    listed = recipe.values("gpus", size=size, dtype=dtype, gpu=gpu)
    selection = RunSelection(
        targets=(recipe.workload,), size=size, dtypes=(dtype,), scales=(gpus,), gpu=gpu, proxy=proxy,
        settings=tuple(settings), force=proxy is None and gpus not in listed,
    )  # fmt: skip
    resolved, _ = resolve_all(tasks_for(selection, recipes), recipes, install_root(os.environ))
    config: RunConfig = resolved[0][1]
    return config


def _predicted(config: RunConfig) -> ServingPrediction | None:
    """Return the prediction of what ran; none: the speed of a CPU is not predicted."""
    return predict_serving(serving_setup_of(config)) if config.machine.gpu in FABRICS else None
