"""Bulk files: many runs in one file, as YAML (with sweeps) or in the older text format.

    pretrain_llama3.1_405b:                  pretrain_llama3.1_70b:
      dtypes: [fp8]                          ('bf16', [128, 256], 3)
      scales: [128, 256]                     ('bf16', [512], 1, True)
      tasks:
        - overrides: {params: {tp: [4, 8]}}

Any list under `params` is swept. Every error names its location; no line is dropped silently.
"""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from llmb.config.overrides import Setting, settings_of, split_environment
from llmb.config.recipe import Recipe
from llmb.config.run_list import MOST_RUNS, RunSelection, Task, split_target, tasks_for
from llmb.config.serialization import build
from llmb.errors import ConfigError
from llmb.formats.yaml_file import MOST_BITS, load_yaml, text_content


@dataclass(frozen=True, kw_only=True)
class SweepOverrides:
    """Environment for the ranks and settings of the run; a list in params is swept."""

    env: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One item of `tasks:`; fields that it leaves out come from its section."""

    dtypes: str | tuple[str, ...] | None = None
    scales: int | tuple[int, ...] | None = None
    repeats: int | None = None
    profile: bool = False
    add_profile: bool = False
    proxy: bool = False
    overrides: SweepOverrides = SweepOverrides()


@dataclass(frozen=True, kw_only=True)
class Section:
    """Everything under one `workload_size:` key."""

    defaults: SweepOverrides = SweepOverrides()
    dtypes: str | tuple[str, ...] | None = None
    scales: int | tuple[int, ...] | None = None
    repeats: int = 1
    profile: bool = False
    add_profile: bool = False
    proxy: bool = False
    tasks: tuple[Entry, ...] | None = None


def read_bulk(path: Path, recipes: dict[str, Recipe], selection: RunSelection) -> list[Task]:
    """Return all tasks of a bulk file. `--dtype` and `--scale` filter them; -r and --proxy apply to all."""
    read = _from_yaml if path.suffix in (".yaml", ".yml") else _from_text
    tasks = [task for task in read(path, recipes, selection) if _is_selected(task, selection)]
    if (count := sum(task.repeats for task in tasks)) > MOST_RUNS:
        raise ConfigError(f"{path}: {count:,} runs; at most {MOST_RUNS:,} are taken from a file")
    if not tasks:
        raise ConfigError(f"{path}: no tasks generated; check its sections and the --dtype and --scale given with it")
    return tasks


def _is_selected(task: Task, selection: RunSelection) -> bool:
    dtypes, scales = selection.dtypes, selection.scales
    return (dtypes is None or task.request.dtype.lower() in map(str.lower, dtypes)) and (
        scales is None or task.request.gpus in scales
    )


def _from_yaml(path: Path, recipes: dict[str, Recipe], selection: RunSelection) -> Iterator[Task]:
    data = load_yaml(path, "sections named like pretrain_llama3.1_8b")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected sections named like pretrain_llama3.1_8b, got {type(data).__name__}")
    for target, body in data.items():
        section = build(Section, body or {}, f"{path}: {target}")
        split_target(str(target), recipes)
        for number, entry in enumerate(section.tasks if section.tasks is not None else (Entry(),), 1):
            if (entry.profile or section.profile) and (entry.add_profile or section.add_profile):
                raise ConfigError(f"{path}: {target} task {number}: profile and add_profile exclude each other")
            yield from _expand_entry(str(target), section, entry, recipes, selection, str(path))


def _expand_entry(
    target: str, section: Section, entry: Entry, recipes: dict[str, Recipe], selection: RunSelection, source: str
) -> Iterator[Task]:
    env = {**section.defaults.env, **entry.overrides.env}
    params = {**section.defaults.params, **entry.overrides.params}
    settings, environment = split_environment({name: str(value) for name, value in env.items()}, source)
    listed = _tuple(entry.dtypes or section.dtypes) or (), _tuple(entry.scales or section.scales) or ()
    count = prod(len(value) for value in (*params.values(), *filter(None, listed)) if isinstance(value, (list, tuple)))
    if count > MOST_RUNS:
        raise ConfigError(f"{source}: {target} sweeps {count:,} runs; at most {MOST_RUNS:,} are taken from a file")
    for combination in _sweep(params):
        swept = [s for name, value in combination.items() for s in settings_of(name.lower(), _text(value), source)]
        for profiled in _profile_choices(section, entry):
            extra = [Setting(field="profile", value=True, source=source)] if profiled else []
            run_selection = RunSelection(
                targets=(target,),
                dtypes=_tuple(entry.dtypes or section.dtypes),
                scales=_tuple(entry.scales or section.scales),
                gpu=selection.gpu,
                gpu_memory_bytes=selection.gpu_memory_bytes,
                gpu_here=selection.gpu_here,
                proxy=selection.proxy or ("small" if entry.proxy or section.proxy else None),
                layout=selection.layout,
                one_rank=selection.one_rank,
                repeats=1 if profiled == "added" else _repeats(selection, entry.repeats or section.repeats),
                settings=(*selection.settings, *settings, *swept, *extra),
            )
            for task in tasks_for(run_selection, recipes):
                yield replace(task, request=replace(task.request, environment=environment))


def _sweep(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the listed values."""
    choices = [value if isinstance(value, list) else [value] for value in params.values()]
    return (dict(zip(params, combination, strict=True)) for combination in product(*choices))


def _profile_choices(section: Section, entry: Entry) -> list[Any]:
    """Return which runs to profile; `add_profile` adds one profiled run to the unprofiled ones."""
    if entry.profile or section.profile:
        return [True]
    return [False, "added"] if entry.add_profile or section.add_profile else [False]


def _from_text(path: Path, recipes: dict[str, Recipe], selection: RunSelection) -> Iterator[Task]:
    target: str | None = None
    for number, raw in enumerate(text_content(path).decode(errors="replace").splitlines(), 1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        if line.endswith(":"):
            target = line[:-1].strip()
            split_target(target, recipes)
            continue
        if target is None:
            raise ConfigError(f"{path} line {number}: a task before any 'workload_size:' line")
        yield from _expand_line(line, f"{path} line {number}", target, recipes, selection)


def _expand_line(
    line: str, where: str, target: str, recipes: dict[str, Recipe], selection: RunSelection
) -> Iterator[Task]:
    shape = "('dtype' or ['dtype', ...], [scales], repeats[, profile])"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings on odd literals do not help a user
            values = ast.literal_eval(line)
        dtypes, scales, repeats, profile = (*values, False)[:4]
        listed = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
        valid = all(isinstance(d, str) for d in listed) and all(type(s) is int for s in scales)
        if not (isinstance(values, tuple) and valid and type(repeats) is int and type(profile) is bool):
            raise ValueError
        if any(number.bit_length() > MOST_BITS for number in (*scales, repeats)):
            raise ValueError
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{where}: expected {shape}, got {line[:60]!r}") from error
    extra = (Setting(field="profile", value=True, source=where),) if profile else ()
    run_selection = replace(
        selection, targets=(target,), size=None, dtypes=listed, scales=tuple(scales), max_scale=None, min_scale=False,
        repeats=_repeats(selection, repeats), settings=(*selection.settings, *extra),
    )  # fmt: skip
    yield from tasks_for(run_selection, recipes)


def _repeats(selection: RunSelection, in_file: int) -> int:
    return selection.repeats if selection.repeats != 1 else in_file


def _tuple(value: Any) -> tuple[Any, ...] | None:
    return None if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _text(value: Any) -> Any:
    return "none" if value is None else str(value)
