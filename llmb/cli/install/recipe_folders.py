"""Folders and scripts at the paths that NVIDIA's recipe documents name, so that their command lines work as printed.

$LLMB_INSTALL/images  venvs  datasets
$LLMB_INSTALL/llmb_repo/                    what the documents call $LLMB_REPO
  common/parse_train_timing.sh  common/parse_train_timing_mbridge.sh
  llama3.1/launch.sh  llama3.1/setup.sh  grok1/...  nemotronh/...  deepseek_r1/inference/trtllm/...
  bench/do_transformer_profile.sh           of the out-of-core profile page
$LLMB_INSTALL/workloads/pretraining_grok1   link to pretrain_grok1: the documents use both names

Each script calls this installation of llmb, whatever the PATH is. Files of another origin stay as they are.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from llmb.config.recipe import shipped
from llmb.config.serialization import write_atomic
from llmb.launch.run_folder import make_folder, workload_path, write_error

FOLDERS = ("images", "venvs", "datasets")
RECIPES = {  # folder under $LLMB_REPO: workload
    "llama3.1": "pretrain_llama3.1",
    "nemotronh": "pretrain_nemotronh",
    "grok1": "pretrain_grok1",
    "deepseek_r1/inference/trtllm": "inference_deepseek-r1",
}
TIMING = {"parse_train_timing.sh": "nemo", "parse_train_timing_mbridge.sh": "megatron_bridge"}
PROFILE_SCRIPT = "do_transformer_profile.sh"
# The DeepSeek-R1 document prints `sbatch ... GPU_TYPE=gb200 ./launch.sh`. To sbatch the first word is the script.
SBATCH_NODES = {"gb200": 1, "b200": 1, "h100": 2}
OTHER_NAMES = {"pretraining_grok1": "pretrain_grok1", "pretraining_nemotronh": "pretrain_nemotronh"}
MARK = "# Written by llmb-install for the command lines of NVIDIA's recipe documents."


def repo_path(install: Path) -> Path:
    """Return the folder that the documents call $LLMB_REPO."""
    return install / "llmb_repo"


def create_recipe_folders(install: Path) -> list[str]:
    """Create the folders and scripts; return notes on what was left alone."""
    for name in FOLDERS:
        make_folder(install / name)
    for alias, workload in OTHER_NAMES.items():
        make_folder(workload_path(install, workload))
        _link(workload_path(install, alias), workload)
    repo = repo_path(install)
    if (repo / ".git").exists():
        return [f"{repo} is a clone of another repository and stays as it is"]
    return [f"{path} is not ours and stays as it is" for path, body in _scripts(repo) if not _write(path, body)]


def _link(path: Path, target: str) -> None:
    """Create a link, unless the path is taken."""
    try:
        if not os.path.lexists(path):
            path.symlink_to(target)
    except OSError as error:
        raise write_error(path, error) from error


def _scripts(repo: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path and the body of each script."""
    programs = Path(sys.executable).parent
    for name, style in TIMING.items():
        command = f"{quote(sys.executable)} -m llmb.cli.llmb_run timing --style {style}"
        yield repo / "common" / name, f'exec {command} "$@"'
    scripts = [(folder, workload, name) for folder, workload in RECIPES.items() for name in ("launch.sh", "setup.sh")]
    for folder, workload, name in (*scripts, ("bench", "outofcore_llama3", PROFILE_SCRIPT)):
        target = quote(str(shipped() / workload / name))
        yield repo / folder / name, f'PATH={quote(str(programs))}:$PATH exec {target} "$@"'
    for gpu, nodes in SBATCH_NODES.items():
        body = f'#SBATCH --nodes={nodes}\nGPU_TYPE={gpu} exec "$@"'
        yield repo / "deepseek_r1/inference/trtllm" / f"GPU_TYPE={gpu}", body


def _write(path: Path, body: str) -> bool:
    """Write a script, or return False if there is one of another origin."""
    if path.exists() and MARK not in path.read_text(errors="replace"):
        return False
    make_folder(path.parent)
    write_atomic(path, f"#!/usr/bin/env bash\n{MARK}\n{body}\n")
    path.chmod(0o755)
    return True
