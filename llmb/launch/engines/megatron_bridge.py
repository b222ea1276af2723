"""Megatron-Bridge's own performance script: one process a GPU, with the recipe's row as its arguments.

    MEGATRON_BRIDGE=/software/Megatron-Bridge llmb-run submit -w pretrain_llama3.1 ... --engine megatron_bridge

MEGATRON_BRIDGE is a checkout, on this machine or inside the container (there: /opt/Megatron-Bridge). Its
setup_experiment.py makes a Slurm job of its own in which every rank runs this script with these arguments; here the job
is ours, so that it is watched, recorded and repeated as every other. Its log is read by results/megatron_bridge.py.

Every cell of the row is given, so that what runs is what the row says, not what its recipes have become since. Two
cannot be: its own recipe chooses the kind of CUDA graphs, and what to recompute where the row recomputes no layer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.launch.engines.launch_spec import EngineOrder

VARIABLE = "MEGATRON_BRIDGE"
SCRIPTS = Path("scripts", "performance")
ENTRY, OLDER_ENTRY = "bootstrap.py", "run_script.py"  # the first, where there is one, ends in the second

# target, size -> the family and the recipe by its own names. It has no Grok-1.
RECIPES = {
    ("pretrain_llama3.1", "405b"): ("llama", "llama31_405b"),
    ("pretrain_llama3.1", "70b"): ("llama", "llama3_70b"),
    ("pretrain_llama3.1", "8b"): ("llama", "llama3_8b"),
    ("pretrain_nemotronh", "56b"): ("nemotronh", "nemotronh_56b"),
}
GPUS = ("h100", "b200", "b300", "gb200", "gb300")
DTYPES = {"bf16": "bf16", "fp8": "fp8_cs", "nvfp4": "nvfp4"}  # fp8: one scale a tensor, from the tensor itself


def check(config: RunConfig, environ: Mapping[str, str], in_container: bool = False) -> None:
    """A ConfigError where Megatron-Bridge cannot run this, or is not where it is said to be."""
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
    if not Path(folder).is_absolute():  # ranks are started elsewhere
        raise ConfigError(f"{VARIABLE}={folder}: give the whole path, {Path(folder).absolute()}")
    if not in_container and not (Path(folder) / SCRIPTS / OLDER_ENTRY).is_file():
        raise ConfigError(f"{VARIABLE}={folder} holds no {SCRIPTS / OLDER_ENTRY}; is it a checkout of Megatron-Bridge?")


def order(config: RunConfig, environ: Mapping[str, str]) -> EngineOrder:
    """What one task runs, and what it needs around it; by the Python on its PATH, which has its libraries."""
    folder = _folder(environ)
    shown = (str(folder),) if folder.is_dir() else ()  # else it is inside the container
    return EngineOrder(command=("python3", *script(config, environ)), folders=shown)


def script(config: RunConfig, environ: Mapping[str, str]) -> list[str]:
    """Its script and the arguments."""
    scripts = _folder(environ) / SCRIPTS
    return [str(scripts / (ENTRY if (scripts / ENTRY).is_file() else OLDER_ENTRY)), *arguments(config)]


def environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """What its own launcher sets; the user's values count more."""
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
    """The row in its script's words; a name with a dot is a field of its own configuration."""
    work, split = config.workload, config.parallel
    assert isinstance(work, Training)
    family, recipe = RECIPES[config.target, config.size]
    flags: dict[str, Any] = {
        "--model_family_name": family,
        "--model_recipe_name": recipe,
        "--gpu": config.machine.gpu,
        "--num_gpus": config.machine.gpus,
        "--gpus_per_node": min(config.machine.gpus, config.machine.gpus_per_node),
        "--compute_dtype": DTYPES[config.precision.dtype],
        "--tensor_model_parallel_size": split.tp,
        "--pipeline_model_parallel_size": split.pp,
        "--context_parallel_size": split.cp,
        "--virtual_pipeline_model_parallel_size": split.vp,
        "--expert_model_parallel_size": split.ep,
        "--use_megatron_fsdp": str(split.fsdp).lower(),
        "--micro_batch_size": work.mbs,
        "--global_batch_size": work.gbs,
        "--seq_length": work.seqlen,
        "--max_steps": work.steps,
    }
    if work.recompute_layers:
        flags["--recompute_num_layers"] = work.recompute_layers
    if work.offload_layers:
        flags["--activation_offload_layers"] = work.offload_layers
    if not work.cuda_graphs:
        flags["--cuda_graph_impl"] = "none"  # with graphs: the kind that its recipe chooses
    words = [str(word) for pair in flags.items() for word in pair]
    return [*words, *_profiling(config)]


def _profiling(config: RunConfig) -> list[str]:
    """When it opens and closes the window that nsight.py waits for."""
    asked = config.profile
    if not asked.profile:
        return []
    ranks = ",".join(map(str, asked.profile_ranks or range(config.machine.gpus)))
    profiler = "pytorch" if asked.profiler == "torch" else "nsys"
    return [
        f"profiling.use_{profiler}_profiler=true",
        f"profiling.profile_step_start={asked.profile_start}",
        f"profiling.profile_step_end={asked.profile_stop}",
        f"profiling.profile_ranks=[{ranks}]",
    ]


def _folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(VARIABLE) or VARIABLE)  # its name stands in where a command is only shown
