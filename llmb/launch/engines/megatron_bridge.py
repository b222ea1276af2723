"""Megatron-Bridge's performance script: one process per GPU, with the recipe's row as its arguments.

    MEGATRON_BRIDGE=/software/Megatron-Bridge llmb-run submit -w pretrain_llama3.1 ... --engine megatron_bridge

MEGATRON_BRIDGE is a checkout, on this machine or inside the container (there: /opt/Megatron-Bridge). Its
setup_experiment.py submits a Slurm job of its own in which every rank runs this script with these arguments; here the
job is ours, so that it is supervised, recorded and repeated like every other. Its log is parsed in results/readers/.

Every cell of the row is passed, so that later changes of its recipes have no effect. Two cannot be: its own recipe
chooses the CUDA graph implementation, and what to recompute where the row recomputes no layer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.launch.engines.launch_spec import LaunchSpec

VARIABLE = "MEGATRON_BRIDGE"
SCRIPTS = Path("scripts", "performance")
ENTRY, OLDER_ENTRY = "bootstrap.py", "run_script.py"  # the first, where it exists, runs the second

# (target, size) -> (model family, recipe) of Megatron-Bridge. It has no Grok-1.
RECIPES = {
    ("pretrain_llama3.1", "405b"): ("llama", "llama31_405b"),
    ("pretrain_llama3.1", "70b"): ("llama", "llama3_70b"),
    ("pretrain_llama3.1", "8b"): ("llama", "llama3_8b"),
    ("pretrain_nemotronh", "56b"): ("nemotronh", "nemotronh_56b"),
}
GPUS = ("h100", "b200", "b300", "gb200", "gb300")
DTYPES = {"bf16": "bf16", "fp8": "fp8_cs", "nvfp4": "nvfp4"}  # fp8_cs: current scaling per tensor


def check(config: RunConfig, environ: Mapping[str, str], in_container: bool = False) -> None:
    """Raise a ConfigError where Megatron-Bridge cannot run this configuration, or its checkout is not found."""
    if (config.target, config.size) not in RECIPES:
        covered = ", ".join(f"{target} {size}" for target, size in RECIPES)
        raise ConfigError(f"--engine megatron_bridge has no recipe for {config.target} {config.size}; it has {covered}")
    if config.machine.gpu not in GPUS or config.precision.dtype not in DTYPES:
        raise ConfigError(
            f"--engine megatron_bridge does not run {config.precision.dtype} on {config.machine.gpu}; "
            f"it runs {', '.join(DTYPES)} on {', '.join(GPUS)}"
        )
    folder = environ.get(VARIABLE)
    if not folder:
        raise ConfigError(f"--engine megatron_bridge needs its checkout: {VARIABLE}=FOLDER, the one with {SCRIPTS}")
    if not Path(folder).is_absolute():  # ranks start in another folder
        raise ConfigError(f"{VARIABLE}={folder}: use the absolute path {Path(folder).absolute()}")
    if not in_container and not (Path(folder) / SCRIPTS / OLDER_ENTRY).is_file():
        raise ConfigError(f"{VARIABLE}={folder} holds no {SCRIPTS / OLDER_ENTRY}; is it a checkout of Megatron-Bridge?")


def launch_spec(config: RunConfig, environ: Mapping[str, str]) -> LaunchSpec:
    """Return the command of one task and its folders; python3 on the PATH is the one with its libraries."""
    folder = _folder(environ)
    folders = (str(folder),) if folder.is_dir() else ()  # else it is inside the container
    return LaunchSpec(command=("python3", *script(config, environ)), folders=folders)


def script(config: RunConfig, environ: Mapping[str, str]) -> list[str]:
    """Return the path of its script and the arguments."""
    scripts = _folder(environ) / SCRIPTS
    return [str(scripts / (ENTRY if (scripts / ENTRY).is_file() else OLDER_ENTRY)), *arguments(config)]


def environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that its own launcher sets; the user's values override them."""
    folder = _folder(environ)
    settings = {
        "PYTHONPATH": f"{folder / SCRIPTS}:{folder / 'src'}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "False",
    }
    if config.machine.gpu == "gb200":
        settings |= {"NCCL_NET_GDR_LEVEL": "PHB", "NCCL_NET_GDR_C2C": "1"}
    return settings


def arguments(config: RunConfig) -> list[str]:
    """Return the row as arguments of its script; a name with a dot is a Hydra override of its configuration."""
    work, parallel = config.workload, config.parallel
    assert isinstance(work, Training)
    family, recipe = RECIPES[config.target, config.size]
    flags: dict[str, Any] = {
        "--model_family_name": family,
        "--model_recipe_name": recipe,
        "--gpu": config.machine.gpu,
        "--num_gpus": config.machine.gpus,
        "--gpus_per_node": min(config.machine.gpus, config.machine.gpus_per_node),
        "--compute_dtype": DTYPES[config.precision.dtype],
        "--tensor_model_parallel_size": parallel.tp,
        "--pipeline_model_parallel_size": parallel.pp,
        "--context_parallel_size": parallel.cp,
        "--virtual_pipeline_model_parallel_size": parallel.vp,
        "--expert_model_parallel_size": parallel.ep,
        "--use_megatron_fsdp": str(parallel.fsdp).lower(),
        "--micro_batch_size": work.mbs,
        "--global_batch_size": work.gbs,
        "--seq_length": work.seqlen,
        "--max_steps": work.steps,
    }
    if work.recompute_layers:  # of a pipeline rank; Megatron counts in each of its virtual stages
        flags["--recompute_num_layers"] = -(-work.recompute_layers // (parallel.vp or 1))
    if work.offload_layers:
        flags["--activation_offload_layers"] = work.offload_layers
    if not work.cuda_graphs:
        flags["--cuda_graph_impl"] = "none"  # with graphs: the implementation that its recipe chooses
    arguments = [str(word) for pair in flags.items() for word in pair]
    return [*arguments, *_profiling(config)]


def _profiling(config: RunConfig) -> list[str]:
    """Return the overrides that set the capture range which nsys waits for."""
    profile = config.profile
    if not profile.profile:
        return []
    ranks = ",".join(map(str, profile.profile_ranks or range(config.machine.gpus)))
    profiler = "pytorch" if profile.profiler == "torch" else "nsys"
    return [
        f"profiling.use_{profiler}_profiler=true",
        f"profiling.profile_step_start={profile.profile_start}",
        f"profiling.profile_step_end={profile.profile_stop}",
        f"profiling.profile_ranks=[{ranks}]",
    ]


def _folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(VARIABLE) or VARIABLE)  # the variable's name where a command is only displayed
