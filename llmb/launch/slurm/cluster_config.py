"""The cluster a user works on: what its file, cluster_config.yaml, says about Slurm, GPUs, variables and containers.

    find_cluster(Path.cwd(), install_root(os.environ)) -> Cluster, or None: runs are local
    cluster.for_target("pretrain_llama3.1_405b").sbatch -> {"account": "llm", "partition": "batch", ...}

Narrower settings win: slurm.common < slurm.gpu < SBATCH_* and ADDITIONAL_SLURM_PARAMS of `environment` < those of the
workload < those of the workload's size. Null takes a setting away.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from llmb.errors import ConfigError, LaunchError
from llmb.launch.slurm import sbatch_options
from llmb.launch.slurm.cluster_file import as_current, read_text, section

FILE = "cluster_config.yaml"
EXTRA = "ADDITIONAL_SLURM_PARAMS"
IMAGE, MOUNTS = "RUN_CONF_IMAGE", "RUN_CONF_MOUNTS"  # NVIDIA's recipes name a container so


@dataclass(frozen=True, kw_only=True)
class Container:
    """What pyxis runs ranks in."""

    image: str | None = None  # a .sqsh file or an image's address
    mounts: tuple[str, ...] = ()  # source[:target[:flags]]
    mount_home: bool = False  # a home folder brings packages that hide the container's own


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """What one workload, or one size of it, sets for itself; null unsets."""

    environment: dict[str, str | None] = field(default_factory=dict)
    sbatch: dict[str, str | None] = field(default_factory=dict)
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()  # besides the cluster's
    venv_path: str | None = None
    venv_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster. Options are sbatch's long ones; "" is a bare flag."""

    path: Path  # the file all this stands in
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
        """The cluster as one workload sees it; `target` is its key, with or without `_<size>`."""
        seen = self
        for key in (target.rpartition("_")[0], target):
            if key in self.workloads:
                seen = seen._with(self.workloads[key])
        return seen

    def _with(self, own: WorkloadSettings) -> "Cluster":
        container = self.container
        if own.container_image or own.container_mounts:
            base = container or Container()
            mounts = (*base.mounts, *own.container_mounts)
            container = replace(base, image=own.container_image or base.image, mounts=mounts)
        sbatch = sbatch_options.merged(self.sbatch, own.sbatch)
        cpu_sbatch = sbatch_options.merged(self.cpu_sbatch, _of_any_job(own.sbatch))
        environment = sbatch_options.merged(self.environment, own.environment)
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
    """What the file in `folder` says, else the one in `install`; None where there is none."""
    for place in (folder, install):
        path = place / FILE
        if os.path.lexists(path):
            return read_cluster(path)
    return None


def read_cluster(path: Path) -> Cluster:
    """The cluster of one file, in either schema."""
    return parse_cluster(as_current(read_text(path), path), path)


def parse_cluster(data: Mapping[str, Any], path: Path) -> Cluster:
    """The cluster of plain data in the current schema; `path` is where it stands, or will."""
    slurm = data["slurm"]
    blocks = {name: sbatch_options.options(slurm.get(name, {}), f"{path}: slurm.{name}") for name in slurm}
    common = blocks.get("common", {})
    variables, extra = _split(section(data.get("environment"), f"{path}: environment"), f"{path}: environment")
    environment = sbatch_options.merged(variables)
    gpu = sbatch_options.merged(common, blocks.get("gpu", {}), extra)
    cpu = sbatch_options.merged(common, blocks["cpu"], _of_any_job(extra)) if blocks.get("cpu") else gpu
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
        workloads={name: _workload(section(own, ""), f"{path}: {name}") for name, own in configured.items()},
        installed=tuple(_list(workloads.get("installed"), f"{path}: workloads.installed")),
        container=container,
    )


def write_cluster(path: Path, data: Mapping[str, Any]) -> Path | None:
    """Write data of the current schema, whole or not at all; the file it replaces stays beside it, and is returned.

    Nothing is written that could not be read again.
    """
    parse_cluster(as_current(dict(data), path), path)
    path = path.resolve()  # a link to a file that is shared stays a link
    kept = _keep(path)
    mode = path.stat().st_mode & 0o777 if kept else 0o644  # a file made private stays so
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(as_yaml(data))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise LaunchError(f"cannot write {path}: {error.strerror}") from error
    return kept


