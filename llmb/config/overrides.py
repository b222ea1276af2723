"""Parse settings that override a recipe row: environment variables, `--set`, or a sweep file.

Each setting names a field of spec.py. The environment variables of NVIDIA's recipes keep their names. Settings without
effect are rejected later, in resolve.py, never ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from llmb.config.serialization import whole_number
from llmb.errors import ConfigError, UnknownName

# Environment variable -> field. SELECTOR_VARIABLES choose the row, VARIABLES override its settings.
SELECTOR_VARIABLES = {"MODEL_SIZE": "size", "DTYPE": "dtype", "JOB_TOTAL_GPUS": "gpus", "GPU_TYPE": "gpu"}
VARIABLES = {
    "MODE": "mode",
    "USE_CASE": "use_case",
    "MAX_BATCH_SIZE": "max_batch_size",
    "MAX_NUM_TOKENS": "max_num_tokens",
    "CONCURRENCY": "concurrency",
    "NUM_REQUESTS": "num_requests",
    "KV_CACHE_FRACTION": "kv_fraction",
    "STREAMING": "streaming",
    "ENABLE_CHUNKED_PREFILL": "chunked_prefill",
    "DATASET": "dataset",
    "WEIGHTS": "weights",
    "TP": "tp",
    "PP": "pp",
    "CP": "cp",
    "EP": "ep",
    "ETP": "etp",
    "ET": "etp",
    "VP": "vp",
    "MBS": "mbs",
    "GBS": "gbs",
    "SEQ_LEN": "seqlen",
    "HOST_GB": "host_gib",
    "DEVICE_GB": "device_gib",
    "MAX_STEPS": "steps",
    "CUDA_GRAPH": "cuda_graphs",
    "ENABLE_PROFILE": "profile",
    "PROFILE_START": "profile_start",
    "PROFILE_END": "profile_stop",
    "PROFILE_START_STEP": "profile_start",
    "PROFILE_STOP_STEP": "profile_stop",
    "RUN_CONF_PROFILE_START_STEP": "profile_start",
    "RUN_CONF_PROFILE_STOP_STEP": "profile_stop",
    "PROFILE_RANKS": "profile_ranks",
    "ENABLE_GPU_METRICS": "gpu_metrics",
    "ENABLE_NCCLTRACE": "nccl_trace",
    "TIME_LIMIT": "time_limit_s",
    "SBATCH_TIMELIMIT": "time_limit_s",
    "ADDITIONAL_SLURM_PARAMS": "slurm_params",
}
# Variables of NVIDIA's recipes whose feature has another name here, or does not exist -> what to do instead.
WITHOUT_EFFECT = {
    "FP8_RECIPE": "--set fp8_recipe=tensorwise_current is its cs",
    "CUDA_GRAPH_SCOPE": "CUDA_GRAPH=true captures whole steps",
    "ENABLE_CHECKPOINT": "--set checkpoint_every=N writes checkpoints",
    "LOAD_CHECKPOINT_PATH": "--set resume=FOLDER reads a checkpoint",
    "ENABLE_PYTORCH_PROFILE": "-p --set profiler=torch profiles with PyTorch",
    "NUM_LAYERS": "--set model.layers=N changes the model",
    "HIDDEN_SIZE": "--set model.hidden=N changes the model",
    "TP_COMM_OVERLAP": "",
    "CONFIG_VARIANT": "",
    "CONFIG_OVERRIDES": "--set FIELD=VALUE changes a setting",
    "ENABLE_VBOOST": "",
    "ENABLE_PCT_BINDING": "--slurm-arg hint=nomultithread and other options of sbatch bind tasks",
    "CPU_PER_TASK_PINNING": "--slurm-arg cpus-per-task=N",
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")  # of a use case: part of the run folder's name
MOST_NUMBERS = 1_000_000  # of a range: a run has no more ranks
TRUE, FALSE, NONE = ("true", "1", "yes", "on"), ("false", "0", "no", "off"), ("none", "null", "na")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Override of one field: its value (text until converted to the field's type) and its source."""

    field: str
    value: Any
    source: str


def from_environment(environ: Mapping[str, str]) -> list[Setting]:
    """Return a setting for every known variable that is set; refuse those without effect."""
    _refuse_without_effect(environ)
    return from_variables(environ, "environment")


def split_environment(environment: Mapping[str, str], source: str) -> tuple[list[Setting], dict[str, str]]:
    """Return the settings that the variables of a run name, and the variables for its ranks; refuse the others."""
    _refuse_without_effect(environment)
    for variable, selector in SELECTOR_VARIABLES.items():
        if environment.get(variable):
            raise ConfigError(f"{source} {variable}: a variable of ranks does not choose the row; name the {selector}")
    return from_variables(environment, source), {k: v for k, v in environment.items() if k not in VARIABLES}


