"""Options that select runs, shared by `submit`, `show` and `plan`, and their meaning as tasks."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FITS = (
    "llmb-run show -w pretrain_llama3.1 -s 70b --dtype fp8 --scale 64 --gpu-type gb200 --memory"
    "    # dry run: what does one rank need?"
)
BUSIEST = "busiest"  # of --one-rank without a number
MOST_DIGITS = 20  # of a scale that is read: one of more is refused all the same
REFUSED = "settings may also come from the environment (MAX_BATCH_SIZE, TP, ...); a setting without effect is refused"


def examples(verb: str, extra: str = "") -> list[str]:
    """Return example command lines for the help of a command that selects runs."""
    lines = (
        "-w pretrain_llama3.1 -s 8b --dtype fp8 --scale 16 --gpu-type h100",
        "-w pretrain_llama3.1_70b,pretrain_grok1 --max-scale 512 --gpu-type gb200",
        "-w pretrain_llama3.1 -s 8b --dtype bf16 --scale 1 --gpu-type h200 --set mbs=2 --set steps=20",
        "-w pretrain_llama3.1 -s 405b --dtype fp8 --scale 16 --proxy --layout h100",
        "-w pretrain_nemotronh -s 56b --dtype fp8 --scale 32 --gpu-type h100 --one-rank",
        "-w inference_llama3.1 -s 8b --dtype bf16 --scale 1 --proxy --set speculative_tokens=4 --set draft=layers:1",
        "--model Qwen3-8B/ --task serve",
        "--model config.json --task train --dtype fp8 --seqlen 8192",
    )
    serving = "-w inference_deepseek-r1 -s 671b --dtype nvfp4 --scale 4 --gpu-type gb200"
    chat = f"USE_CASE=chat:128/128 llmb-run {verb} {serving}{extra}"
    return [*(f"llmb-run {verb} {line}{extra}" for line in lines), chat, FITS, "", REFUSED]


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add -w -s --dtype --scale and the other options that select runs."""
    add = parser.add_argument
    workload = add("-w", "--workload", metavar="W[,W...]", help="workload, or targets such as pretrain_llama3.1_70b")
    complete_with(workload, load_recipes)
    add("-s", "--model-size", "--size", dest="size", metavar="SIZE", help="model size, such as 8b")
    add("-d", "--dtype", metavar="D[,D...]", help="fp8, bf16, nvfp4 or fp32; all listed ones when left out")
    add("--scale", metavar="N[,N...]", help="number of GPUs; all listed ones when left out")
    add("--max-scale", type=int, metavar="N", help="listed scales up to N, then powers of two up to N")
    add("--min-scale", action="store_true", help="only the smallest listed scale")
    add("--exact-scales", action="store_true", help="with --max-scale: no powers of two beyond the list")
    gpu = add(
        "--gpu-type",
        metavar="GPU",
        help="GPU the recipe row is for; default: what this machine has; unlisted:NAME for one not in the table",
    )
    complete_with(gpu, _gpu_types)
    proxy_help = "a proxy of the model: small, or true-width (its real layers, as many as fit)"
    add("--proxy", nargs="?", const="small", choices=("small", "true-width"), help=proxy_help)
    layout_help = (
        "with --proxy: the GPU type whose row's layout is scaled down; default: --gpu-type's, or the recipe's choice"
    )
    layout = add("--layout", metavar="GPU", help=layout_help)
    complete_with(layout, _gpu_types)
    one_rank_help = (
        "run one rank of the layout here, on one GPU: its compute is measured, communication and bubble are modelled; "
        "default: a rank of the pipeline stage with the most work"
    )
    add("--one-rank", nargs="?", const=BUSIEST, metavar="RANK", help=one_rank_help)
    engines = "native (the default), one that is installed (trtllm, megatron_bridge), or openai: a server elsewhere"
    add("--engine", metavar="E", help=engines)
    add("--base-url", metavar="URL", help="engine openai: the server, the same as --set base_url=URL")
    add("-p", "--profile", action="store_true", help="trace the recipe's profile window")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a setting; model.FIELD changes the model",
    )
    add("--seqlen", metavar="TOKENS", help="the same as --set seqlen=TOKENS")
    add("--host-gb", metavar="GIB", help="out-of-core: host memory to use")
    add("--device-gb", metavar="GIB", help="device memory to use: out-of-core, or a true-width proxy")
    force_help = (
        "accept a GPU type, dtype or scale the recipe does not list, too little memory, or a resume with other data, "
        "schedule or number formats (one run only)"
    )
    add("--force", action="store_true", help=force_help)


