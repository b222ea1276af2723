"""`llmb-run tune`: the layout with the least predicted time that fits, or the serving settings within an SLO."""

import argparse
from typing import Any

from llmb.cli.predictions.engine_option import ENGINE_HELP
from llmb.cli.run_options import complete_with, load_recipes
from llmb.cli.subcommand import command

EXAMPLES = (
    "llmb-run tune -w pretrain_llama3.1 -s 405b --dtype fp8 --scale 1024 --gpu-type h100",
    "llmb-run tune -w pretrain_grok1 -s 314b --dtype fp8 --scale 512 --gpu-type h100 --set tp=4 --set fsdp=false",
    "llmb-run tune --model qwen3-32b --gpu-type b200 --scale 64 --set gbs=512 --set seqlen=8192 --top 10",
    "llmb-run tune --model config.json --gpu-type gb200 --scale 64 --json",
    "llmb-run tune -w pretrain_llama3.1 -s 8b --dtype bf16 --scale 1 --gpu-type h200 --measure 3    # runs the best",
    "llmb-run tune -w pretrain_llama3.1 -s 70b --dtype fp8 --scale 64 --gpu-type h100 --measure 2   # proxies here",
    "llmb-run tune --task serve --model llama3.1-70b --engine vllm --gpu-type h200 --dtype fp8 --scale 8 --isl 1024 "
    "--osl 1024 --slo ttft=500ms,tpot=50ms",
    "llmb-run tune --task serve -w inference_llama3.1 -s 8b --dtype fp8 --gpu-type h200 --measure 3",
)
TASKS = ("train", "serve")


def add_commands(commands: Any) -> None:
    """Register tune."""
    summary = "the fastest predicted layout that fits in memory, and why it wins; --measure runs the best"
    parser = command(commands, "tune", run, summary, *EXAMPLES)
    add = parser.add_argument
    complete_with(add("-w", "--workload", metavar="W", help="a workload with recipe rows"), load_recipes)
    add("-s", "--size", metavar="SIZE", help="its model size")
    add("--model", metavar="M", help="instead: a name of the catalog, or a Hugging Face config.json")
    add("--task", default="train", help="train (default) or serve")
    add("--dtype", help="bf16, fp8, fp8-mx or nvfp4; default bf16, or the recipe's")
    add("--scale", metavar="N", help="number of GPUs")
    add("--gpu-type", metavar="GPU", help="type of GPU")
    fixed = "fix a searched dimension (tp pp vp cp ep etp fsdp mbs recompute_layers offload_layers), or set gbs, seqlen"
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help=f"{fixed}, engine, ...; repeatable")
    add("--slo", metavar="LIMITS", help="serve: limits of the predicted means, such as ttft=500ms,tpot=50ms,e2e=10s")
    add("--engine", help=ENGINE_HELP)
    add("--isl", type=int, metavar="N", help="serve: input tokens of a request")
    add("--osl", type=int, metavar="N", help="serve: output tokens of a request")
    add("--top", type=int, default=3, metavar="N", help="list the N fastest besides the Pareto set; default 3")
    add("--measure", type=int, metavar="N", help="run the best N and the recipe's row here: in full, or as proxies")
    add("--ranks", type=int, metavar="R", help="with --measure: ranks of a proxy; default: the GPUs here, or 2")
    add("--json", action="store_true", help="as JSON: best, pareto, fastest, recipe, why, measured")


def run(options: argparse.Namespace) -> int:
    """Search, print, and measure if requested."""
    from llmb.errors import ConfigError, UnknownName

    if options.task not in TASKS:
        raise UnknownName("value of --task", options.task, TASKS)
    if (options.workload is None) == (options.model is None):
        raise ConfigError("tune: name the run with one of -w WORKLOAD or --model NAME|config.json")
    for option, value in (("--top", options.top), ("--measure", options.measure), ("--ranks", options.ranks)):
        if value is not None and value < (0 if option == "--top" else 1):
            raise ConfigError(f"{option} {value}: expected a whole number, 1 or more")
    if options.measure is not None and options.workload is None:
        raise ConfigError("--measure runs recipes: name one with -w instead of --model")
    if options.measure is not None and options.engine not in (None, "native"):
        raise ConfigError(f"--measure runs the native engine, not {options.engine}; leave out one of them")
    if options.ranks is not None and options.measure is None:
        raise ConfigError("--ranks has no effect without --measure")
    if options.task == "serve":
        from llmb.cli.tune.serving_tune import tune_serving

        return tune_serving(options)
    from llmb.cli.tune.training_tune import tune_training

    if unused := [name for name in ("slo", "isl", "osl") if getattr(options, name) is not None]:
        raise ConfigError(f"--{unused[0]} is for --task serve")
    return tune_training(options)
