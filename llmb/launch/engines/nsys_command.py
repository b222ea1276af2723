"""Nsight Systems around the ranks of a run: `nsys profile`, for a window of steps that the engine opens and closes.

    llmb-run submit ... -p                          where nsys is on the PATH; torch's own profiler where it is not
    llmb-run submit ... -p --set profiler=nsight    inside a container, which cannot be looked into from here
    PROFILE_RANKS=0,8 ENABLE_GPU_METRICS=true       fewer ranks, more to see

The reports lie in nsys_profile/ under the names that each recipe's document prints. The engine calls
cudaProfilerStart and cudaProfilerStop around the window; nothing is recorded before, between or after.
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
    "--capture-range-end=stop",  # the run goes on after the window
    "--force-overwrite=true",
)
# A rank's place, by Slurm's variables or torchrun's; alone, a rank has neither.
PLACE = {
    "node": "${SLURM_NODEID:-${GROUP_RANK:-0}}",
    "rank": "${SLURM_PROCID:-${RANK:-0}}",
    "local": "${SLURM_LOCALID:-${LOCAL_RANK:-0}}",
}


def used(config: RunConfig) -> bool:
    """Whether ranks are started under nsys. Only the native engine has a profiler that needs nothing installed.

    Out-of-core runs draw their own pictures, so they are watched by nsys only where that is asked for.
    """
    asked = config.profile
    if not asked.profile or asked.profiler == "torch" or config.machine.gpu == "cpu":
        return False
    if isinstance(config.workload, OutOfCore):
        return asked.profiler == "nsight"
    return asked.profiler == "nsight" or config.engine != "native" or which(PROGRAM) is not None


def check(config: RunConfig) -> None:
    """A ConfigError where a run that is started here wants what is not here."""
    asked = config.profile
    if not asked.profile:
        return
    if config.machine.gpu == "cpu" and asked.profiler == "nsight":
        raise ConfigError("profiler=nsight records a GPU, this run has none; use profiler=torch")
    if used(config) and which(PROGRAM) is None:
        raise ConfigError(f"this profile needs {PROGRAM} (Nsight Systems) on the PATH; or use --set profiler=torch")
    if asked.gpu_metrics and not used(config):
        raise ConfigError(f"GPU metrics need {PROGRAM} (Nsight Systems) on the PATH; leave out ENABLE_GPU_METRICS")


def wrapped(command: Sequence[str], config: RunConfig, job_id: str | None) -> list[str]:
    """The command of a rank under nsys; `job_id`: of a run that is no Slurm job."""
    return ["bash", "-c", script(config, job_id or "local"), FOLDER, *command]


def script(config: RunConfig, job_id: str) -> str:
    """Decides in each rank, which alone knows its place."""
    lines = [f"{name}={value}" for name, value in PLACE.items()]
    lines += [f"job=${{SLURM_JOB_ID:-{shlex.quote(job_id)}}}", "flags=()"]
    if config.profile.profile_ranks:
        ranks = ",".join(map(str, config.profile.profile_ranks))
        lines.append(f'[[ ,{ranks}, == *,"$rank",* ]] || exec "$@"')
    if config.profile.gpu_metrics:  # one rank reads them for all GPUs of its node: a second would be refused
        lines.append("[[ $local != 0 ]] || flags+=(--gpu-metrics-devices=all)")
    start = f'exec {PROGRAM} profile {shlex.join(FLAGS)} "${{flags[@]}}"'
    return "\n".join([*lines, f"mkdir -p {FOLDER}", f'{start} --output="{FOLDER}/{report_name(config)}" "$@"']) + "\n"


def report_name(config: RunConfig) -> str:
    """What a rank's report is called, in the shell's words, without its ending .nsys-rep."""
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
