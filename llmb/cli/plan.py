"""`llmb-run plan`: the plan and predicted speed of an out-of-core run."""

import argparse
import os
import sys
from typing import Any

from llmb.cli.model_run.model_options import add_model_options, recipes_for
from llmb.cli.run_options import add_run_options
from llmb.cli.subcommand import command

TASK = "offload"  # of --model
EXAMPLES = (
    "llmb-run plan -w outofcore_llama3 -s 8b --seqlen 65536 --host-gb 178 --device-gb 78",
    "llmb-run plan -w outofcore_llama3 -s 8b --seqlen 8192 --host-gb 60 --device-gb 24 --gpu-type h200 --set gbs=16",
    "llmb-run plan -w outofcore_llama3 -s 3b --gpu-type h200 --set update=master --json",
    "llmb-run plan --model Qwen3-8B/ --gpu-type h200 --host-gb 178 --device-gb 78",
    "llmb-run plan -w outofcore_llama3 -s 8b --seqlen 8192 --host-gb 20 --device-gb 24 --gpu-type h200 "
    "--set disk_gib=64 --set disk_gbs=7    # what the host does not hold on a disk of 7 GB/s",
    "llmb-run plan -w outofcore_llama3 -s 70b --gpu-type h200 --host-gb 110 --device-gb 125 --set lora_rank=16 "
    "--set frozen_weights=fp8    # LoRA on frozen weights in fp8",
    "",
    "any choice of the plan can be fixed: --set chunk_tokens=16384 --set resident_grads=32 --set full_saves=40 ...",
    "rates are those of the GPU's kind until `llmb-run probe` has measured this machine",
)


def add_commands(commands: Any) -> None:
    """Register plan."""
    summary = "the plan of an out-of-core run: chunks, rounds, memory, and the time predicted"
    parser = command(commands, "plan", run, summary, *EXAMPLES)
    add_run_options(parser)
    add_model_options(parser, TASK)
    parser.add_argument("--json", action="store_true", help="as JSON, one object a plan")


def run(options: argparse.Namespace) -> int:
    """Print the plan of each selected run."""
    from llmb.cli import run_options
    from llmb.cli.memory_check import misfits, warn
    from llmb.config.resolve import resolve_all
    from llmb.config.run_list import split_target, tasks_for
    from llmb.config.serialization import to_json
    from llmb.errors import ConfigError
    from llmb.launch.install_root import install_root
    from llmb.report.plan_figures import as_data, plan_figures
    from llmb.report.plan_text import describe_plan
    from llmb.report.terminal.colour import print_report

    if options.model is not None:
        options.task = options.task or TASK
    recipes = recipes_for(options)
    planned = ", ".join(key for key, recipe in recipes.items() if recipe.kind == "outofcore")
    run_selection = run_options.run_selection(options)
    if not run_selection.targets:
        raise ConfigError(
            f"plan: name the run with -w, or the model with --model; plans are made for out-of-core runs: {planned}"
        )
    for target in run_selection.targets:
        if split_target(target, recipes)[0].kind != "outofcore":
            raise ConfigError(f"plans are made for out-of-core runs ({planned}), not for {target}; see llmb-run show")
    tasks = tasks_for(run_selection, recipes)
    if sys.stderr.isatty():
        print(
            f"searching the fastest of all plans that fit, often 10 s: {len(tasks)} to find",
            file=sys.stderr,
            flush=True,
        )
    resolved, bad = resolve_all(tasks, recipes, install_root(os.environ))
    for line in bad:
        print(f"ERROR: skipped: {line}", file=sys.stderr)
    for _, config in resolved:
        figures = plan_figures(config)
        if options.json:
            print(to_json(as_data(figures)))
        else:
            print_report(describe_plan(figures) + "\n")
        warn(misfits(config, recipes, local=True))
    return 1 if bad else 0
