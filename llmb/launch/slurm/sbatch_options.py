"""sbatch options by their long names, however cluster_config.yaml, the environment or a command line spells them.

    option_name("mem_per_gpu", "slurm.gpu")   -> "mem-per-gpu"
    option_name("SBATCH_TIMELIMIT", "...")    -> "time"
    parse_options({"gres": "8", "exclusive": "true"}, "slurm.gpu") -> {"gpus-per-node": "8", "exclusive": ""}
    parse_additional_params("exclusive;qos=high")                  -> {"exclusive": "", "qos": "high"}

An option with value "" is a bare flag; null unsets what a more general setting gave. Names are checked, except in
ADDITIONAL_SLURM_PARAMS: that is for options which a site's own plugins add.
"""

import re
from collections.abc import Mapping
from typing import Any

from llmb.errors import ConfigError, UnknownName

FLAGS = {
    "contiguous", "exclusive", "get-user-env", "hold", "no-kill", "no-requeue", "overcommit", "oversubscribe",
    "reboot", "requeue", "spread-job", "use-min-nodes",
}  # fmt: skip
OPTIONS = FLAGS | {
    "account", "acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "clusters", "constraint",
    "container", "container-image", "container-mounts", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu",
    "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "exclude", "extra-node-info", "gpu-bind",
    "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "licenses",
    "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network",
    "nice", "nodelist", "ntasks-per-core", "ntasks-per-socket", "partition", "power", "prefer", "priority", "profile",
    "propagate", "qos", "reservation", "segment", "sockets-per-node", "switches", "thread-spec", "threads-per-core",
    "time", "time-min", "tmp", "tres-bind", "tres-per-task", "wckey", "wait-all-nodes",
}  # fmt: skip
# Set by each run; a setting of the cluster would break it.
RESERVED_OPTIONS = {
    "array", "chdir", "comment", "error", "export", "export-file", "input", "job-name", "nodefile", "nodes", "ntasks",
    "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "parsable", "signal", "tasks-per-node", "test-only",
    "wait", "wrap",
    "gid", "help", "uid", "usage", "version",  # these change whose job it is, or submit none
}  # fmt: skip
# Input variables of sbatch that are not named after their option.
_RENAMED_VARIABLES = {
    "timelimit": "time",
    "segment-size": "segment",
    "mem-per-node": "mem",
    "req-switch": "switches",
    "cpu-freq-req": "cpu-freq",
    "burst-buffer": "bb",
    "array-inx": "array",
}
_GPU_GRES = re.compile(r"gpu(?::(?P<type>[^:,()]+))?:(?P<count>[0-9]+)")
_ON, _OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def option_name(key: str, where: str) -> str:
    """Return the long option of a key: `mem_per_gpu`, `mem-per-gpu`, `SBATCH_MEM_PER_GPU` are the same."""
    name = key.strip().lower().replace("_", "-")
    for prefix in ("sbatch-", "slurm-"):
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            name = _RENAMED_VARIABLES.get(name, name)
    if name in RESERVED_OPTIONS:
        raise ConfigError(f"{where}: {key} is set by each run; leave it out")
    if name not in OPTIONS:
        raise UnknownName(f"Slurm option in {where}:", key, sorted(OPTIONS))
    return name


def complete_option(name: str, where: str) -> str:
    """Return the option that sbatch takes an abbreviation for; a name that begins none may be a site plugin's."""
    options = OPTIONS | RESERVED_OPTIONS
    matches = [name] if name in options else sorted(option for option in options if option.startswith(name))
    if len(matches) > 1:
        raise ConfigError(f"{where}: {name} is ambiguous: {', '.join(matches)}")
    return matches[0] if matches else name


def is_option_variable(name: str) -> bool:
    """Return whether an environment variable is an input variable of sbatch."""
    return name.startswith("SBATCH_")


def parse_options(block: Mapping[str, Any], where: str) -> dict[str, str | None]:
    """Parse a block of settings to long options and their values; null unsets."""
    parsed: dict[str, str | None] = {}
    for key, value in block.items():
        name = option_name(str(key), where)
        for option, text in _option(name, value, f"{where}.{key}").items():
            if option in parsed:
                raise ConfigError(f"{where}: {option} is given twice, once as {key}")
            parsed[option] = text
    return parsed


def parse_additional_params(text: str, where: str = "ADDITIONAL_SLURM_PARAMS") -> dict[str, str]:
    """Parse options joined by semicolons, `key=value` or a bare flag, as sbatch or a plugin of the site knows them."""
    parsed = {}
    for item in filter(None, (item.strip() for item in text.split(";"))):
        name, _, value = item.removeprefix("--").partition("=")
        name = name.strip().replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
            raise ConfigError(f"{where}: expected key=value or a flag, joined by ';', got {item!r}")
        name = complete_option(name, where)
        if name in RESERVED_OPTIONS:
            raise ConfigError(f"{where}: {name} is set by each run; leave it out")
        parsed[name] = _printable(value, f"{where}: {name}")
    return parsed


def merge_layers(*layers: Mapping[str, str | None]) -> dict[str, str]:
    """Merge settings, the most general first; null unsets."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    return {name: value for name, value in merged.items() if value is not None}


def gpus_per_node(options: Mapping[str, str]) -> int | None:
    """Return the GPUs per node that a job requests; None: it requests none."""
    return parse_count(options.get("gpus-per-node", "").rpartition(":")[2])


def parse_count(text: str) -> int | None:
    """Parse a whole number; None where it is not one."""
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else None


def _option(name: str, value: Any, where: str) -> dict[str, str | None]:
    if name == "gres":
        return _gres(value, where)
    if value is None:
        return {name: None}
    text = _printable(value, where)
    if name in FLAGS and text.lower() in _OFF:
        return {name: None}
    return {name: "" if name in FLAGS and text.lower() in _ON else text}


def _gres(value: Any, where: str) -> dict[str, str | None]:
    """Map a number or gpu[:type]:N to gpus-per-node, as in NVIDIA's files; any other resource stays as it is."""
    if value is None:
        return {"gpus-per-node": None, "gres": None}
    text = _printable(value, where)
    gpus = _GPU_GRES.fullmatch(text)
    if gpus:
        return {"gpus-per-node": f"{gpus['type']}:{gpus['count']}" if gpus["type"] else gpus["count"]}
    return {"gres": text} if parse_count(text) is None else {"gpus-per-node": text}


def _printable(value: Any, where: str) -> str:
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(f"{where}: expected one value, got {value!r}")
    text = str(value)
    if not text.isprintable():
        raise ConfigError(f"{where}: Slurm accepts no line break or control character, got {text!r}")
    return text
