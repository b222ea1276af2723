"""Record of one job, llmb-config_<jobid>.yaml: the request, the version and the cluster. No results, no secrets.

Its sections and keys are those that tools around NVIDIA's recipes already read. Unknown values are null.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from llmb import __version__
from llmb.config.serialization import to_json, to_plain
from llmb.config.spec import RunConfig
from llmb.launch.secrets import mask

CLUSTER_KEYS = ("cluster_name", "slurm_account", "slurm_gpu_partition", "slurm_cpu_partition")
COMPARED_FIELDS = (
    "model",
    "size",
    "machine",
    "parallel",
    "precision",
    "workload",
    "engine",
)  # what makes two runs comparable


def build_job_record(
    config: RunConfig,
    *,
    job_id: str,
    launcher: str,
    launched: datetime,
    install: Path,
    cluster: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the record as plain data."""
    return {
        "job_info": {
            "job_id": job_id,
            "launcher_type": launcher,
            "launch_time": launched.isoformat(timespec="seconds"),
            "experiment_id": experiment_id(config),
        },
        "workload_info": {
            "framework": config.engine,
            "gsw_version": __version__,
            "fw_version": _torch_version() if config.engine == "native" else None,
            "workload_type": config.workload.kind,
            "synthetic_dataset": True if config.engine == "native" else None,
        },
        "model_info": {
            "model_name": config.model.name if config.model is not None else config.size,  # of a server: by name only
            "model_size": config.size,
            "dtype": config.precision.dtype,
            "scale": config.machine.gpus,
            "gpu_type": config.machine.gpu,
        },
        "cluster_info": {
            "gpus_per_node": config.machine.gpus_per_node,
            "llmb_install": str(install),
            **{key: cluster.get(key) for key in CLUSTER_KEYS},
        },
        "job_config": {
            "profile_enabled": config.profile.profile,
            "proxy": config.proxy,
            "one_rank": config.one_rank.rank if config.one_rank else None,
            "strong_scaling": config.environment.get("STRONG_SCALING"),
            "env_overrides": mask(config.environment),
            "model_overrides": to_plain({change.field: _list_if_tuple(change.value) for change in config.overrides}),
        },
    }


def job_record_yaml(data: Mapping[str, Any]) -> str:
    """Return the record as YAML: by libyaml where installed, as hundreds may be written at once."""
    try:
        return str(yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False))
    except UnicodeEncodeError:  # libyaml cannot write a folder name that is not UTF-8
        return str(yaml.safe_dump(data, sort_keys=False))


def experiment_id(config: RunConfig) -> str:
    """Return a hash that is equal for two runs that measure the same thing with the same version."""
    compared = {field: value for field, value in to_plain(config).items() if field in COMPARED_FIELDS}
    if config.one_rank is not None:
        compared["one_rank"] = to_plain(config.one_rank)
    compared["workload"].pop("prediction", None)  # does not change what is measured
    return sha256(f"{__version__} {_torch_version()} {to_json(compared)}".encode()).hexdigest()


def _list_if_tuple(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # YAML has no tuples


@cache
def _torch_version() -> str | None:
    try:
        return version("torch")  # from its metadata; importing it would take seconds
    except PackageNotFoundError:
        return None
