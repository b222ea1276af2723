"""Expand a command line to the list of runs: explicit targets, target lists, or everything that recipes list.

    pretrain_llama3.1_70b,pretrain_grok1      targets: one size, all sizes
    --max-scale 512                           listed scales up to 512, then powers of two

A target is a workload's key, with or without `_<size>`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from llmb.config.overrides import Setting
from llmb.config.recipe import Recipe, as_listed
from llmb.config.row_selection import OneRankRequest, RunRequest, row_gpu, uses_proxy
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import hardware

MOST_GPUS = 1_000_000  # of one run: more than any machine has
SELECTOR_TITLES = {"size": "size", "gpu": "GPU type"}
MOST_RUNS = 10_000  # of one command: more would take minutes to expand, and days to run


@dataclass(frozen=True, kw_only=True)
class Task:
    """One configuration, run `repeats` times."""

    workload: str
    request: RunRequest
    repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class RunSelection:
    """Options of one command line that select runs. Null: everything the recipe lists."""

    targets: tuple[str, ...] = ()
    size: str | None = None
    dtypes: tuple[str, ...] | None = None
    scales: tuple[int, ...] | None = None
    max_scale: int | None = None
    min_scale: bool = False
    exact_scales: bool = False
    gpu: str | None = None
    gpu_memory_bytes: int | None = None  # as the driver reports it, of a GPU that is not in hardware.GPUS
    gpu_here: bool = False  # found in this machine or cluster, not named by the user
    proxy: Literal["small", "true-width"] | None = None
    layout: str | None = None
    memory_gib: float | None = None
    one_rank: OneRankRequest | None = None
    force: bool = False
    repeats: int = 1
    settings: tuple[Setting, ...] = ()

    @property
    def uses_proxy(self) -> bool:
        return uses_proxy(self.proxy, self.gpu)


def split_target(target: str, recipes: dict[str, Recipe]) -> tuple[Recipe, str | None]:
    """Split `pretrain_llama3.1_70b` into recipe and size; the size is None if the target names none."""
    listed = as_listed(target, recipes)
    if listed in recipes:
        return recipes[listed], None
    workload, _, size = target.rpartition("_")
    workload = as_listed(workload, recipes)
    if workload in recipes:
        size = as_listed(size, recipes[workload].models)
        if size not in recipes[workload].models:
            raise UnknownName(f"size of {workload}", size, recipes[workload].models)
        return recipes[workload], size
    raise UnknownName("workload", target, recipes)


def tasks_for(selection: RunSelection, recipes: dict[str, Recipe]) -> list[Task]:
    """Return all tasks of a command line, largest scale first."""
    if selection.scales is not None and (selection.max_scale is not None or selection.min_scale):
        raise ConfigError("--scale excludes --max-scale and --min-scale; give one of them")
    if selection.repeats < 1:
        raise ConfigError(f"repeats: {selection.repeats} is not possible; at least 1 is needed")
    if selection.max_scale is not None and selection.max_scale < 1:
        raise ConfigError(f"--max-scale: {selection.max_scale} is not possible; at least 1 is needed")
    if selection.repeats > MOST_RUNS:
        raise ConfigError(f"repeats: {selection.repeats:,} runs are more than the {MOST_RUNS:,} of one command")
    largest = max((*(selection.scales or ()), selection.max_scale or 0))
    if largest > MOST_GPUS:
        raise ConfigError(f"a scale of more than {MOST_GPUS:,} GPUs is not possible")
    targets = selection.targets or tuple(key for key, recipe in recipes.items() if recipe.kind == "training")
    borrows = _borrows_rows(selection, recipes)
    tasks: list[Task] = []
    for target in targets:
        expanded = list(_expand_target(target, selection, recipes, borrows))
        if not expanded and selection.targets:
            raise _no_matching_row(target, selection, recipes)
        tasks += expanded
    expanded_dtypes = {str(task.request.dtype).casefold() for task in tasks}  # a recipe may be damaged
    unused = [dtype for dtype in selection.dtypes or () if dtype.casefold() not in expanded_dtypes]
    if unused and selection.targets:
        raise _no_matching_row(targets[0], replace(selection, dtypes=(unused[0],)), recipes)
    if not tasks:
        on_gpu = f" on {selection.gpu}" if selection.gpu else ""
        raise ConfigError(f"no workload lists a row for these options{on_gpu}; see: llmb-run list")
    if selection.force and len(tasks) != 1:
        raise ConfigError(f"--force takes exactly one run, this names {len(tasks)}; give -w, -s, --dtype and --scale")
    return largest_first(tasks)


def _borrows_rows(selection: RunSelection, recipes: Mapping[str, Recipe]) -> bool:
    """Return whether a workload without a row for the GPU takes another GPU's.

    A GPU with rows in some recipe borrows where it is this machine's and the workload is named; one without, always.
    """
    has_rows = any(selection.gpu in recipe.values("gpu") for recipe in recipes.values())
    return not has_rows or (selection.gpu_here and bool(selection.targets))


def out_of_core_target(size: str, recipes: Mapping[str, Recipe]) -> str | None:
    """Return the options that select out-of-core training of this size, on one GPU of any memory; None: none has it."""
    workloads = (key for key, recipe in recipes.items() if recipe.kind == "outofcore" and size in recipe.models)
    return next((f"-w {workload} -s {size}" for workload in workloads), None)


def only_proxies(workload: str) -> str:
    """Return why a workload without rows has nothing to run in full, and what it has."""
    return f"{workload} has no recipe rows, only proxies (submit --proxy); any layout: llmb-run predict --model NAME"


def _no_matching_row(target: str, selection: RunSelection, recipes: dict[str, Recipe]) -> ConfigError:
    recipe, named = split_target(target, recipes)
    if selection.gpu and selection.gpu not in recipe.values("gpu") and not selection.uses_proxy:
        return UnknownName(f"GPU type of {recipe.workload}", selection.gpu, recipe.values("gpu"))
    if not recipe.rows and not selection.uses_proxy:
        return ConfigError(only_proxies(recipe.workload))
    size = named or (as_listed(selection.size, recipe.models) if selection.size else None)
    gpu = None if selection.uses_proxy or selection.gpu not in recipe.values("gpu") else selection.gpu
    run, selectors = recipe.workload, dict[str, str]()
    for selector, value in {"size": size, "gpu": gpu}.items():
        if value is not None:
            listed = recipe.values(selector, selection.uses_proxy, **selectors)
            if value not in listed:
                return UnknownName(f"{SELECTOR_TITLES[selector]} of {run}", value, listed)
            run, selectors[selector] = f"{run} {value}", value
    listed = recipe.values("dtype", selection.uses_proxy, **selectors)
    dtypes = _dtypes(recipe, selection) or listed
    if unlisted := [dtype for dtype in dtypes if dtype not in listed]:
        return UnknownName(f"dtype of {run}", unlisted[0], listed)
    counts = {n for dtype in dtypes for n in recipe.values("gpus", selection.uses_proxy, dtype=dtype, **selectors)}
    if selection.dtypes:
        run += f" {', '.join(dtypes)}"
    scales = ", ".join(map(str, sorted(counts)))
    return ConfigError(f"--max-scale {selection.max_scale} is below the scales of {run}: {scales}")


def largest_first(tasks: list[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: -task.request.gpus)


def _expand_target(target: str, selection: RunSelection, recipes: dict[str, Recipe], borrows: bool) -> Iterator[Task]:
    recipe, size = split_target(target, recipes)
    chosen = as_listed(selection.size, recipe.models) if selection.size else None
    if size and chosen and size != chosen:
        raise ConfigError(f"-w {target} names size {size}, -s names {selection.size}; give one of them")
    proxy = selection.uses_proxy
    requested = size or chosen
    if requested is not None and requested not in recipe.models:
        raise UnknownName(f"size of {recipe.workload}", requested, recipe.models)
    if requested is None and selection.gpu in recipe.values("gpu"):
        borrows = False  # of the sizes that are not named, the listed ones are meant
    for model_size in [requested] if requested else recipe.sizes:
        gpu = row_gpu(recipe, model_size, selection.gpu, proxy, selection.force or borrows)
        for dtype in _dtypes(recipe, selection) or _default_dtypes(recipe, model_size, gpu, proxy, selection):
            for gpus in _scales(recipe, model_size, dtype, gpu, proxy, selection):
                request = RunRequest(
                    size=model_size, dtype=dtype, gpus=gpus, gpu=selection.gpu,
                    gpu_memory_bytes=selection.gpu_memory_bytes, borrow_row=borrows, proxy=selection.proxy,
                    force=selection.force,
                    layout=selection.layout, memory_gib=selection.memory_gib, one_rank=selection.one_rank,
                    settings=selection.settings,
                )  # fmt: skip
                yield Task(workload=recipe.workload, request=request, repeats=selection.repeats)


def _dtypes(recipe: Recipe, selection: RunSelection) -> list[str]:
    """Return the requested dtypes as the recipe spells them."""
    listed = [*recipe.values("dtype"), *recipe.values("dtype", True)]
    return [as_listed(dtype, listed) for dtype in selection.dtypes or ()]


def _default_dtypes(recipe: Recipe, size: str, gpu: str | None, proxy: bool, selection: RunSelection) -> list[str]:
    """Return the listed dtypes without those that the GPU is known not to compute in, unless no other is listed."""
    listed = recipe.values("dtype", proxy, size=size, gpu=gpu)
    if selection.gpu is None or not hardware.lacks_fp8(selection.gpu):
        return listed
    return [dtype for dtype in listed if dtype != "fp8"] or listed


def left_out_dtypes(selection: RunSelection) -> str | None:
    """Return the line that says which dtypes of the recipes are left out on this GPU; None: none, or they are named."""
    if selection.dtypes is not None or selection.gpu is None or not hardware.lacks_fp8(selection.gpu):
        return None
    return f"rows in fp8 are left out: {hardware.gpu(selection.gpu).title} has no fp8 GEMMs"


def _scales(recipe: Recipe, size: str, dtype: str, gpu: str | None, proxy: bool, selection: RunSelection) -> list[int]:
    """Return the requested GPU counts; without --scale the listed ones, limited or continued by the bounds."""
    if selection.scales is not None:
        return list(selection.scales)
    gpu = gpu if gpu or proxy else _default_gpu(recipe, size, dtype)
    listed = recipe.values("gpus", proxy, size=size, dtype=dtype, gpu=gpu)
    if not listed:
        return []
    if selection.min_scale:
        listed = listed[:1]
    if selection.max_scale is not None:
        if not (selection.exact_scales or proxy or selection.min_scale):
            while listed[-1] * 2 <= selection.max_scale:
                listed.append(listed[-1] * 2)
        listed = [n for n in listed if n <= selection.max_scale]
    return listed


def _default_gpu(recipe: Recipe, size: str, dtype: str) -> str | None:
    """Return the recipe's default GPU if it lists this size and dtype, else the first that does."""
    gpus = recipe.values("gpu", size=size, dtype=dtype)
    return recipe.default_gpu if recipe.default_gpu in gpus else next(iter(gpus), None)


def with_settings(task: Task, settings: list[Setting], environment: dict[str, str]) -> Task:
    """Return the task with more settings and environment variables; later ones win."""
    old = task.request
    request = replace(old, settings=(*old.settings, *settings), environment={**old.environment, **environment})
    return replace(task, request=request)
