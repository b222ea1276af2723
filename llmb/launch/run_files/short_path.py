"""Short paths of run folders: runs/L12-llama3.1-8b-bf16, a link to the long one.

It is a link, because the id of a Slurm job is only known once its folder exists.
"""

import os
import re
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from llmb.config.serialization import read_json, temporary_path
from llmb.errors import ConfigError

MAX_SHORT_NAME = 80  # characters


def short_paths(install: Path) -> Path:
    """Return the folder of short paths, one for each run that has a job id."""
    return install / "runs"


def link_short_path(install: Path, job_id: str, run_folder: Path, config: Path) -> Path:
    """Link the short path of a job id to a run folder and return it; `config`: the folder's configuration.

    A disk without links has none, which fails no run.
    """
    try:
        name = _short_name(job_id, read_json(config))
    except (ConfigError, KeyError, TypeError, AttributeError):  # a damaged configuration names nothing
        name = f"{job_id}-damaged"
    short = short_paths(install) / name
    target = os.path.relpath(run_folder, short.parent)
    if _link_target(short) == target:
        return short
    temporary = temporary_path(short)
    try:
        short.parent.mkdir(exist_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, short)  # the id may be that of a run whose row is lost
    except OSError:
        with suppress(OSError):
            temporary.unlink()
    return short


def find_short_path(install: Path, job_id: str, run_folder: Path) -> Path | None:
    """Return the short path of a run folder, if it has one."""
    short = short_paths(install)
    target = os.path.relpath(run_folder, short)
    links = short.glob(f"{escape(job_id)}[-@]*")  # 17-2 where Slurm reused the id 17, L1@eos of an imported run
    return next((link for link in links if _link_target(link) == target), None)


def _link_target(path: Path) -> str | None:
    """Return where a symbolic link points; None: it is none."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def _short_name(job_id: str, config: dict[str, Any]) -> str:
    """Return the name of a short path: L12-llama3.1-8b-bf16, 4711-grok1-314b-fp8-gpus512, L3-llama3.1-8b-fp32-proxy."""
    gpus = config["machine"]["gpus"] or 1
    words = [job_id, config["target"].removeprefix("pretrain_"), config["size"], config["precision"]["dtype"]]
    words += [f"gpus{gpus}"] if gpus > 1 else []
    words += ["one-rank"] if config.get("one_rank") else []
    words += ["proxy"] if config["proxy"] else []
    words += ["faults"] if config.get("fault_injection") else []
    name = "-".join(filter(None, words))
    return re.sub(r"[^A-Za-z0-9.@-]+", "-", name)[:MAX_SHORT_NAME]
