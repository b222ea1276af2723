"""Origin of a run: origin.json, in run folders that were imported from another cluster."""

import re
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from llmb.config.serialization import build, read_json, to_json, write_atomic
from llmb.errors import ConfigError
from llmb.events import MAX_LINE_BYTES, RunStarted, read
from llmb.formats.dense_reader import open_dense
from llmb.formats.yaml_file import load_yaml
from llmb.launch.run_folder import RunFolder

UNKNOWN_CLUSTER = "elsewhere"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Identity and origin of an imported run."""

    cluster: str
    job_id: str  # in this job store: <job>@<cluster>
    identity: str  # independent of where the run is stored
    archive: str  # SHA-256 of the archive


def read_origin(run: RunFolder) -> Origin | None:
    """Read where a run was imported from; None: it was run here."""
    return build(Origin, read_json(run.origin), "origin.json") if run.origin.exists() else None


def write_origin(run: RunFolder, origin: Origin) -> None:
    """Mark a run folder as imported."""
    write_atomic(run.origin, to_json(origin) + "\n")


def run_identity(run: RunFolder) -> str:
    """Return a hash that tells a run from others of the same name and time: of its first event, or its settings."""
    origin = read_origin(run)
    if origin is not None:
        return origin.identity
    first_line = _first_line(replace(run, restart=0).events(0))
    if not first_line:
        with open_dense(run.config) as config:
            first_line = config.read(MAX_LINE_BYTES)
    return sha256(run.name.encode() + b"\n" + first_line).hexdigest()


def run_cluster(run: RunFolder) -> str | None:
    """Return the cluster of a run: by its origin, its record, or the host of rank 0; None: unknown."""
    origin = read_origin(run)
    if origin is not None:
        return origin.cluster
    name = _recorded_cluster(run) or _first_host(run)
    return sanitize_cluster_name(name) if name else None


def sanitize_cluster_name(cluster: str) -> str | None:
    """Make a cluster's name fit for a job id: only letters, digits, '.', '_' and '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", cluster).strip("-.")[:60] or None


def _first_line(path: Path) -> bytes:
    try:
        with open_dense(path) as events:
            return events.readline(MAX_LINE_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _first_host(run: RunFolder) -> str | None:
    return next((event.host for event in read(run.events(0)) if isinstance(event, RunStarted)), None)


def _recorded_cluster(run: RunFolder) -> str | None:
    for path in run.path.glob("llmb-config_*.yaml"):
        try:
            record = load_yaml(path, "a run's record")
        except ConfigError:  # edited by hand; the run itself is valid
            continue
        info = record.get("cluster_info") if isinstance(record, dict) else None
        name = info.get("cluster_name") if isinstance(info, dict) else None
        if isinstance(name, str) and name:
            return name
    return None
