"""Nsight Systems for the ranks of a run: `nsys profile`, with a capture range of steps that the engine delimits.

    llmb-run submit ... -p                          where nsys is on the PATH; torch's profiler where it is not
    llmb-run submit ... -p --set profiler=nsight    inside a container, whose PATH is not known here
    PROFILE_RANKS=0,8 ENABLE_GPU_METRICS=true       fewer ranks, GPU metrics

The reports are in nsys_profile/ under the names that each recipe's README lists. The engine calls cudaProfilerStart and
cudaProfilerStop around the steps; nothing is recorded before or after.
"""

import shlex
from collections.abc import Sequence
from shutil import which

from llmb.config.spec import Inference, OutOfCore, RunConfig
from llmb.errors import ConfigError

PROGRAM = "nsys"
FOLDER = "nsys_profile"
FLAGS = (
    "--sample=none",
    "--cpuctxsw=none",
    "--trace=cuda,nvtx",
    "--cuda-graph-trace=node",
    "--cuda-event-trace=false",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",  # the run continues after the range
    "--force-overwrite=true",
)
# Indices of a rank, from Slurm's variables or torchrun's; a single process has neither.
RANK_VARIABLES = {
    "node": "${SLURM_NODEID:-${GROUP_RANK:-0}}",
    "rank": "${SLURM_PROCID:-${RANK:-0}}",
    "local": "${SLURM_LOCALID:-${LOCAL_RANK:-0}}",
}


def is_used(config: RunConfig) -> bool:
    """Return whether ranks are started under nsys. Only the native engine has a profiler that needs nothing installed.

    Out-of-core runs record their own timelines, so nsys is used only on request.
    """
    profile = config.profile
    if not profile.profile or profile.profiler == "torch" or config.launch_machine.gpu == "cpu":
        return False
    if isinstance(config.workload, OutOfCore):
        return profile.profiler == "nsight"
    return profile.profiler == "nsight" or config.engine != "native" or which(PROGRAM) is not None


def check(config: RunConfig) -> None:
    """Raise a ConfigError where a run on this machine needs a profiler that is not installed."""
    profile = config.profile
    if not profile.profile:
        return
    if config.launch_machine.gpu == "cpu" and profile.profiler == "nsight":
        raise ConfigError("profiler=nsight records a GPU, this run has none; use profiler=torch")
    if is_used(config) and which(PROGRAM) is None:
        raise ConfigError(f"this profile needs {PROGRAM} (Nsight Systems) on the PATH; or use --set profiler=torch")
    if profile.gpu_metrics and not is_used(config):
        raise ConfigError(f"GPU metrics need {PROGRAM} (Nsight Systems) on the PATH; leave out ENABLE_GPU_METRICS")


def wrap(command: Sequence[str], config: RunConfig, job_id: str | None) -> list[str]:
    """Return the command of a rank under nsys; `job_id`: of a run that is not a Slurm job."""
    return ["bash", "-c", script(config, job_id or "local"), FOLDER, *command]


def script(config: RunConfig, job_id: str) -> str:
    """Return the shell script of each rank, which starts nsys on the profiled ranks only."""
    lines = [f"{name}={value}" for name, value in RANK_VARIABLES.items()]
    lines += [f"job=${{SLURM_JOB_ID:-{shlex.quote(job_id)}}}", "flags=()"]
    if config.profile.profile_ranks:
        ranks = ",".join(map(str, config.profile.profile_ranks))
        lines.append(f'[[ ,{ranks}, == *,"$rank",* ]] || exec "$@"')
    if config.profile.gpu_metrics:  # one rank per node samples all its GPUs: a second would be refused
        lines.append("[[ $local != 0 ]] || flags+=(--gpu-metrics-devices=all)")
    start = f'exec {PROGRAM} profile {shlex.join(FLAGS)} "${{flags[@]}}"'
    return "\n".join([*lines, f"mkdir -p {FOLDER}", f'{start} --output="{FOLDER}/{report_name(config)}" "$@"']) + "\n"


def report_name(config: RunConfig) -> str:
    """Return the name of a rank's report with shell variables, without .nsys-rep."""
    if isinstance(config.workload, Inference):
        return "profile_${job}_${rank}_${local}"
    work = config.workload
    if isinstance(work, OutOfCore):
        budgets = f"host_{work.host_gib:g}_dev_{work.device_gib:g}"
        return f"{budgets}_seq_{work.seqlen}_model_{config.size.removesuffix('b')}"
    if config.target == "pretrain_nemotronh":
        return "profile_${job}_${node}_${rank}"
    if config.target == "pretrain_grok1":
        return f"grok1-{config.size}-{config.precision.dtype}_{config.machine.gpus}g_${{job}}_${{node}}_${{local}}"
    return "profile_${job}_${node}_${local}"
