"""Configurations of a sweep over an engine of llmb: one for each variant, resolved and checked as `submit` does."""

import argparse
import copy
import sys
from dataclasses import replace
from typing import Any

from llmb.cli.sweep.plan_builder import install_folder, serve_arguments, sweep_name
from llmb.config.load_settings import LoadSettings, row_requests
from llmb.config.serialization import to_plain
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError


def engine_fields(
    options: argparse.Namespace, mode: str, variants: tuple[str, ...], settings: list[str]
) -> dict[str, Any]:
    """Return the fields of a plan that come from the configurations, and the recipe's concurrency."""
    configs: dict[str, dict[str, Any]] = {}
    resolved = []
    for variant in variants:
        chosen = [*settings, variant] if variant else settings
        config = _resolve(options, chosen)
        resolved.append(config)
        configs[variant] = {"run": to_plain(config)}
        if mode == "serve":
            configs[variant]["arguments"] = serve_arguments(options, chosen)
            configs[variant]["load"] = to_plain(_load_settings(config, options))
    _check_machine(resolved, options)
    work = config.workload
    assert isinstance(work, Inference)
    lengths = f"{work.isl}/{work.osl}"
    proxy = " (proxy)" if config.proxy else ""
    return {
        "name": sweep_name(config.target, config.size, config.precision.dtype, f"gpus{config.machine.gpus}"),
        "variants": variants,
        "isl": work.isl,
        "osl": work.osl,
        "gpus": config.machine.gpus,
        "target": f"{config.target} {config.size} {config.precision.dtype}{proxy}, "
        f"{config.machine.gpus} x {config.machine.gpu}, {lengths}, {'HTTP' if mode == 'serve' else 'in process'}",
        "configs": configs,
        "concurrency": work.concurrency,
    }


def _resolve(options: argparse.Namespace, settings: list[str]) -> RunConfig:
    """Return the one configuration that the options select."""
    from llmb.cli.run_options import load_recipes, run_selection
    from llmb.config.resolve import resolve_all
    from llmb.config.run_list import tasks_for
    from llmb.launch.secrets import mask

    recipes = load_recipes()
    chosen = copy.copy(options)
    chosen.set, chosen.repeats = settings, 1
    resolved, bad = resolve_all(tasks_for(run_selection(chosen), recipes), recipes, install_folder())
    if bad:
        raise ConfigError(bad[0])
    if len(resolved) != 1:
        raise ConfigError(f"a sweep has one configuration, these options select {len(resolved)}; add --dtype, --scale")
    config = resolved[0][1]
    if not isinstance(config.workload, Inference) or config.engine != "native":
        raise ConfigError(f"{config.target} with engine {config.engine}: a sweep needs a workload of kind inference")
    return replace(config, environment=mask(config.environment))


def _check_machine(configs: list[RunConfig], options: argparse.Namespace) -> None:
    """Refuse what this machine cannot run, before the sweep has a folder."""
    from llmb.cli.local_check import check_runs_here
    from llmb.cli.memory_check import check_memory
    from llmb.cli.run_options import load_recipes

    if options.dry_run:
        return
    for config in configs:
        check_runs_here(config)
    check_memory(configs, load_recipes(), local=True, force=options.force)
    sys.stdout.flush()


def _load_settings(config: RunConfig, options: argparse.Namespace) -> LoadSettings:
    """Return the load of a recipe's lengths on a server whose address is not known yet; prompts are token ids."""
    work = config.workload
    assert isinstance(work, Inference)
    return replace(
        row_requests(config, work, "http://127.0.0.1", "sweep"),
        prompt_format="text" if work.dataset else "ids",
        concurrency=1,
        num_requests=1,
        processes=options.processes,
        calibrate=not options.no_calibrate,
    )
