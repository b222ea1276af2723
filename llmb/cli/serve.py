"""`llmb-run serve`: an OpenAI-compatible HTTP server over the native engine, on this machine."""

import argparse
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.cli.model_run.model_options import add_model_option, recipes_for
from llmb.cli.run_options import add_run_options
from llmb.cli.subcommand import command

if TYPE_CHECKING:
    from llmb.config.spec import RunConfig

EXAMPLES = (
    "llmb-run serve -w inference_llama3.1 -s 8b --dtype bf16 --scale 1 --proxy        # a small proxy, on any machine",
    "llmb-run serve -w inference_llama3.1 -s 8b --dtype fp8 --scale 1 --set weights=Llama-3.1-8B-Instruct",
    "llmb-run serve --model Qwen3-8B/        # your own folder: its weights, tokenizer and chat template",
    "llmb-run serve -w inference_llama3.1 -s 8b --dtype fp8 --scale 1 --replicas 8    # one engine on each of 8 GPUs",
    "llmb-run serve -w inference_llama3.1 -s 8b --dtype fp8 --scale 1 --host 0.0.0.0 --api-key-env SERVER_KEY",
    "",
    'curl http://127.0.0.1:8000/v1/completions -d \'{"prompt": "Once upon a time", "max_tokens": 32}\'',
    "",
    "/v1/completions, /v1/chat/completions, /v1/models, /health, /metrics; the prefix cache is on. See docs/serving.md",
)


def add_commands(commands: Any) -> None:
    """Register serve."""
    from llmb.config.server_options import add_server_options

    parser = command(commands, "serve", run, "serve a model over HTTP, as OpenAI's API does", *EXAMPLES)
    add_run_options(parser)
    add_model_option(parser)
    add_server_options(parser)
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="prompts share no blocks; the default is to share"
    )
    parser.set_defaults(on="local")


def run(options: argparse.Namespace) -> int:
    """Resolve, check, create the run folder, and serve until a signal."""
    from llmb.cli.local_check import check_runs_here
    from llmb.config.server_options import server_arguments, server_options
    from llmb.launch.install_root import install_root
    from llmb.launch.run_folder import RunFolder
    from llmb.launch.server_process import check_api_key_variable, run_server
    from llmb.perfmodel.explain.run_prediction import with_prediction

    settings = _with_absolute_paths(server_options(options))
    check_api_key_variable(settings.api_key_env)
    options.task = "serve" if options.model is not None else None
    recipes = recipes_for(options)
    config = _resolve(options, recipes)
    check_runs_here(config, settings.replicas, advice="")
    _check_memory(config, settings.replicas, options.force, recipes)
    install = install_root(os.environ)
    config = with_prediction(config, install)
    run_dir = RunFolder.create(install, config, datetime.now())
    print(f"{config.name}\nrun folder: {run_dir.path}", flush=True)
    key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
    return run_server(config, run_dir, server_arguments(settings), {"API_KEY": key} if key else {})


def _resolve(options: argparse.Namespace, recipes: dict[str, Any]) -> "RunConfig":
    """Return the one configuration that the options select, as `submit` resolves it, with a prefix cache."""
    from dataclasses import replace

    from llmb.cli.run_options import run_selection
    from llmb.config.native.departures import departure_lines
    from llmb.config.native.speculation import refuse_drafts
    from llmb.config.resolve import resolve_all
    from llmb.config.run_list import tasks_for
    from llmb.config.spec import Inference
    from llmb.errors import ConfigError
    from llmb.launch.install_root import install_root

    if not (options.workload or "").strip(", "):
        raise ConfigError(
            "no workload is named; give -w, such as -w inference_llama3.1 (see llmb-run list), or --model PATH"
        )
    resolved, bad = resolve_all(tasks_for(run_selection(options), recipes), recipes, install_root(os.environ))
    if bad:
        raise ConfigError(bad[0])
    if len(resolved) != 1:
        names = ", ".join(
            f"{config.size} {config.precision.dtype} x{config.machine.gpus}" for _, config in resolved[:6]
        )
        raise ConfigError(
            f"a server has one configuration, these options select {len(resolved)} ({names}); "
            "choose by -s, --dtype and --scale"
        )
    config = resolved[0][1]
    work = config.workload
    if not isinstance(work, Inference) or config.engine != "native":
        raise ConfigError(
            f"{config.target} with engine {config.engine} cannot be served; serve takes workloads of kind inference "
            "and the native engine"
        )
    refuse_drafts(config)
    if config.machine.nodes > 1:
        raise ConfigError(
            f"{config.machine.gpus} GPUs are on {config.machine.nodes} nodes; a server runs on one machine"
        )
    if work.weights is not None and not Path(work.weights, "config.json").is_file():
        raise ConfigError(f"weights={work.weights} is no weights folder: it holds no config.json")
    for line in departure_lines([config]):
        print(f"departs from the recipe: {line}", flush=True)
    if config.proxy is not None:
        print(f"a proxy, not the model: {config.proxy}", flush=True)
    prefix_cache = not options.no_prefix_cache
    name = f"serve_{config.name.removeprefix('serve_')}"
    return replace(config, name=name, workload=replace(work, prefix_cache=prefix_cache))


def _check_memory(config: "RunConfig", replicas: int, force: bool, recipes: dict[str, Any]) -> None:
    """Refuse what does not fit, as `submit` does; replicas have GPUs of their own, and share the host's memory."""
    from dataclasses import replace

    from llmb.cli.memory_check import check_memory

    machine = replace(config.machine, gpus=config.machine.gpus * replicas)
    check_memory([replace(config, machine=machine)], recipes, local=True, force=force)


def _with_absolute_paths(settings: Any) -> Any:
    """Return the options for a server that starts in its run folder."""
    from dataclasses import replace

    if settings.api_key_file is None:
        return settings
    return replace(settings, api_key_file=str(Path(settings.api_key_file).absolute()))
