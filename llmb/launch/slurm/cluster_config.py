"""Cluster settings from cluster_config.yaml: Slurm options, GPUs, environment variables and containers.

    find_cluster(Path.cwd(), install_root(os.environ)) -> Cluster, or None: runs are local
    cluster.for_target("pretrain_llama3.1_405b").sbatch -> {"account": "llm", "partition": "batch", ...}

More specific settings win: slurm.common < slurm.gpu < SBATCH_* and ADDITIONAL_SLURM_PARAMS of `environment` < those of
the workload < those of the workload's size. Null unsets.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from llmb.config.serialization import write_atomic
from llmb.errors import ConfigError, LaunchError
from llmb.launch.slurm import sbatch_options
from llmb.launch.slurm.cluster_file import load_yaml_as_text, section, to_current_schema

CLUSTER_FILE = "cluster_config.yaml"
ADDITIONAL_PARAMS = "ADDITIONAL_SLURM_PARAMS"
IMAGE_VARIABLE, MOUNTS_VARIABLE = "RUN_CONF_IMAGE", "RUN_CONF_MOUNTS"  # as in NVIDIA's recipes


@dataclass(frozen=True, kw_only=True)
class Container:
    """Container that pyxis runs ranks in."""

    image: str | None = None  # a .sqsh file or a registry address
    mounts: tuple[str, ...] = ()  # source[:target[:flags]]
    mount_home: bool = False  # packages in the home folder would hide the container's own


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """Settings of one workload, or of one size of it; null unsets."""

    environment: dict[str, str | None] = field(default_factory=dict)
    sbatch: dict[str, str | None] = field(default_factory=dict)
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()  # in addition to the cluster's
    venv_path: str | None = None
    venv_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster. Options have sbatch's long names; "" is a bare flag."""

    path: Path  # of cluster_config.yaml
    name: str | None = None
    gpu_type: str | None = None
    gpus_per_node: int | None = None
    architecture: str | None = None  # of the nodes' CPUs: x86_64, aarch64
    sbatch: dict[str, str] = field(default_factory=dict)
    cpu_sbatch: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    workloads: dict[str, WorkloadSettings] = field(default_factory=dict)
    installed: tuple[str, ...] = ()
    container: Container | None = None

    def for_target(self, target: str) -> "Cluster":
        """Apply the settings of a workload; `target` is its key, with or without `_<size>`."""
        cluster = self
        for key in (target.rpartition("_")[0], target):
            if key in self.workloads:
                cluster = cluster._with_workload(self.workloads[key])
        return cluster

    def _with_workload(self, settings: WorkloadSettings) -> "Cluster":
        container = self.container
        if settings.container_image or settings.container_mounts:
            base = container or Container()
            mounts = (*base.mounts, *settings.container_mounts)
            container = replace(base, image=settings.container_image or base.image, mounts=mounts)
        sbatch = sbatch_options.merge_layers(self.sbatch, settings.sbatch)
        cpu_sbatch = sbatch_options.merge_layers(self.cpu_sbatch, _without_gpu_options(settings.sbatch))
        environment = sbatch_options.merge_layers(self.environment, settings.environment)
        gpus = _gpus_per_node(sbatch, environment, self.path)
        return replace(
            self,
            sbatch=sbatch,
            cpu_sbatch=cpu_sbatch,
            environment=environment,
            container=container,
            gpus_per_node=gpus,
        )


def find_cluster(folder: Path, install: Path) -> Cluster | None:
    """Read the file in `folder`, else the one in `install`; None where there is none."""
    for parent in (folder, install):
        path = parent / CLUSTER_FILE
        if os.path.lexists(path):
            return read_cluster(path)
    return None


def read_cluster(path: Path) -> Cluster:
    """Read the cluster of one file, in either schema."""
    return parse_cluster(to_current_schema(load_yaml_as_text(path), path), path)


