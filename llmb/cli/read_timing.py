"""`llmb-run read` and `timing`: figures of finished runs, ours or of other engines."""

import argparse
from pathlib import Path
from typing import Any

from llmb.cli.subcommand import command


def add_commands(commands: Any) -> None:
    """Register read and timing."""
    read = command(
        commands, "read", run_read, "figures from another engine's log",
        "llmb-run read log-pretrain.out", "llmb-run read nccl.log --reader nccl --json",
    )  # fmt: skip
    read.add_argument("log", type=Path, help="a log of NeMo, Megatron-Bridge, torchtitan, trtllm-bench, vLLM or NCCL")
    read.add_argument("--reader", help="its format; default: recognised from the content")
    read.add_argument("--window", metavar="FIRST-LAST", help="iterations that count; default: the recipe's")
    read.add_argument("--json", action="store_true", help="the Result as JSON")

    timing = command(
        commands, "timing", run_timing, "the step-time table of a folder of logs",
        "llmb-run timing experiments", "llmb-run timing --style nemo --format=csv --window 11-44 experiments",
    )  # fmt: skip
    timing.add_argument("folder", nargs="?", type=Path, default=Path("experiments"), help="default: experiments")
    timing.add_argument(
        "--style",
        default="megatron_bridge",
        help="megatron_bridge (ms, log*.out) or nemo (s, *.out); any engine's logs",
    )
    timing.add_argument("--format", default="table", help="table, csv or json")
    timing.add_argument("--full-names", action="store_true", help="do not shorten file names")
    timing.add_argument("--window", metavar="FIRST-LAST", help="iterations that count; default: the recipe's")


def _window(text: str) -> tuple[int, int]:
    from llmb.config.serialization import whole_number
    from llmb.errors import ConfigError

    first, _, last = text.partition("-")
    window = whole_number(first), whole_number(last)
    if not window[0] or not window[1] or window[0] > window[1]:
        raise ConfigError(f"--window: expected FIRST-LAST such as 35-44, got {text[:60]!r}")
    return window[0], window[1]


def run_read(options: argparse.Namespace) -> int:
    """Print the Result of another engine's log."""
    from llmb.cli.stored_runs import usual_window
    from llmb.config.serialization import to_json
    from llmb.errors import ConfigError
    from llmb.report.summary import summary
    from llmb.results.derive import derive
    from llmb.results.log_window import step_window
    from llmb.results.readers.reader_choice import check_reader, log_formats, read_formats

    window = _window(options.window) if options.window else None
    formats = [check_reader(options.reader)] if options.reader else log_formats(options.log)
    events, log_format = read_formats(options.log, formats), next(iter(formats), None)
    usual = usual_window(options.log, log_format, _recipe_windows())
    result = derive(
        None,
        events,
        name=options.log.name,
        window=step_window(window, log_format) if window else None,
        usual_window=step_window(usual, log_format),
    )
    if window and result.steps_done and result.step_time_s is None:
        raise ConfigError(f"no step time in iterations {options.window} of {options.log}, of {result.steps_done} steps")
    print(to_json(result) if options.json else summary(result))
    return 0 if result.status == "ok" else 2


def run_timing(options: argparse.Namespace) -> int:
    """Print the table of parse_train_timing.sh and parse_train_timing_mbridge.sh."""
    from llmb.cli.stored_runs import read_timed_run
    from llmb.errors import ConfigError
    from llmb.report.step_timing import FORMATS, check_request, timing_table
    from llmb.results.timed_run import find_logs

    window = _window(options.window) if options.window else None
    style = check_request(options.style, options.format, window)
    if options.folder == Path("/experiments") and not options.folder.exists():  # $LLMB_WORKLOAD/experiments
        raise ConfigError("LLMB_WORKLOAD is not set; export LLMB_WORKLOAD=$LLMB_INSTALL/workloads/WORKLOAD first")
    runs = [run for run in map(read_timed_run, find_logs(options.folder, style.files)) if run is not None]
    table = timing_table(runs, style, options.folder, _recipe_windows(), window, options.full_names)
    print(FORMATS[options.format](table))
    if all(row.status != "Success" for row in table.rows):
        raise ConfigError(f"no complete training run was found in {options.folder}")
    return 0


def _recipe_windows() -> dict[str, tuple[int, int]]:
    """Return the iterations that count in each training recipe, by workload."""
    from llmb.cli.run_options import load_recipes

    return {
        workload: tuple(recipe.defaults["window"])
        for workload, recipe in load_recipes().items()
        if recipe.kind == "training" and "window" in recipe.defaults
    }
