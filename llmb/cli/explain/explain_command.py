"""`llmb-run explain`: is a figure possible, how far is it from the limit and the prediction, and where does time go?

A verdict is an output, not an error: the exit code is 0 for impossible figures too, and `--json` carries `verdict`.
"""

import argparse
from typing import Any

from llmb.cli.subcommand import command

EXAMPLES = (
    "llmb-run explain L3                       # a job, a run folder or a result.json",
    "llmb-run explain --tokens-per-s 9446 --isl 1000 --osl 100 --concurrency 112 --model llama3.1-8b --dtype fp8 "
    "--gpu-type h200",
    "llmb-run explain --ttft-ms 72 --tpot-ms 11.25 --isl 1000 --osl 100 --concurrency 112 --model llama3.1-8b "
    "--dtype fp8 --gpu-type h200",
    "llmb-run explain --step-time-s 4.19 --model llama3.1-8b --gpu-type h200 --scale 1 --set gbs=6 --set mbs=2 "
    "--set seqlen=8192 --engine native",
    "llmb-run explain --tflops-per-gpu 1200 --model llama3.1-70b --gpu-type h100 --scale 64 --dtype bf16 --set tp=4",
    "",
    "exit code 0 whatever the verdict; --json has it as `verdict`: possible, impossible or unknown",
)


def add_commands(commands: Any) -> None:
    """Register explain."""
    parser = command(commands, "explain", run, "is a figure possible, and where does the time go?", *EXAMPLES)
    add = parser.add_argument
    add("run_name", nargs="?", metavar="RUN", help="a job id, a run folder or a result.json")
    add("--model", metavar="M", help="instead of a run: a name of the catalog, or a Hugging Face config.json")
    add("--gpu-type", "--gpu", metavar="GPU", help="type of GPU")
    add("--dtype", help="bf16, fp8, fp8-mx or nvfp4; default bf16, or the checkpoint's")
    add("--scale", type=int, metavar="N", help="training: number of GPUs (1)")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="layout, batch, lengths; repeatable")
    add("--engine", help="training: native, megatron-bridge (default), ...; serving: vllm (default), sglang, ...")
    add("--step-time-s", type=float, metavar="S", help="training: seconds of a step")
    add("--tflops-per-gpu", type=float, metavar="T", help="training: model TFLOP/s of a GPU")
    add("--tokens-per-s", type=float, metavar="N", help="of all GPUs; serving: output tokens")
    add("--isl", type=int, metavar="N", help="serving: input tokens of a request")
    add("--osl", type=int, metavar="N", help="serving: output tokens of a request")
    add("--concurrency", type=int, metavar="N", help="serving: requests at once")
    add("--ttft-ms", type=float, metavar="MS", help="serving: mean time to first token")
    add("--tpot-ms", type=float, metavar="MS", help="serving: mean time per output token")
    add("--json", action="store_true", help="as JSON: verdict, limits, causes, expected, published, terms")


def run(options: argparse.Namespace) -> int:
    """Explain a stored run, or figures typed by hand."""
    from dataclasses import asdict

    from llmb.config.serialization import to_json
    from llmb.errors import ConfigError
    from llmb.report.predictions.explain_text import explain_text
    from llmb.report.terminal.colour import print_report

    if (options.run_name is None) == (options.model is None):
        raise ConfigError("explain: name a run (a job id, a run folder or a result.json), or figures with --model")
    if options.run_name is not None:
        from llmb.cli.explain.run_figures import explain_run

        explanation = explain_run(options.run_name)
    else:
        from llmb.cli.explain.typed_figures import explain_typed

        explanation = explain_typed(options)
    if options.json:
        limits = [asdict(limit) | {"fraction": limit.fraction} for limit in explanation.limits]
        print(to_json(asdict(explanation) | {"limits": limits}))
    else:
        print_report(explain_text(explanation))
    return 0
