"""sbatch's options by their long names, however a cluster's file, the environment or a command line spells them.

    option_name("mem_per_gpu", "slurm.gpu")   -> "mem-per-gpu"
    option_name("SBATCH_TIMELIMIT", "...")    -> "time"
    options({"gres": "8", "exclusive": "true"}, "slurm.gpu") -> {"gpus-per-node": "8", "exclusive": ""}
    parameters("exclusive;qos=high")          -> {"exclusive": "", "qos": "high"}

An option with "" is a bare flag; null takes away what a wider setting gave. Names are checked, except in
ADDITIONAL_SLURM_PARAMS: that is the door for options which a site's own plugins add.
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
# What each run decides for itself; a cluster's setting would break it.
OF_THE_RUN = {
    "array", "chdir", "comment", "error", "export", "export-file", "input", "job-name", "nodefile", "nodes", "ntasks",
    "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "parsable", "signal", "test-only", "wait", "wrap",
}  # fmt: skip
# sbatch's variables that are not named after their option.
_ODD_VARIABLES = {
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
    """The long option that a key stands for: `mem_per_gpu`, `mem-per-gpu`, `SBATCH_MEM_PER_GPU` are one."""
    name = key.strip().lower().replace("_", "-")
    for prefix in ("sbatch-", "slurm-"):
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            name = _ODD_VARIABLES.get(name, name)
    if name in OF_THE_RUN:
        raise ConfigError(f"{where}: {key} is set by each run; leave it out")
    if name not in OPTIONS:
        raise UnknownName(f"Slurm option in {where}:", key, sorted(OPTIONS))
    return name


def is_option_variable(name: str) -> bool:
    """Whether an environment variable gives sbatch an option."""
    return name.startswith("SBATCH_")


def options(block: Mapping[str, Any], where: str) -> dict[str, str | None]:
    """A block of settings as long options and their values; null unsets."""
    found: dict[str, str | None] = {}
    for key, value in block.items():
        name = option_name(str(key), where)
        for option, text in _option(name, value, f"{where}.{key}").items():
            if option in found:
                raise ConfigError(f"{where}: {option} is given twice, once as {key}")
            found[option] = text
    return found


def parameters(text: str, where: str = "ADDITIONAL_SLURM_PARAMS") -> dict[str, str]:
    """Options joined by semicolons, `key=value` or a bare flag, as sbatch or a plugin of the site knows them."""
    found = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, _, value = part.removeprefix("--").partition("=")
        name = name.strip().replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
            raise ConfigError(f"{where}: expected key=value or a flag, joined by ';', got {part!r}")
        if name in OF_THE_RUN:
            raise ConfigError(f"{where}: {name} is set by each run; leave it out")
        found[name] = _printable(value, f"{where}: {name}")
    return found


def merged(*layers: Mapping[str, str | None]) -> dict[str, str]:
    """Settings on top of one another, the widest first; null takes one away."""
    together = {name: value for layer in layers for name, value in layer.items()}
    return {name: value for name, value in together.items() if value is not None}


def gpus_per_node(options: Mapping[str, str]) -> int | None:
    """How many GPUs of a node a job asks for; null where it names none."""
    return whole(options.get("gpus-per-node", "").rpartition(":")[2])


def whole(text: str) -> int | None:
    """A count that somebody wrote down; null where it is none."""
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
    """A number or gpu[:type]:N means GPUs of a node, as in NVIDIA's files; any other resource stays as it is."""
    if value is None:
        return {"gpus-per-node": None, "gres": None}
    text = _printable(value, where)
    gpus = _GPU_GRES.fullmatch(text)
    if gpus:
        return {"gpus-per-node": f"{gpus['type']}:{gpus['count']}" if gpus["type"] else gpus["count"]}
    return {"gres": text} if whole(text) is None else {"gpus-per-node": text}


def _printable(value: Any, where: str) -> str:
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(f"{where}: expected one value, got {value!r}")
    text = str(value)
    if not text.isprintable():
        raise ConfigError(f"{where}: Slurm takes no line break or control character, got {text!r}")
    return text