def parse_cluster(data: Mapping[str, Any], path: Path) -> Cluster:
    """Build the cluster from plain data in the current schema; `path`: its file, existing or to be written."""
    slurm = data["slurm"]
    blocks = {name: sbatch_options.parse_options(slurm.get(name, {}), f"{path}: slurm.{name}") for name in slurm}
    common = blocks.get("common", {})
    variables, extra = _split_environment(
        section(data.get("environment"), f"{path}: environment"), f"{path}: environment"
    )
    environment = sbatch_options.merge_layers(variables)
    gpu = sbatch_options.merge_layers(common, blocks.get("gpu", {}), extra)
    cpu = sbatch_options.merge_layers(common, blocks["cpu"], _without_gpu_options(extra)) if blocks.get("cpu") else gpu
    install = section(data.get("install"), f"{path}: install")
    workloads = section(data.get("workloads"), f"{path}: workloads")
    configured = section(workloads.get("config"), f"{path}: workloads.config")
    container = _container(section(data.get("container"), f"{path}: container"), environment, path)
    return Cluster(
        path=path,
        name=_text(data.get("cluster_name"), f"{path}: cluster_name"),
        gpu_type=_lower(_text(data.get("gpu_type"), f"{path}: gpu_type")),
        gpus_per_node=_gpus_per_node(gpu, environment, path),
        architecture=_text(install.get("node_architecture"), f"{path}: install.node_architecture"),
        sbatch=gpu,
        cpu_sbatch=cpu,
        environment=environment,
        workloads={name: _workload(section(settings, ""), f"{path}: {name}") for name, settings in configured.items()},
        installed=tuple(_list(workloads.get("installed"), f"{path}: workloads.installed")),
        container=container,
    )


def write_cluster(path: Path, data: Mapping[str, Any]) -> Path | None:
    """Write data of the current schema atomically; the file it replaces is backed up beside it, and its path returned.

    Data that could not be read again is refused.
    """
    parse_cluster(to_current_schema(dict(data), path), path)
    path = path.resolve()  # a link to a file that is shared stays a link
    backup = _back_up(path)
    mode = path.stat().st_mode & 0o777 if backup else 0o666  # a private file stays private
    write_atomic(path, as_yaml(data), mode, durable=True)
    return backup