def add_location_options(parser: argparse.ArgumentParser) -> None:
    """Add --on and the sbatch options."""
    add = parser.add_argument
    where = "default: slurm where there is a cluster_config.yaml, else local; inside an allocation the run goes into it"
    add("--on", choices=("local", "slurm", "dry"), help=f"where to run; dry: print the job script. {where}")
    add("--retries", type=int, default=0, metavar="N", help="Slurm: retry after infrastructure failures")
    add("--nice", type=int, metavar="N", help="Slurm: lower priority")
    add("--nodelist", metavar="NODES", help="Slurm: these nodes")
    add("--exclude", metavar="NODES", help="Slurm: any but these nodes")
    add("--reservation", metavar="NAME", help="Slurm: within this reservation")
    add("--segment", type=int, metavar="N", help="Slurm: nodes that must share an NVLink domain")
    more = "Slurm: any other option of sbatch, as key=value or a bare flag, without dashes before it"
    add("--slurm-arg", action="append", default=[], metavar="KEY[=VALUE]", help=more)


def cluster_here() -> Any:
    """Return the cluster configured in this folder or in $LLMB_INSTALL, or None."""
    from llmb.launch.install_root import install_root
    from llmb.launch.slurm.cluster_config import CLUSTER_FILE, find_cluster

    folder, install = Path.cwd(), install_root(os.environ)
    if not (folder / CLUSTER_FILE).exists() and not (install / CLUSTER_FILE).exists():
        return None  # the usual case skips importing YAML
    return find_cluster(folder, install)


def complete_with(argument: argparse.Action, names: Callable[[], Iterable[str]]) -> None:
    """Set the shell completions of an argument, computed only while completing."""
    argument.completer = lambda **_: list(names())  # type: ignore[attr-defined]


def _gpu_types() -> Iterable[str]:
    from llmb.perfmodel.hardware import GPUS

    return GPUS


def load_recipes() -> dict[str, Any]:
    """Load the shipped recipes and the user's own under $LLMB_INSTALL/recipes."""
    from llmb.config.recipe import load_all, shipped
    from llmb.launch.install_root import install_root

    def report(problem: str) -> None:
        print(f"ERROR: {problem}; this recipe is left out", file=sys.stderr)

    return load_all([shipped(), install_root(os.environ) / "recipes"], report)


def run_selection(options: argparse.Namespace) -> Any:
    """Combine command line and environment into a RunSelection; a contradiction is an error."""
    from llmb.config.overrides import Setting, from_arguments, from_environment, parse_value
    from llmb.config.run_list import RunSelection

    settings = from_environment(os.environ)
    settings += [Setting(field="profile", value=True, source="-p")] if options.profile else []
    fills = options.proxy == "true-width"
    device_gb = None if fills else options.device_gb
    shortcuts = (
        ("seqlen", options.seqlen, "--seqlen"),
        ("base_url", _server_url(options.base_url), "--base-url"),
        ("host_gib", options.host_gb, "--host-gb"),
        ("device_gib", device_gb, "--device-gb"),
    )
    settings += [Setting(field=f, value=v, source=flag) for f, v, flag in shortcuts if v is not None]
    settings += [Setting(field="engine", value=options.engine, source="--engine")] if options.engine else []
    settings += from_arguments(options.set)
    if options.force and any(setting.field == "resume" for setting in settings):
        settings.append(Setting(field="force_resume", value=True, source="--force"))
    size = flag_or_variable(options.size, "MODEL_SIZE", "-s")
    dtypes = flag_or_variable(options.dtype, "DTYPE", "--dtype")
    scales = flag_or_variable(options.scale, "JOB_TOTAL_GPUS", "--scale")
    gpu = selected_gpu(options)
    return RunSelection(
        targets=_list(options.workload) or (),
        size=size,
        dtypes=_list(dtypes),
        scales=_numbers(scales),
        max_scale=options.max_scale,
        min_scale=options.min_scale,
        exact_scales=options.exact_scales,
        gpu=gpu,
        gpu_memory_bytes=reported_memory(gpu),
        gpu_here=_requested_gpu(options) is None,
        proxy=options.proxy,
        layout=options.layout.lower() if options.layout else None,
        memory_gib=parse_value(float, options.device_gb, "--device-gb") if fills else None,
        one_rank=_one_rank(options.one_rank),
        force=options.force,
        repeats=getattr(options, "repeats", 1),
        settings=tuple(settings),
    )