def _refuse_without_effect(environ: Mapping[str, str]) -> None:
    """Refuse a variable for a feature that it cannot switch on here: the run would be another one than requested."""
    for variable, instead in WITHOUT_EFFECT.items():
        text = environ.get(variable, "")
        if text.lower() not in ("", *FALSE, *NONE):
            hint = f"; {instead}" if instead else ""
            raise ConfigError(f"{variable}={text[:60]} has no effect here: unset it{hint}")


def from_variables(environ: Mapping[str, str], source: str) -> list[Setting]:
    """Return a setting for every known variable of the environment or of a file; an empty one counts as unset."""
    settings = []
    for variable, field in VARIABLES.items():
        if text := environ.get(variable, ""):
            settings += settings_of(field, text, f"{source} {variable}")
    return settings


def settings_of(field: str, value: Any, source: str) -> list[Setting]:
    """Return the setting of a field, or those of a use case with its lengths."""
    if field == "use_case" and isinstance(value, str):
        return parse_use_case(value, source)
    return [Setting(field=field, value=value, source=source)]


def parse_use_case(text: str, source: str) -> list[Setting]:
    """Parse `chat:128/128` (or just `chat`) into settings of use case, input and output length."""
    name, colon, lengths = text.partition(":")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{source}: {name!r} cannot name a use case; use letters, digits, '.', '_' and '-'")
    settings = [Setting(field="use_case", value=name, source=source)]
    if colon:
        isl, slash, osl = lengths.partition("/")
        if not (slash and whole_number(isl) is not None and whole_number(osl) is not None):
            raise ConfigError(f"{source}: expected NAME:INPUT/OUTPUT such as chat:128/128, got {text!r}")
        settings += [Setting(field=f, value=v, source=source) for f, v in (("isl", isl), ("osl", osl))]
    return settings


def from_arguments(pairs: list[str]) -> list[Setting]:
    """Parse the `field=value` arguments of `--set`; `parallel.tp` is the same as `tp`, and the last of a field wins."""
    settings: list[Setting] = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set: expected field=value, got {pair!r}")
        section, dot, field = name.partition(".")
        settings += settings_of(name if section == "model" or not dot else field, value, "--set")
    return settings


def typed_value(value: Any, field: str) -> str:
    """Return the text that `parse_value` reads as this value of a field: `true`, `none`, `35-44`."""
    if isinstance(value, list | tuple):
        separator = "-" if field == "window" else "," if all(isinstance(part, int) for part in value) else ", "
        return separator.join(map(str, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parse_value(kind: Any, value: Any, where: str) -> Any:
    """Convert text to the type of a field; values that are not text are returned unchanged."""
    if not isinstance(value, str):
        return value
    choices = [c for c in get_args(kind) if c is not type(None)] if get_origin(kind) is not Literal else []
    optional = type(None) in get_args(kind)
    text = value.strip()
    if optional and text.lower() in NONE:
        return None
    if get_origin(kind) is tuple:
        return _parse_tuple(kind, text, where)
    target = choices[0] if optional and choices else kind
    if get_origin(target) is Literal or target is str:
        return text
    if target is bool:
        if text.lower() in TRUE + FALSE:
            return text.lower() in TRUE
        raise UnknownName(f"value for {where}:", text, ("true", "false"))
    if where.endswith("time_limit_s") and ":" in text:
        return parse_duration(text, where)
    try:
        return target(text)
    except (ValueError, TypeError) as error:
        words = {int: "a whole number", float: "a number"}
        raise ConfigError(f"{where}: expected {words.get(target, target)}, got {text!r}") from error


def _parse_tuple(kind: Any, text: str, where: str) -> list[Any]:
    item = get_args(kind)[0]
    if item is int and Ellipsis in get_args(kind):
        return [number for part in text.split(",") for number in _parse_range(part, where)]
    pair = text.replace("-", ",").split(",")  # 35-44 or 35,44
    parts = pair if item is int else [part for part in text.split(";") if part]
    return [parse_value(item, part, where) for part in parts]


def _parse_range(text: str, where: str) -> range:
    """Return the numbers of `7` or `0-8`, which includes both ends."""
    first, dash, last = (part.strip() for part in text.partition("-"))
    ends = whole_number(first), whole_number(last if dash else first)
    if ends[0] is None or ends[1] is None or not ends[0] <= ends[1] < ends[0] + MOST_NUMBERS:
        raise ConfigError(f"{where}: expected whole numbers and ranges such as 0,8-15, got {text[:60]!r}")
    return range(ends[0], ends[1] + 1)


def parse_duration(text: str, where: str) -> int:
    """Convert Slurm's HH:MM:SS, MM:SS or D-HH:MM:SS to seconds."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    numbers = [whole_number(part) for part in [*parts, *([days] if dash else [])]]
    if None in numbers or len(parts) > 3:
        raise ConfigError(f"{where}: expected HH:MM:SS, got {text[:60]!r}")
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return total + 86400 * int(days or 0)