def as_yaml(data: Mapping[str, Any]) -> str:
    """Return the data as YAML; text that YAML would not read back unchanged is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper that escapes line breaks: other YAML styles do not preserve all of them."""

    def text(dumper: Dumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, None if value.isprintable() else '"')

    Dumper.add_representer(str, text)
    return yaml.dump(_numbers(data), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _back_up(path: Path) -> Path | None:
    """Hard-link the file that is about to be replaced to cluster_config.yaml.1, .2, ..."""
    if not path.exists():
        return None
    for number in count(1):
        backup = path.with_name(f"{path.name}.{number}")
        try:
            os.link(path, backup)
            return backup
        except FileExistsError:
            continue
        except OSError as error:
            raise LaunchError(f"cannot back up {path} as {backup.name}: {error.strerror}") from error
    raise AssertionError("count() never ends")


def _numbers(value: Any) -> Any:
    """Convert text that is a plain number, as other tools expect numbers."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(item) for item in value]
    count = sbatch_options.parse_count(value) if isinstance(value, str) else None
    return value if count is None or str(count) != value else count  # 0123 stays text


def _split_environment(
    environment: Mapping[str, Any], where: str
) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Split an environment into variables for the ranks and options for sbatch."""
    variables = {name: _variable(name, value, where) for name, value in environment.items()}
    named = {name: variables.pop(name) for name in list(variables) if sbatch_options.is_option_variable(name)}
    extra = sbatch_options.parse_options(named, where)
    parameters = variables.pop(ADDITIONAL_PARAMS, None)
    return variables, {
        **extra,
        **sbatch_options.parse_additional_params(parameters or "", f"{where}.{ADDITIONAL_PARAMS}"),
    }


def _without_gpu_options(options: Mapping[str, str | None]) -> dict[str, str | None]:
    """Drop the options that do not apply to jobs without GPUs, which have a partition of their own."""
    return {name: value for name, value in options.items() if name not in ("partition", "gres") and "gpu" not in name}


def _workload(settings: Mapping[str, Any], where: str) -> WorkloadSettings:
    variables, extra = _split_environment(
        section(settings.get("environment"), f"{where}.environment"), f"{where}.environment"
    )
    image, mounts = variables.pop(IMAGE_VARIABLE, None), variables.pop(MOUNTS_VARIABLE, None)
    return WorkloadSettings(
        environment=variables,
        sbatch={
            **sbatch_options.parse_options(section(settings.get("slurm"), f"{where}.slurm"), f"{where}.slurm"),
            **extra,
        },
        container_image=_text(settings.get("container_image"), f"{where}.container_image") or image,
        container_mounts=_mounts(settings.get("container_mounts"), mounts, f"{where}.container_mounts"),
        venv_path=_text(settings.get("venv_path"), f"{where}.venv_path"),
        venv_type=_text(settings.get("venv_type"), f"{where}.venv_type"),
    )


def _container(settings: Mapping[str, Any], environment: dict[str, str], path: Path) -> Container | None:
    """Parse the container section; the variables of NVIDIA's recipes are moved from `environment` into it."""
    image = _text(settings.get("image"), f"{path}: container.image") or environment.pop(IMAGE_VARIABLE, None)
    mounts = _mounts(settings.get("mounts"), environment.pop(MOUNTS_VARIABLE, None), f"{path}: container.mounts")
    home = str(settings.get("mount_home", "false")).lower()
    if home not in ("true", "false"):
        raise ConfigError(f"{path}: container.mount_home: expected true or false, got {home!r}")
    if not image and not mounts:
        return None
    return Container(image=image, mounts=mounts, mount_home=home == "true")


def _mounts(value: Any, variable: str | None, where: str) -> tuple[str, ...]:
    mounts = _list(value, where) + _list(variable, where)
    for mount in mounts:
        if not mount.startswith("/") or "," in mount:  # pyxis takes them joined by commas
            raise ConfigError(f"{where}: expected /source:/target without a comma, got {mount!r}")
    return tuple(mounts)


def _gpus_per_node(sbatch: Mapping[str, str], environment: Mapping[str, str], path: Path) -> int | None:
    text = environment.get("GPUS_PER_NODE")
    if text is None:
        return sbatch_options.gpus_per_node(sbatch)
    count = sbatch_options.parse_count(text)
    if not count:
        raise ConfigError(f"{path}: environment.GPUS_PER_NODE: expected a whole number above 0, got {text!r}")
    return count


def _variable(name: str, value: Any, where: str) -> str | None:
    if not name.isidentifier() or not name.isascii():
        raise ConfigError(f"{where}: {name!r} cannot name an environment variable; use letters, digits and '_'")
    text = _text(value, f"{where}.{name}", lines=True)
    if text is not None and "\0" in text:
        raise ConfigError(f"{where}.{name} holds a zero byte, which no environment variable can hold")
    return text


def _text(value: Any, where: str, lines: bool = False) -> str | None:
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(f"{where}: expected one value, got {str(value)[:60]!r}")
    text = None if value is None else str(value)
    if text and not lines and not text.isprintable():
        raise ConfigError(f"{where}: line breaks and control characters are not allowed, got {text!r}")
    return text


def _list(value: Any, where: str) -> list[str]:
    """Parse a list, or text with commas."""
    if isinstance(value, (list, tuple)):
        items = [_text(item, where) or "" for item in value]
    else:
        items = (_text(value, where) or "").split(",")
    return [item.strip() for item in items if item.strip()]


def _lower(text: str | None) -> str | None:
    return text.lower() if text else None
