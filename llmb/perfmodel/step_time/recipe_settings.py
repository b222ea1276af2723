"""Settings that published rows leave out, from the public recipe that they ran: `recipe_settings.yaml`.

with_recipe({"notes": "recipe=qwen3_30b_a3b_pretrain_8gpu_gb300_fp8mx_config", ...})["mbs"]       -> "8"
as_configured(config)            a recipe row without the printed cells that its own configuration does not have
"""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from llmb.config.spec import Override, RunConfig
from llmb.formats.yaml_file import load_yaml
from llmb.perfmodel.shapes.model_catalog import ModelShape, find_model

SETTINGS_FILE = Path(__file__).with_name("recipe_settings.yaml")
IDENTITY = ("model", "gpu", "dtype", "gpus")  # of a recipe; the other fields are its settings
AS_RELEASED = "the release configures it so"
KNOBS = ("cuda_graphs", "notes")  # settings that hold on any number of GPUs


def with_recipe(cells: dict[str, str], shape: ModelShape, dtype: str, recent: bool) -> dict[str, str]:
    """Return a row with the settings of its release, and with empty cells filled from the recipe it names.

    A `recent` row, of the releases that the recipes are of, that names none and describes no knobs gets those of the
    recipe for the same model, GPU and dtype.
    """
    cells = _as_released(cells, shape, dtype)
    notes = cells.get("notes", "")
    named = re.search(r"recipe=(\w+?)(_config)?\b", notes)
    if named and named[1] in _recipes():
        return _filled(cells, _recipes()[named[1]], tuple(_recipes()[named[1]]))
    described = cells.get("cuda_graphs") or re.search(r"dispatcher=|recompute_modules=|moe_a2a_overlap", notes)
    if recent and not described:
        for settings in _recipes().values():
            same = (settings["gpu"], settings["dtype"]) == (cells.get("gpu"), dtype)
            if same and find_model(settings["model"]) == shape:
                return _filled(cells, settings, KNOBS)
    return cells


def as_configured(config: RunConfig) -> RunConfig:
    """Return a resolved recipe row as its release configures it, where the printed table differs; set fields stay."""
    chosen = {override.field for override in config.overrides}
    for settings in _data()["printed_only"]:
        row = (settings["workload"], settings["size"], settings["gpu"])
        if row == (config.target, config.size, config.recipe_row.get("gpu")):
            for name in settings.keys() - {"workload", "size", "gpu"} - chosen:
                config = _configured(config, name, settings[name])
    return config


def _configured(config: RunConfig, name: str, value: Any) -> RunConfig:
    printed = getattr(config.workload, name)
    change = Override(field=name, value=value, replaced=printed, source=AS_RELEASED)
    workload = replace(config.workload, **{name: value})
    return replace(config, workload=workload, overrides=(*config.overrides, change))


def _as_released(cells: dict[str, str], shape: ModelShape, dtype: str) -> dict[str, str]:
    """Return a row with the settings that its table leaves out or contradicts."""
    release = re.search(r"(container-|\bv)(\d\d\.\d\d)\b", cells.get("source", ""))
    if release is None:
        return cells
    for settings in _data()["releases"]:
        same = (settings["release"], settings["gpu"]) == (release[2], cells.get("gpu"))
        if same and settings.get("dtype", dtype) == dtype and find_model(settings["model"]) == shape:
            names = tuple(name for name in settings if name not in ("release", *IDENTITY))
            described = {name: cell for name, cell in cells.items() if name == "notes" or name not in names}
            return _filled(described, settings, names)
    return cells


def _filled(cells: dict[str, str], settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    filled = dict(cells)
    for name in names:
        if name == "notes" and name in settings:
            filled[name] = f"{cells.get(name, '')}; {settings[name]}"
        elif name in settings and name not in IDENTITY and not cells.get(name):
            filled[name] = str(settings[name]).lower()
    return filled


def _recipes() -> dict[str, dict[str, Any]]:
    recipes: dict[str, dict[str, Any]] = _data()["recipes"]
    return recipes


@cache
def _data() -> dict[str, Any]:
    return load_yaml(SETTINGS_FILE, "sections recipes and releases")