def as_yaml(data: Mapping[str, Any]) -> str:
    """The text of a file with this data; whatever YAML would not read back as the same text is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Escapes line breaks: in YAML's other styles some of them come back as another one."""

    def text(dumper: Dumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, None if value.isprintable() else '"')

    Dumper.add_representer(str, text)
    return yaml.dump(_numbers(data), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _keep(path: Path) -> Path | None:
    """A second name for the file that is about to be replaced: cluster_config.yaml.1, .2, ..."""
    if not path.exists():
        return None
    for number in count(1):
        second = path.with_name(f"{path.name}.{number}")
        try:
            os.link(path, second)
            return second
        except FileExistsError:
            continue
        except OSError as error:
            raise LaunchError(f"cannot keep the old {path} as {second.name}: {error.strerror}") from error
    raise AssertionError("count() never ends")


def _numbers(value: Any) -> Any:
    """Text that is a plain number as one, so that other tools find the number they expect."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(item) for item in value]
    count = sbatch_options.whole(value) if isinstance(value, str) else None
    return value if count is None or str(count) != value else count  # 0123 stays text


def _split(given: Mapping[str, Any], where: str) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """An environment as variables for the ranks and options for sbatch."""
    variables = {name: _variable(name, value, where) for name, value in given.items()}
    named = {name: variables.pop(name) for name in list(variables) if sbatch_options.is_option_variable(name)}
    extra = sbatch_options.options(named, where)
    parameters = variables.pop(EXTRA, None)
    return variables, {**extra, **sbatch_options.parameters(parameters or "", f"{where}.{EXTRA}")}


def _of_any_job(options: Mapping[str, str | None]) -> dict[str, str | None]:
    """Those that also hold for jobs without GPUs, which have a partition of their own."""
    return {name: value for name, value in options.items() if name not in ("partition", "gres") and "gpu" not in name}


def _workload(own: Mapping[str, Any], where: str) -> WorkloadSettings:
    variables, extra = _split(section(own.get("environment"), f"{where}.environment"), f"{where}.environment")
    image, mounts = variables.pop(IMAGE, None), variables.pop(MOUNTS, None)
    return WorkloadSettings(
        environment=variables,
        sbatch={**sbatch_options.options(section(own.get("slurm"), f"{where}.slurm"), f"{where}.slurm"), **extra},
        container_image=_text(own.get("container_image"), f"{where}.container_image") or image,
        container_mounts=_mounts(own.get("container_mounts"), mounts, f"{where}.container_mounts"),
        venv_path=_text(own.get("venv_path"), f"{where}.venv_path"),
        venv_type=_text(own.get("venv_type"), f"{where}.venv_type"),
    )


def _container(given: Mapping[str, Any], environment: dict[str, str], path: Path) -> Container | None:
    """From the container section; the variables of NVIDIA's recipes are taken out of `environment` and add to it."""
    image = _text(given.get("image"), f"{path}: container.image") or environment.pop(IMAGE, None)
    mounts = _mounts(given.get("mounts"), environment.pop(MOUNTS, None), f"{path}: container.mounts")
    home = str(given.get("mount_home", "false")).lower()
    if home not in ("true", "false"):
        raise ConfigError(f"{path}: container.mount_home: expected true or false, got {home!r}")
    if not image and not mounts:
        return None
    return Container(image=image, mounts=mounts, mount_home=home == "true")


def _mounts(listed: Any, variable: str | None, where: str) -> tuple[str, ...]:
    mounts = _list(listed, where) + _list(variable, where)
    for mount in mounts:
        if not mount.startswith("/") or "," in mount:  # pyxis takes them joined by commas
            raise ConfigError(f"{where}: expected /source:/target without a comma, got {mount!r}")
    return tuple(mounts)


def _gpus_per_node(sbatch: Mapping[str, str], environment: Mapping[str, str], path: Path) -> int | None:
    said = environment.get("GPUS_PER_NODE")
    if said is None:
        return sbatch_options.gpus_per_node(sbatch)
    count = sbatch_options.whole(said)
    if not count:
        raise ConfigError(f"{path}: environment.GPUS_PER_NODE: expected a whole number above 0, got {said!r}")
    return count


def _variable(name: str, value: Any, where: str) -> str | None:
    if not name.isidentifier() or not name.isascii():
        raise ConfigError(f"{where}: {name!r} cannot name an environment variable; use letters, digits and '_'")
    text = _text(value, f"{where}.{name}", lines=True)
    if text is not None and "\0" in text:
        raise ConfigError(f"{where}.{name} holds a zero byte, which no process can be given")
    return text


def _text(value: Any, where: str, lines: bool = False) -> str | None:
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(f"{where}: expected one value, got {str(value)[:60]!r}")
    text = None if value is None else str(value)
    if text and not lines and not text.isprintable():
        raise ConfigError(f"{where}: no line break or control character can stand here, got {text!r}")
    return text


def _list(value: Any, where: str) -> list[str]:
    """A list, or text with commas."""
    if isinstance(value, (list, tuple)):
        items = [_text(item, where) or "" for item in value]
    else:
        items = (_text(value, where) or "").split(",")
    return [item.strip() for item in items if item.strip()]


def _lower(text: str | None) -> str | None:
    return text.lower() if text else None
