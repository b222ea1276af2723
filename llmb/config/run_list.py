"""From what was typed to the list of runs: explicit, by target list, by discovery, or from a bulk file.

    pretrain_llama3.1_70b,pretrain_grok1      targets: one size, all sizes
    --max-scale 512                           listed scales up to 512, then powers of two

A target is a workload's key, with or without `_<size>`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llmb.config.overrides import Setting
from llmb.config.recipe import Recipe
from llmb.config.row_selection import Request, stands_in
from llmb.errors import ConfigError, UnknownName


@dataclass(frozen=True, kw_only=True)
class Task:
    """One configuration to run, `repeats` times."""

    workload: str
    request: Request
    repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The choices of one command line. Null: everything the recipe lists."""

    targets: tuple[str, ...] = ()
    size: str | None = None
    dtypes: tuple[str, ...] | None = None
    scales: tuple[int, ...] | None = None
    max_scale: int | None = None
    min_scale: bool = False
    exact_scales: bool = False
    gpu: str | None = None
    proxy: Literal["small", "true-width"] | None = None
    layout: str | None = None
    memory_gib: float | None = None
    force: bool = False
    repeats: int = 1
    settings: tuple[Setting, ...] = ()

    @property
    def stands_in(self) -> bool:
        return stands_in(self.proxy, self.gpu)


def split_target(target: str, recipes: dict[str, Recipe]) -> tuple[Recipe, str | None]:
    """`pretrain_llama3.1_70b` as its recipe and size; the size is null when the target names none."""
    if target in recipes:
        return recipes[target], None
    workload, _, size = target.rpartition("_")
    if workload in recipes:
        if size not in recipes[workload].models:
            raise UnknownName(f"size of {workload}", size, recipes[workload].models)
        return recipes[workload], size
    raise UnknownName("workload", target, recipes)


def tasks_for(wanted: Wanted, recipes: dict[str, Recipe]) -> list[Task]:
    """Every task a command line asks for, largest scale first."""
    if wanted.scales is not None and (wanted.max_scale is not None or wanted.min_scale):
        raise ConfigError("--scale excludes --max-scale and --min-scale; give one of them")
    if wanted.repeats < 1:
        raise ConfigError(f"repeats: {wanted.repeats} is not possible; at least 1 is needed")
    targets = wanted.targets or tuple(key for key, recipe in recipes.items() if recipe.kind == "training")
    found: list[Task] = []
    for target in targets:
        tasks = list(_of_target(target, wanted, recipes))
        if not tasks and wanted.targets:
            raise _nothing_listed(target, wanted, recipes)
        found += tasks
    if not found:
        raise ConfigError(f"no workload lists a row for {wanted.gpu}; see: llmb-run list")
    if wanted.force and len(found) != 1:
        raise ConfigError(f"--force takes exactly one run, this names {len(found)}; give -w, -s, --dtype and --scale")
    return largest_first(found)


def _nothing_listed(target: str, wanted: Wanted, recipes: dict[str, Recipe]) -> ConfigError:
    recipe, _ = split_target(target, recipes)
    if wanted.gpu and wanted.gpu not in recipe.values("gpu") and not wanted.stands_in:
        return UnknownName(f"GPU type of {recipe.workload}", wanted.gpu, recipe.values("gpu"))
    counts = ", ".join(map(str, recipe.values("gpus", wanted.stands_in)))
    return ConfigError(f"no row of {recipe.workload} is within the bounds given; its scales are: {counts}")


def largest_first(tasks: list[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: -task.request.gpus)


def _of_target(target: str, wanted: Wanted, recipes: dict[str, Recipe]) -> Iterator[Task]:
    recipe, size = split_target(target, recipes)
    if size and wanted.size and size != wanted.size:
        raise ConfigError(f"-w {target} names size {size}, -s names {wanted.size}; give one of them")
    proxy = wanted.stands_in
    gpu = None if proxy else wanted.gpu
    chosen = size or wanted.size
    if chosen is not None and chosen not in recipe.models:
        raise UnknownName(f"size of {recipe.workload}", chosen, recipe.models)
    for each in [chosen] if chosen else recipe.sizes:
        for dtype in wanted.dtypes or recipe.values("dtype", proxy, size=each, gpu=gpu):
            for gpus in _scales(recipe, each, dtype, gpu, proxy, wanted):
                request = Request(
                    size=each, dtype=dtype, gpus=gpus, gpu=wanted.gpu, proxy=wanted.proxy, force=wanted.force,
                    layout=wanted.layout, memory_gib=wanted.memory_gib, settings=wanted.settings,
                )  # fmt: skip
                yield Task(workload=recipe.workload, request=request, repeats=wanted.repeats)


def _scales(recipe: Recipe, size: str, dtype: str, gpu: str | None, proxy: bool, wanted: Wanted) -> list[int]:
    """GPU counts asked for; without --scale those listed, cut or continued by the bounds."""
    if wanted.scales is not None:
        return list(wanted.scales)
    gpu = gpu if gpu or proxy else _gpu_of(recipe, size, dtype)
    listed = recipe.values("gpus", proxy, size=size, dtype=dtype, gpu=gpu)
    if not listed:
        return []
    if wanted.min_scale:
        listed = listed[:1]
    if wanted.max_scale is not None:
        if not (wanted.exact_scales or proxy or wanted.min_scale):
            while listed[-1] * 2 <= wanted.max_scale:
                listed.append(listed[-1] * 2)
        listed = [n for n in listed if n <= wanted.max_scale]
    return listed


def _gpu_of(recipe: Recipe, size: str, dtype: str) -> str | None:
    """Where no GPU is known: the recipe's own choice among those that list this size and dtype."""
    gpus = recipe.values("gpu", size=size, dtype=dtype)
    return recipe.default_gpu if recipe.default_gpu in gpus else next(iter(gpus), None)


def with_wishes(task: Task, settings: list[Setting], environment: dict[str, str]) -> Task:
    """The task with more settings and more environment; later ones win."""
    asked = task.request
    request = replace(asked, settings=(*asked.settings, *settings), environment={**asked.environment, **environment})
    return replace(task, request=request)
