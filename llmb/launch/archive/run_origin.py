"""Where a run comes from: origin.json, in run folders that were imported from another cluster."""

import re
from dataclasses import dataclass, replace
from hashlib import sha256

from llmb.config.serialization import build, read_json, to_json, write_whole
from llmb.events import RunStarted, read
from llmb.launch.run_folder import RunDir

UNKNOWN_CLUSTER = "elsewhere"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What an imported run is called here, and which one it is."""

    cluster: str
    job_id: str  # in this job store: <job>@<cluster>
    identity: str  # the same wherever this run lies
    archive: str  # SHA-256 of the file it came in


def origin_of(run: RunDir) -> Origin | None:
    """Where a run was imported from; none: it was run here."""
    return build(Origin, read_json(run.origin), "origin.json") if run.origin.exists() else None


def keep_origin(run: RunDir, origin: Origin) -> None:
    """Mark a run folder as imported."""
    write_whole(run.origin, to_json(origin) + "\n")


def identity_of(run: RunDir) -> str:
    """Tells a run from any other of the same name and time: by the first event of its first start, or its settings."""
    origin = origin_of(run)
    if origin is not None:
        return origin.identity
    first = _first_line(run)
    return sha256(run.name.encode() + b"\n" + (first or run.config.read_bytes())).hexdigest()


def cluster_of(run: RunDir) -> str | None:
    """The cluster a run was run on: by its origin, its record, or the host that its first rank saw; none: unknown."""
    origin = origin_of(run)
    if origin is not None:
        return origin.cluster
    name = _recorded_cluster(run) or _first_host(run)
    return fit_for_id(name) if name else None


def fit_for_id(cluster: str) -> str | None:
    """A cluster's name as part of a job id: only letters, digits, '.', '_' and '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", cluster).strip("-.")[:60] or None


def _first_line(run: RunDir) -> bytes:
    try:
        with replace(run, restart=0).events(0).open("rb") as events:
            return events.readline()
    except FileNotFoundError:
        return b""


def _first_host(run: RunDir) -> str | None:
    return next((event.host for event in read(run.events(0)) if isinstance(event, RunStarted)), None)


def _recorded_cluster(run: RunDir) -> str | None:
    import yaml  # slow, and only archives ask

    for path in run.path.glob("llmb-config_*.yaml"):
        try:
            record = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
        except yaml.YAMLError:  # edited by hand; the run itself is none the worse
            continue
        info = record.get("cluster_info") if isinstance(record, dict) else None
        name = info.get("cluster_name") if isinstance(info, dict) else None
        if isinstance(name, str) and name:
            return name
    return None
