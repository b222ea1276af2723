"""Configuration of a run from Python: resolved from a recipe, and predicted before it runs."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from llmb.cli.run_options import gpu_here, known_gpu_type, load_recipes, one_rank_here, reported_memory
from llmb.config.overrides import Setting, parse_use_case
from llmb.config.resolve import resolve_all
from llmb.config.run_list import RunSelection, Task, tasks_for
from llmb.config.spec import Predicted, RunConfig
from llmb.errors import ConfigError, UnknownName
from llmb.launch.install_root import install_root
from llmb.perfmodel.explain.run_prediction import predict_run

PROXIES = ("small", "true-width")
MOST_LISTED = 8  # runs that an ambiguous request names


def resolve(
    workload: str,
    *,
    size: str | None = None,
    dtype: str | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    proxy: bool | Literal["small", "true-width"] = False,
    layout: str | None = None,
    engine: str | None = None,
    one_rank: bool | int = False,
    force: bool = False,
    **settings: Any,
) -> RunConfig:
    """Return the complete, checked configuration of one run.

    The arguments are the options of `llmb-run submit`, any other keyword is a setting as in `--set`. `gpu`: the GPU
    type the recipe row is for; default: what this machine has. `one_rank`: run one rank of the layout on one GPU here,
    True for one with the most work, or its number. Environment variables have no effect.

    >>> config = llmb.resolve("pretrain_llama3.1", size="8b", dtype="fp8", gpus=16, gpu="h100", mbs=1, steps=20)
    >>> config.workload.mbs, config.workload.steps, config.parallel.cp
    (1, 20, 1)
    >>> llmb.resolve("pretrain_llama3.1", size="9b", dtype="fp8", gpus=16, gpu="h100")
    Traceback (most recent call last):
    llmb.errors.UnknownName: unknown size of pretrain_llama3.1 '9b'...
    """
    recipes = load_recipes()
    gpu_type = known_gpu_type(gpu) if gpu is not None else gpu_here()
    selection = RunSelection(
        targets=(workload,),
        size=size,
        dtypes=None if dtype is None else (dtype,),
        scales=None if gpus is None else (_gpu_count(gpus),),
        gpu=gpu_type,
        gpu_memory_bytes=reported_memory(gpu_type),
        gpu_here=gpu is None,
        proxy=_proxy(proxy),
        layout=layout.lower() if layout else None,
        one_rank=_one_rank(one_rank),
        force=force,
        settings=(
            *([] if engine is None else [Setting(field="engine", value=engine, source="engine")]),
            *_converted(settings),
        ),
    )
    tasks = tasks_for(selection, recipes)
    if len(tasks) != 1:
        raise ConfigError(f"{len(tasks)} runs match; name one by size, dtype and gpus: {_choices(tasks)}")
    [(_, config)], _ = resolve_all(tasks, recipes, install_root(os.environ))
    return config


def predict(config: RunConfig) -> Predicted:
    """Return the predicted time and memory of a run, with an 80 % interval and the terms that the time consists of.

    Training is predicted in seconds of a step, serving in output tokens/s, with `ttft_ms` and `tpot_ms`. `value` is
    None where nothing can be predicted, as on a CPU, and `note` says why.

    >>> config = llmb.resolve("pretrain_llama3.1", size="405b", dtype="fp8", gpus=1024, gpu="h100")
    >>> predicted = llmb.predict(config)
    >>> predicted.metric, predicted.interval_80[0] < predicted.value < predicted.interval_80[1]
    ('step_time_s', True)
    >>> max(predicted.terms, key=predicted.terms.get)
    'gemm'
    """
    return predict_run(config, install_root(os.environ))


def _proxy(proxy: bool | str) -> Any:
    if proxy is True:
        return "small"
    if proxy and proxy not in PROXIES:
        raise UnknownName("proxy", proxy, (True, *PROXIES))
    return proxy or None


def _one_rank(one_rank: Any) -> Any:
    if one_rank is True or one_rank is False:
        return one_rank_here(None) if one_rank else None
    if not isinstance(one_rank, int) or one_rank < 0:
        raise ConfigError(f"one_rank: expected True or the number of a rank, from 0, got {one_rank!r}")
    return one_rank_here(one_rank)


def _gpu_count(gpus: Any) -> int:
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise ConfigError(f"gpus: expected a number of GPUs such as 8, got {gpus!r}")
    return gpus


def _converted(settings: Mapping[str, Any]) -> list[Setting]:
    converted: list[Setting] = []
    for field, value in settings.items():
        if field == "use_case":
            converted += parse_use_case(str(value), "use_case")
        else:
            converted.append(Setting(field=field, value=value, source="keyword"))
    return converted


def _choices(tasks: list[Task]) -> str:
    texts = [f"{task.request.size} {task.request.dtype} {task.request.gpus}" for task in tasks]
    return ", ".join([*texts[:MOST_LISTED], *(["..."] if len(texts) > MOST_LISTED else [])])
