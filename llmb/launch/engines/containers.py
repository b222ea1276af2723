"""Ranks in a container: what srun is told where enroot and its Slurm plugin pyxis are installed.

    container = find_container(cluster, os.environ)     # None: ranks run as they are
    check_image(container)                              # before anything is submitted
    srun_flags(container, order, rundir, install, environment) -> ["--container-image=...", ...]

A folder has the same name inside as outside, so no path in a configuration or a command changes its meaning. The home
folder stays outside unless it is asked for: packages and settings in it would hide the container's own.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from llmb.errors import ConfigError
from llmb.launch.engines.launch_spec import EngineOrder
from llmb.launch.run_folder import RunDir, shown
from llmb.launch.slurm.cluster_config import IMAGE, MOUNTS, Cluster, Container

UNSPEAKABLE = (",", ":")  # what pyxis joins mounts and their two ends with


def find_container(cluster: Cluster | None, environ: Mapping[str, str]) -> Container | None:
    """What the cluster's file says, and over it RUN_CONF_IMAGE and RUN_CONF_MOUNTS of the environment."""
    container = (cluster.container if cluster else None) or Container()
    image = environ.get(IMAGE) or container.image
    if not image:
        return None
    mounts = [mount.strip() for mount in environ.get(MOUNTS, "").split(",") if mount.strip()]
    return replace(container, image=_absolute(image), mounts=(*container.mounts, *mounts))


def check_image(container: Container | None) -> None:
    """A ConfigError where the image is a file that is not there; one of a registry is fetched when the job starts."""
    if container is None or container.image is None or not is_file(container.image):
        return
    path = Path(container.image)
    if not path.is_file():
        raise ConfigError(
            f"container image {shown(path)} is not there; make it with `enroot import -o {path.name} docker://...`, "
            f"or name another: {IMAGE}=FILE"
        )


def is_file(image: str) -> bool:
    """Whether an image is a file here rather than an address such as registry#team/image:25.04."""
    return image.startswith(("/", "./", "../")) or image.endswith(".sqsh")


def srun_flags(
    container: Container | None, order: EngineOrder, rundir: RunDir, install: Path, environment: Mapping[str, str]
) -> list[str]:
    """What srun is told; nothing without a container. `environment`: variables an image must not replace by its own."""
    if container is None or container.image is None:
        return []
    mounts = [*_as_named([install, rundir.path, *_caches(environment), *order.folders]), *container.mounts]
    flags = [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(dict.fromkeys(mounts))}",
        "--container-mount-home" if container.mount_home else "--no-container-mount-home",
        "--container-writable",  # engines write beside their sources; enroot's default is a read-only image
    ]
    kept = {*environment, "PYTHONPATH"} - {"PATH", "LD_LIBRARY_PATH"}  # of these two, the image's own
    return [*flags, f"--container-env={','.join(sorted(kept))}"]


def _absolute(image: str) -> str:
    return os.path.abspath(os.path.expanduser(image)) if is_file(image) else image


def _caches(environment: Mapping[str, str]) -> list[Path]:
    """Where Hugging Face's files are kept, if anywhere."""
    home = environment.get("HF_HOME") or os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return [Path(home)] if Path(home).is_dir() else []


def _as_named(folders: Iterable[str | Path]) -> list[str]:
    """Mounts under their own names; a folder inside another comes with it."""
    paths = list(dict.fromkeys(Path(folder).absolute() for folder in folders))
    for path in paths:
        if any(mark in str(path) for mark in UNSPEAKABLE) or not str(path).isprintable():
            raise ConfigError(f"{shown(path)} cannot be shown to a container; use folders without ',' and ':'")
    outer = [path for path in paths if not any(other in path.parents for other in paths)]
    return [f"{path}:{path}" for path in outer]
