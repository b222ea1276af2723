"""Ranks in a container: options for srun where enroot and its Slurm plugin pyxis are installed.

    container = find_container(cluster, os.environ)     # None: ranks run as they are
    check_image(container)                              # before anything is submitted
    pyxis_options(container, launch_spec, run_folder, install, environment) -> ["--container-image=...", ...]

Folders are mounted under the same path, so that paths in configurations and commands stay valid. The home folder is not
mounted unless requested: packages and settings in it would hide the container's own.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from llmb.errors import ConfigError
from llmb.launch.engines.launch_spec import LaunchSpec
from llmb.launch.run_folder import RunFolder, printable_path
from llmb.launch.slurm.cluster_config import IMAGE_VARIABLE, MOUNTS_VARIABLE, Cluster, Container

MOUNT_SEPARATORS = (",", ":")  # of pyxis, so no path may hold them


def find_container(cluster: Cluster | None, environ: Mapping[str, str]) -> Container | None:
    """Return the container of the cluster's file, overridden by RUN_CONF_IMAGE and RUN_CONF_MOUNTS."""
    container = (cluster.container if cluster else None) or Container()
    image = environ.get(IMAGE_VARIABLE) or container.image
    if not image:
        return None
    mounts = [mount.strip() for mount in environ.get(MOUNTS_VARIABLE, "").split(",") if mount.strip()]
    return replace(container, image=_absolute(image), mounts=(*container.mounts, *mounts))


def check_image(container: Container | None) -> None:
    """Raise a ConfigError where the image is a missing file; one of a registry is fetched when the job starts."""
    if container is None or container.image is None or not is_file(container.image):
        return
    path = Path(container.image)
    if not path.is_file():
        raise ConfigError(
            f"container image {printable_path(path)} is missing; create it with "
            f"`enroot import -o {path.name} docker://...`, or name another: {IMAGE_VARIABLE}=FILE"
        )


def is_file(image: str) -> bool:
    """Return whether an image is a file rather than an address such as registry#team/image:25.04."""
    return image.startswith(("/", "./", "../")) or image.endswith(".sqsh")


def pyxis_options(
    container: Container | None,
    launch_spec: LaunchSpec,
    run_folder: RunFolder,
    install: Path,
    environment: Mapping[str, str],
) -> list[str]:
    """Return the srun options; none without a container. `environment`: variables that the image must not override."""
    if container is None or container.image is None:
        return []
    mounts = [
        *_same_path_mounts([install, run_folder.path, *_caches(environment), *launch_spec.folders]),
        *container.mounts,
    ]
    options = [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(dict.fromkeys(mounts))}",
        "--container-mount-home" if container.mount_home else "--no-container-mount-home",
        "--container-writable",  # engines write next to their sources; enroot's default is read-only
    ]
    variables = {*environment, "PYTHONPATH"} - {"PATH", "LD_LIBRARY_PATH"}  # these two are the image's
    return [*options, f"--container-env={','.join(sorted(variables))}"]


def _absolute(image: str) -> str:
    return os.path.abspath(os.path.expanduser(image)) if is_file(image) else image


def _caches(environment: Mapping[str, str]) -> list[Path]:
    """Return the Hugging Face cache folder, if it exists."""
    home = environment.get("HF_HOME") or os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return [Path(home)] if Path(home).is_dir() else []


def _same_path_mounts(folders: Iterable[str | Path]) -> list[str]:
    """Mount folders under the same path; a folder inside another needs no mount of its own."""
    paths = list(dict.fromkeys(Path(folder).absolute() for folder in folders))
    for path in paths:
        if any(separator in str(path) for separator in MOUNT_SEPARATORS) or not str(path).isprintable():
            raise ConfigError(
                f"{printable_path(path)} cannot be mounted in a container; use folders without ',' and ':'"
            )
    outer = [path for path in paths if not any(parent in paths for parent in path.parents)]
    return [f"{path}:{path}" for path in outer]
