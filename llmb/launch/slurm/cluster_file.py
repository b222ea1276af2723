"""cluster_config.yaml as plain data: read with every scalar as the text that was typed, and in one of its two schemas.

    as_current(read_text(path), path)   -> the current schema (2), whichever the file is written in

`time: 1:30:00` would be a number to YAML and `account: 0123` another one, so nothing but null is given a meaning here.
A key that does not exist is named with those that do.
"""

from pathlib import Path
from typing import Any

from llmb.errors import ConfigError, UnknownName

VERSION = 2
TOP = (
    "schema_version", "llmb_repo", "llmb_install", "gpu_type", "cluster_name", "install", "environment", "slurm",
    "workloads", "container",
)  # fmt: skip
INSTALL = ("node_architecture", "venv_type", "method", "image_folder")
WORKLOADS = ("installed", "config")
WORKLOAD = ("venv_path", "venv_type", "environment", "slurm", "container_image", "container_mounts")
CONTAINER = ("image", "mounts", "mount_home")
_FLAT = ("llmb_repo", "llmb_install", "gpu_type", "cluster_name")  # of the older schema's `launcher`
_OLDER_TARGETS = {  # key of the older schema: block and key of the current one
    "gpu_partition": ("gpu", "partition"),
    "gpu_gres": ("gpu", "gres"),
    "gpu_partition_gres": ("gpu", "gres"),
    "cpu_partition": ("cpu", "partition"),
    "cpu_gres": ("cpu", "gres"),
    "cpu_partition_gres": ("cpu", "gres"),
}


def read_text(path: Path) -> Any:
    """What the file holds, all scalars as text, null as null; errors name the file and the line."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    kept = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
    resolvers = {
        first: [rule for rule in rules if rule[0] in kept] for first, rules in loader.yaml_implicit_resolvers.items()
    }
    words = type("Words", (loader,), {"yaml_implicit_resolvers": resolvers})
    try:
        return yaml.load(path.read_bytes(), Loader=words)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error


def as_current(data: Any, path: Path) -> dict[str, Any]:
    """The same settings in the current schema, every key checked."""
    top = section(data, str(path))
    version = str(top.get("schema_version") or (1 if "launcher" in top else VERSION))
    if version not in ("1", "2"):
        raise UnknownName(f"schema_version in {path}:", version, (1, VERSION))
    if "launcher" in top:
        top = _flattened(top, version, path)
    elif version == "1":
        raise ConfigError(f"{path}: schema_version 1 needs a `launcher` section; without one write schema_version: 2")
    check_keys(top, TOP, path)
    slurm = section(top.get("slurm"), f"{path}: slurm")
    current = {**top, "schema_version": str(VERSION), "slurm": _in_blocks(slurm, path)}
    for name, known in (("install", INSTALL), ("workloads", WORKLOADS), ("container", CONTAINER)):
        check_keys(section(top.get(name), f"{path}: {name}"), known, f"{path}: {name}")
    configured = section(section(top.get("workloads"), "").get("config"), f"{path}: workloads.config")
    for target, settings in configured.items():
        where = f"{path}: workloads.config.{target}"
        check_keys(section(settings, where), WORKLOAD, where)
    return current


def section(value: Any, where: str) -> dict[str, Any]:
    """A mapping; one left empty is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: expected a mapping of names to values, got {str(value)[:60]!r}")
    return value


def check_keys(data: dict[str, Any], known: tuple[str, ...], where: object) -> None:
    """A ConfigError for the first key that does not exist."""
    for key in data:
        if key not in known:
            raise UnknownName(f"key in {where}:", key, known)


def _flattened(top: dict[str, Any], version: str, path: Path) -> dict[str, Any]:
    """The older schema's `launcher` section, its keys where the current schema has them."""
    mixed = [key for key in _FLAT if key in top]
    if mixed or version == "2":
        other = ", ".join(mixed) or "schema_version: 2"
        raise ConfigError(f"{path}: `launcher` (schema 1) beside {other} (schema 2); keep one of the two")
    launcher = dict(section(top["launcher"], f"{path}: launcher"))
    install = {**section(top.get("install"), f"{path}: install")}
    if "node_architecture" in launcher:
        install.setdefault("node_architecture", launcher.pop("node_architecture"))
    flat = {key: launcher.pop(key) for key in _FLAT if key in launcher}
    slurm = section(top.get("slurm"), f"{path}: slurm")
    twice = sorted(launcher.keys() & slurm.keys())
    if twice:
        raise ConfigError(f"{path}: {', '.join(twice)} in both `launcher` and `slurm`; keep one of the two")
    rest = {key: value for key, value in top.items() if key not in ("launcher", "schema_version")}
    return {**rest, **flat, "install": install, "slurm": {**launcher, **slurm}}


def _in_blocks(slurm: dict[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """slurm as common, gpu and cpu; a key outside of these blocks is common to both."""
    older = [key for key in slurm if key in _OLDER_TARGETS]
    blocks = [key for key in ("common", "gpu", "cpu") if key in slurm]
    if older and blocks:
        raise ConfigError(
            f"{path}: slurm.{older[0]} (schema 1) beside slurm.{blocks[0]} (schema 2); keep one of the two"
        )
    found: dict[str, dict[str, Any]] = {key: dict(section(slurm[key], f"{path}: slurm.{key}")) for key in blocks}
    for key, value in slurm.items():
        if key in _OLDER_TARGETS:
            block, name = _OLDER_TARGETS[key]
            if value is not None:  # there null meant: not set
                found.setdefault(block, {})[name] = value
        elif key not in blocks:
            common = found.setdefault("common", {})
            if key in common:
                raise ConfigError(f"{path}: slurm.{key} is also in slurm.common; keep one of the two")
            common[key] = value
    return found
