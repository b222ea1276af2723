"""cluster_config.yaml as plain data, in one of its two schemas, with every scalar as the text that was typed.

    to_current_schema(load_yaml_as_text(path), path)   -> the current schema (2), whichever the file is written in

`time: 1:30:00` would be a number to YAML and so would `account: 0123`, so only null is resolved here.
An unknown key is an error that lists the valid ones.
"""

from pathlib import Path
from typing import Any

from llmb.errors import ConfigError, UnknownName
from llmb.formats.yaml_file import load_yaml

VERSION = 2
TOP_KEYS = (
    "schema_version", "llmb_repo", "llmb_install", "gpu_type", "cluster_name", "install", "environment", "slurm",
    "workloads", "container",
)  # fmt: skip
INSTALL_KEYS = ("node_architecture", "venv_type", "method", "image_folder")
WORKLOADS_KEYS = ("installed", "config")
WORKLOAD_KEYS = ("venv_path", "venv_type", "environment", "slurm", "container_image", "container_mounts")
CONTAINER_KEYS = ("image", "mounts", "mount_home")
_LAUNCHER_KEYS = ("llmb_repo", "llmb_install", "gpu_type", "cluster_name")  # of `launcher` in schema 1
_SCHEMA_1_KEYS = {  # key in schema 1: block and key in schema 2
    "gpu_partition": ("gpu", "partition"),
    "gpu_gres": ("gpu", "gres"),
    "gpu_partition_gres": ("gpu", "gres"),
    "cpu_partition": ("cpu", "partition"),
    "cpu_gres": ("cpu", "gres"),
    "cpu_partition_gres": ("cpu", "gres"),
}


def load_yaml_as_text(path: Path) -> Any:
    """Load a YAML file with all scalars as text, null as null; errors name the file and the line."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    resolved_tags = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
    resolvers = {
        first: [rule for rule in rules if rule[0] in resolved_tags]
        for first, rules in loader.yaml_implicit_resolvers.items()
    }
    text_loader = type("TextLoader", (loader,), {"yaml_implicit_resolvers": resolvers})
    return load_yaml(path, "at least `schema_version: 2`; `llmb-install` writes it", text_loader)


def to_current_schema(data: Any, path: Path) -> dict[str, Any]:
    """Return the same settings in the current schema, every key checked."""
    top = section(data, str(path))
    version = str(top.get("schema_version") or (1 if "launcher" in top else VERSION))
    if version not in ("1", "2"):
        raise UnknownName(f"schema_version in {path}:", version, (1, VERSION))
    if "launcher" in top:
        top = _flatten_launcher(top, version, path)
    elif version == "1":
        raise ConfigError(f"{path}: schema_version 1 needs a `launcher` section; without one write schema_version: 2")
    check_keys(top, TOP_KEYS, path)
    slurm = section(top.get("slurm"), f"{path}: slurm")
    current = {**top, "schema_version": str(VERSION), "slurm": _to_blocks(slurm, path)}
    for name, keys in (("install", INSTALL_KEYS), ("workloads", WORKLOADS_KEYS), ("container", CONTAINER_KEYS)):
        check_keys(section(top.get(name), f"{path}: {name}"), keys, f"{path}: {name}")
    configured = section(section(top.get("workloads"), "").get("config"), f"{path}: workloads.config")
    for target, settings in configured.items():
        where = f"{path}: workloads.config.{target}"
        check_keys(section(settings, where), WORKLOAD_KEYS, where)
    return current


def section(value: Any, where: str) -> dict[str, Any]:
    """Check that a value is a mapping; null is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: expected a mapping of names to values, got {str(value)[:60]!r}")
    return value


def check_keys(data: dict[str, Any], valid_keys: tuple[str, ...], where: object) -> None:
    """Raise a ConfigError for the first unknown key."""
    for key in data:
        if key not in valid_keys:
            raise UnknownName(f"key in {where}:", key, valid_keys)


def _flatten_launcher(top: dict[str, Any], version: str, path: Path) -> dict[str, Any]:
    """Move the keys of `launcher` of schema 1 to where schema 2 has them."""
    mixed = [key for key in _LAUNCHER_KEYS if key in top]
    if mixed or version == "2":
        schema_2 = ", ".join(mixed) or "schema_version: 2"
        raise ConfigError(f"{path}: `launcher` (schema 1) beside {schema_2} (schema 2); keep one of the two")
    launcher = dict(section(top["launcher"], f"{path}: launcher"))
    install = {**section(top.get("install"), f"{path}: install")}
    if "node_architecture" in launcher:
        install.setdefault("node_architecture", launcher.pop("node_architecture"))
    flat = {key: launcher.pop(key) for key in _LAUNCHER_KEYS if key in launcher}
    slurm = section(top.get("slurm"), f"{path}: slurm")
    duplicates = sorted(launcher.keys() & slurm.keys())
    if duplicates:
        raise ConfigError(f"{path}: {', '.join(duplicates)} in both `launcher` and `slurm`; keep one of the two")
    remaining = {key: value for key, value in top.items() if key not in ("launcher", "schema_version")}
    return {**remaining, **flat, "install": install, "slurm": {**launcher, **slurm}}


def _to_blocks(slurm: dict[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Sort the `slurm` section into common, gpu and cpu; a key outside of these blocks is common."""
    schema_1 = [key for key in slurm if key in _SCHEMA_1_KEYS]
    blocks = [key for key in ("common", "gpu", "cpu") if key in slurm]
    if schema_1 and blocks:
        raise ConfigError(
            f"{path}: slurm.{schema_1[0]} (schema 1) beside slurm.{blocks[0]} (schema 2); keep one of the two"
        )
    result: dict[str, dict[str, Any]] = {key: dict(section(slurm[key], f"{path}: slurm.{key}")) for key in blocks}
    for key, value in slurm.items():
        if key in _SCHEMA_1_KEYS:
            block, name = _SCHEMA_1_KEYS[key]
            if value is not None:  # in schema 1 null means not set
                result.setdefault(block, {})[name] = value
        elif key not in blocks:
            common = result.setdefault("common", {})
            if key in common:
                raise ConfigError(f"{path}: slurm.{key} is also in slurm.common; keep one of the two")
            common[key] = value
    return result