def _one_rank(text: str | None) -> Any:
    """Return the rank that runs alone, and the GPU of this machine that it runs on."""
    from llmb.errors import ConfigError

    if text is None:
        return None
    if text != BUSIEST and not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ConfigError(f"--one-rank: expected the number of a rank, from 0, or nothing, got {text[:60]!r}")
    return one_rank_here(None if text == BUSIEST else int(text))


def one_rank_here(rank: int | None) -> Any:
    """Return the request of one rank on this machine's GPU; None: a rank of the stage with the most work."""
    from llmb.config.row_selection import OneRankRequest
    from llmb.config.spec import Machine

    gpu = gpu_here()
    memory = reported_memory(gpu)
    machine = None if gpu is None else Machine(gpu=gpu, gpus=1, gpus_per_node=1, gpu_memory_bytes=memory)
    return OneRankRequest(rank=rank, machine=machine)


def _server_url(url: str | None) -> str | None:
    """Return a base URL in its normal form; a password in it is refused, as it would be stored."""
    from llmb.config.load_settings import check_url, without_credentials
    from llmb.errors import ConfigError

    if url is not None and without_credentials(url) != url:
        raise ConfigError("--base-url: leave user:password@ out of the URL, and set api_key_env=VARIABLE")
    return None if url is None else check_url(url)


def selected_gpu(options: argparse.Namespace) -> str | None:
    """Return --gpu-type, GPU_TYPE, the cluster's GPU type or this machine's GPU, or None."""
    from llmb.perfmodel.hardware import parse_gpu_type

    requested = _requested_gpu(options)
    if requested is not None:
        return known_gpu_type(requested)
    cluster = None if getattr(options, "on", None) == "local" else cluster_here()
    if cluster is not None and cluster.gpu_type is not None:
        return parse_gpu_type(cluster.gpu_type)
    return gpu_here()


def _requested_gpu(options: argparse.Namespace) -> str | None:
    """Return the GPU type that the user names; None: that of the cluster or of this machine."""
    return flag_or_variable(options.gpu_type, "GPU_TYPE", "--gpu-type")


def known_gpu_type(name: str) -> str:
    """Return the key of a GPU type that is in the table, in a recipe or in this machine."""
    from llmb.perfmodel.hardware import is_listed, parse_gpu_type

    return parse_gpu_type(name, () if is_listed(name.strip().lower()) else _unlisted_gpu_types())


def gpu_here() -> str | None:
    """Return the type of this machine's first GPU, listed or not; None on a machine without one."""
    from llmb.launch.local_machine import gpu_memory_bytes, gpu_names
    from llmb.perfmodel.hardware import gpu_key

    names = gpu_names()
    return gpu_key(names[0], gpu_memory_bytes()) if names else None


def _unlisted_gpu_types() -> list[str]:
    """Return GPU types that are known although the table does not list them: this machine's and those of recipes."""
    in_recipes = [key for recipe in load_recipes().values() for key in recipe.values("gpu") if key]
    return [*in_recipes, *filter(None, [gpu_here()])]


def reported_memory(gpu: str | None) -> int | None:
    """Return the memory that the driver reports for this machine's GPU, if the table does not list that GPU."""
    from llmb.launch.local_machine import gpu_memory_bytes
    from llmb.perfmodel.hardware import is_listed

    return None if gpu is None or is_listed(gpu) or gpu != gpu_here() else gpu_memory_bytes()


def flag_or_variable(flag: str | None, variable: str, option: str) -> str | None:
    """Return a flag or its environment variable, which must not disagree."""
    from llmb.errors import ConfigError

    text = os.environ.get(variable) or None
    if flag is not None and text is not None and flag.lower() != text.lower():
        raise ConfigError(f"{option} {flag} and {variable}={text} disagree; give one of them")
    return flag if flag is not None else text


def _list(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str | None) -> tuple[int, ...] | None:
    from llmb.errors import ConfigError

    parts = _list(text)
    if parts is None:
        return None
    if not parts or not all(part.isascii() and part.isdigit() and part.strip("0") for part in parts):
        raise ConfigError(f"--scale: expected GPU counts such as 8 or 8,16, got {str(text)[:60]!r}")
    return tuple(int(part.lstrip("0")[:MOST_DIGITS]) for part in parts)
