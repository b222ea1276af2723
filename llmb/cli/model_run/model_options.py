"""Options `--model` and `--task` of submit, show, plan and serve, and the recipe that they stand for."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmb.config.model import Model
    from llmb.config.recipe import Recipe

TASKS = ("train", "serve", "offload")
HOST_FRACTION = 0.8  # of available host memory that out-of-core training takes by default
DEVICE_FRACTION = 0.9  # of the GPU's memory
# Of weights that are not read: other formats, parts of a download, adapters.
OTHER_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.pth", "*.pt", "*.gguf")


def add_model_options(parser: argparse.ArgumentParser, default: str = "train") -> None:
    """Add --model and --task; `default`: of the task."""
    add_model_option(parser)
    task_help = f"with --model: train, serve, or offload (out-of-core training); default: {default}"
    parser.add_argument("--task", choices=TASKS, help=task_help)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add --model, where the command is the task."""
    model_help = "instead of -w: a Hugging Face folder, or its config.json alone (random weights)"
    parser.add_argument("--model", metavar="PATH", help=model_help)


def recipes_for(options: argparse.Namespace) -> dict[str, Any]:
    """Return all recipes; with --model also that of the model, which the options then name."""
    from llmb.cli.run_options import load_recipes
    from llmb.errors import ConfigError

    recipes = load_recipes()
    if options.model is None:
        if options.task is not None:
            raise ConfigError(f"--task {options.task} says what to do with --model PATH; a workload (-w) has its task")
        return recipes
    named = {"-w": options.workload, "-s": options.size}
    named |= {"-f": getattr(options, "file", None), "--all": getattr(options, "all", False)}
    if wrong := [flag for flag, value in named.items() if value]:
        raise ConfigError(f"--model names the model; leave out {', '.join(wrong)}")
    recipe = _model_recipe(options)
    return recipes | {recipe.workload: recipe}


def _model_recipe(options: argparse.Namespace) -> "Recipe":
    """Make the recipe, and let the options select its only row."""
    from llmb.cli.model_run.fitted_row import fitted_recipe
    from llmb.cli.run_options import run_selection, selected_gpu
    from llmb.config.huggingface.hf_config import (
        check_trainable,
        from_hf_config,
        model_name,
        read_hf_config,
        stored_dtype,
    )
    from llmb.config.huggingface.model_recipe import model_recipe, published_dtype
    from llmb.config.run_list import tasks_for
    from llmb.errors import ConfigError
    from llmb.perfmodel.shapes.model_catalog import is_catalog_name

    path, task = Path(options.model), options.task or "train"
    if not path.exists() and is_catalog_name(options.model):
        raise ConfigError(
            f"--model {options.model}: predict and tune know this name; a run needs a Hugging Face folder or its "
            "config.json (random weights)"
        )
    config = read_hf_config(path)
    model, stored = from_hf_config(config, model_name(path)), stored_dtype(config)
    if task != "serve":
        check_trainable(config)
    gpu = selected_gpu(options) or "cpu"
    options.gpu_type = None if options.proxy and gpu == "cpu" else _gpu_flag(options, gpu)
    options.scale = options.scale or os.environ.get("JOB_TOTAL_GPUS") or str(_gpus_here(task))
    options.dtype = (
        options.dtype
        or os.environ.get("DTYPE")
        or ("fp32" if gpu == "cpu" else published_dtype(model, task, stored, gpu))
    )
    if not options.scale.isdigit():
        raise ConfigError(f"--model runs at one scale, got --scale {options.scale}")
    weights = None if task == "train" else _weights(path)
    if weights is not None and task == "offload" and stored == "fp8":
        raise ConfigError(
            f"{path} holds weights in fp8, which only --task serve reads; give its config.json alone for random weights"
        )
    budgets = _budgets(gpu) if task == "offload" else {}
    recipe = model_recipe(model, task, gpu, int(options.scale), weights, budgets)
    options.workload, options.size = recipe.workload, recipe.default_size
    (request_task,) = tasks_for(run_selection(options), {recipe.workload: recipe})
    request = request_task.request
    fitted = fitted_recipe(recipe, request)
    if weights is None and not request.uses_proxy:  # requests that published weights cannot serve are refused
        lengths = fitted.defaults | fitted.rows[0] | {setting.field: setting.value for setting in request.settings}
        _note_context(model, config, lengths)
    return fitted


def _note_context(model: "Model", config: dict[str, Any], lengths: dict[str, Any]) -> None:
    """Print a line where sequences are longer than those that the model is made for."""
    from llmb.perfmodel.shapes.hf_blocks import read_count
    from llmb.perfmodel.shapes.hf_shape import CONTEXTS
    from llmb.perfmodel.shapes.model_catalog import ModelShape

    texts = [str(lengths[name]) for name in ("seqlen", "isl", "osl") if lengths.get(name) is not None]
    if not all(text.isdecimal() for text in texts):  # refused where the run is resolved
        return
    shape = ModelShape(model=model, max_positions=read_count(config, *CONTEXTS))
    if (note := shape.context_note(sum(map(int, texts)))) is not None:
        print(f"note: {note}", file=sys.stderr)


def _gpu_flag(options: argparse.Namespace, gpu: str) -> str:
    """Return the GPU type as --gpu-type names it: the user's own word, or that of this machine."""
    from llmb.perfmodel.hardware import UNLISTED, is_listed

    requested: str | None = options.gpu_type or os.environ.get("GPU_TYPE")
    return requested or (gpu if is_listed(gpu) else f"{UNLISTED}{gpu}")


def _weights(path: Path) -> str | None:
    """Return the folder if it holds weights; none: a config.json alone, whose weights are random."""
    from llmb.errors import ConfigError
    from llmb.formats.weight_folder import INDEX, SINGLE_FILE

    if not path.is_dir():
        return None
    if (path / SINGLE_FILE).is_file() or ((path / INDEX).is_file() and any(path.glob("*.safetensors"))):
        return str(path.resolve())
    if others := sorted(file.name for pattern in OTHER_WEIGHTS for file in path.glob(pattern)):
        raise ConfigError(
            f"{path} holds {others[0]}, and weights are read from {SINGLE_FILE}, or from all files of {INDEX}; "
            "complete or convert them, or give its config.json alone for random weights"
        )
    return None


def _gpus_here(task: str) -> int:
    from llmb.launch.local_machine import gpu_names

    return 1 if task == "offload" else max(1, len(gpu_names()))


def _budgets(gpu: str) -> dict[str, float]:
    """Return the memory in GiB that out-of-core training may take."""
    from llmb.cli.run_options import reported_memory
    from llmb.config.spec import Machine
    from llmb.launch.local_machine import available_memory_bytes
    from llmb.perfmodel.hardware import GIB, memory_bytes

    machine = Machine(gpu=gpu, gpus=1, gpus_per_node=1, gpu_memory_bytes=reported_memory(gpu))
    device = memory_bytes(machine) or 0
    host_gib = int(HOST_FRACTION * available_memory_bytes() / GIB)
    return {"host_gib": float(max(1, host_gib)), "device_gib": float(max(1, int(DEVICE_FRACTION * device / GIB)))}
