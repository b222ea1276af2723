"""Fields of a run that recipe rows and settings may set, and their values from settings.

    apply_settings(values, settable_types("training"), settings, recipe)    -> overrides, `values` changed

Sections, field names and types are those of spec.py.
"""

import os
from typing import Any

from llmb.config.native.speculation import read_acceptance
from llmb.config.overrides import Setting, parse_value
from llmb.config.recipe import Recipe, Row
from llmb.config.serialization import RENAMED_FIELDS, convert, field_types
from llmb.config.spec import Inference, Limits, OutOfCore, Override, Parallel, Precision, Profile, Training
from llmb.errors import ConfigError, UnknownName

WORKLOADS: dict[str, type] = {"training": Training, "inference": Inference, "outofcore": OutOfCore}
PATHS = {"data", "resume", "dataset", "weights", "export", "disk_path"}
MAY_BE_ZERO = {
    "recompute_layers", "offload_layers", "profile_start", "seed", "lr_warmup_steps",
    "resident_params", "resident_grads", "resident_states", "activation_slots", "full_saves", "attention_saves",
    "isl_spread", "osl_spread", "temperature", "speculative_tokens", "top_k", "warmup_requests", "max_restarts",
    "disk_gib", "lora_rank",
}  # fmt: skip
FRACTIONS = {"kv_fraction", "top_p"}  # at most 1
HIGHEST = {"num_requests": 10_000_000, "warmup_requests": 10_000_000, "max_restarts": 10_000}  # all held in memory
HIGHEST_OF_OTHERS = 10**15
# Fields that cannot be set: those of a shared section without meaning for a kind of run, and computed ones.
WITHOUT_EFFECT = {
    "training": {"kv_dtype", "attention_dtype"},
    "inference": {"fsdp", "cp", "etp", "vp", "overlap_gather", "overlap_reduce", "overlap_send", "draft_model"},
    "outofcore": {"kv_dtype", "attention_dtype", "plan", "prediction", *(set(field_types(Parallel)) - {"dp"})},
}


def settable_sections(kind: str) -> dict[str, type]:
    """Return the sections of a RunConfig that settings may change."""
    if kind not in WORKLOADS:
        raise UnknownName("recipe kind", kind, WORKLOADS)
    return {
        "parallel": Parallel,
        "precision": Precision,
        "workload": WORKLOADS[kind],
        "profile": Profile,
        "limits": Limits,
    }


def settable_types(kind: str) -> dict[str, Any]:
    """Return the types of all fields that can be set for a kind of run."""
    types: dict[str, Any] = {}
    for section in settable_sections(kind).values():
        types.update(field_types(section))
    return {name: type_ for name, type_ in types.items() if name != "kind" and name not in WITHOUT_EFFECT[kind]}


def apply_settings(values: Row, types: dict[str, Any], settings: list[Setting], recipe: Recipe) -> list[Override]:
    """Apply each setting to the values and return the overrides."""
    records = []
    for setting in settings:
        if setting.field not in types or setting.field in ("dp", "ga"):
            _refuse_unknown(setting, types, recipe)
        where = f"{setting.field} ({setting.source})"
        if setting.field == "draft_acceptance" and isinstance(setting.value, str):
            value: Any = read_acceptance(setting.value)  # a run is complete without the file
        else:
            value = parse_value(types[setting.field], setting.value, setting.field)
        if setting.field == "draft" and value is not None and os.path.isdir(os.path.expanduser(value)):
            value = os.path.abspath(os.path.expanduser(value))
        if setting.field in PATHS and value is not None:
            value = os.path.abspath(os.path.expanduser(value))  # the engine runs in its run folder
        if setting.field not in ("mode", "use_case"):
            records.append(
                Override(field=setting.field, value=value, replaced=values.get(setting.field), source=setting.source)
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(setting.field, value, where)
        values[setting.field] = value
    return records


def check_row(values: Row, types: dict[str, Any], recipe: Recipe) -> None:
    """Refuse cells of a recipe's row that no setting has, or with values that no setting takes."""
    for name, value in values.items():
        where = f"{recipe.workload} row: {name}"
        if name not in types:
            raise UnknownName(f"cell in a row of {recipe.workload}:", name, sorted(types))
        if name == "gbs" and isinstance(value, str):  # GPUs*16
            continue
        checked = convert(types[name], value, where)
        if isinstance(checked, (int, float)) and not isinstance(checked, bool):
            _check_number(name, checked, where)


def _check_number(name: str, value: float, where: str) -> None:
    lowest = 0 if name in MAY_BE_ZERO else 1 if isinstance(value, int) else 1e-12
    highest = 1 if name in FRACTIONS else HIGHEST.get(name, HIGHEST_OF_OTHERS)
    if not lowest <= value <= highest:  # NaN fails too
        minimum = "more than 0" if lowest == 1e-12 else f"at least {lowest}"
        at_most = f" and at most {highest:,}" if name in FRACTIONS or value > highest else ""
        raise ConfigError(f"{where}: {value} is out of range; it must be {minimum}{at_most}")


def _refuse_unknown(setting: Setting, types: dict[str, Any], recipe: Recipe) -> None:
    if setting.source.startswith("environment"):
        variable = setting.source.split()[1]
        raise ConfigError(
            f"{variable} is set but has no effect on {recipe.workload} ({recipe.kind}); unset it: env -u {variable} ..."
        )
    if setting.field in ("dp", "ga"):
        raise ConfigError(f"{setting.field} follows from the other settings; change tp, pp, cp, mbs or gbs instead")
    sections = (WORKLOADS[recipe.kind], Precision)
    renamed = next((n for s in sections if (n := RENAMED_FIELDS.get(s.__name__, {}).get(setting.field))), None)
    choices = sorted(set(types) - {"dp", "ga"})
    raise UnknownName(f"field ({setting.source}) for {recipe.workload}:", setting.field, choices, renamed)
