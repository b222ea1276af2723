"""`llmb-run compare`: any number of finished runs, each against the first."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmb.cli.subcommand import command


def add_commands(commands: Any) -> None:
    """Register compare."""
    compare = command(
        commands, "compare", run, "which run is faster?",
        "llmb-run compare L1 L2", "llmb-run compare L1 L2 L3 --markdown",
        "llmb-run compare L1,L2,L3 L4,L5,L6                 # repeats of two configurations",
        "llmb-run compare RUN_FOLDER_A RUN_FOLDER_B --json",
    )  # fmt: skip
    compare.add_argument(
        "a", metavar="A", help="the baseline: a job id, a run folder, or several of one configuration: L1,L2"
    )
    compare.add_argument("b", metavar="B", nargs="+", help="the runs to compare with it")
    compare.add_argument("--force", action="store_true", help="compare different workloads anyway")
    formats = compare.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="as JSON")
    formats.add_argument("--csv", action="store_true", help="every figure as a row")
    formats.add_argument("--markdown", action="store_true", help="for a pull request")


def run(options: argparse.Namespace) -> int:
    """Print differing fields, ratios with intervals, and verdicts."""
    from llmb.config.serialization import to_json
    from llmb.report.compare.compare_export import set_csv, set_markdown
    from llmb.report.compare.compare_text import set_text
    from llmb.report.compare.run_set import compare_runs
    from llmb.report.terminal.colour import print_report

    compared = compare_runs([_compared_run(name) for name in (options.a, *options.b)], options.force)
    if options.json:
        pair = compared["comparisons"][0]
        print(to_json(pair if len(options.b) == 1 else compared))
    elif options.csv or options.markdown:
        print((set_csv if options.csv else set_markdown)(compared))
    else:
        print_report(set_text(compared))
    return 0


def _compared_run(names: str) -> Any:
    """Return a run, or several runs of one configuration, joined by commas."""
    from llmb.cli.compare.gate_command import measured_run
    from llmb.cli.jobs.jobs import open_run
    from llmb.cli.stored_runs import load_run
    from llmb.results.compare.baseline import check_repeats

    first, *more = [names] if Path(names).is_dir() else names.split(",")
    run = open_run(first)
    config, result = load_run(run)
    repeats = [measured_run(name) for name in more]
    if repeats:
        check_repeats([(config, result, ()), *repeats])
    return compared_run(run, config, result, repeats)


def compared_run(run: Any, config: Any, result: Any, repeats: Sequence[Any] = ()) -> Any:
    """Return a run with what its comparison needs."""
    from llmb.cli.stored_runs import load_requests
    from llmb.launch.archive.run_origin import read_origin
    from llmb.report.compare.run_set import ComparedRun

    origin = read_origin(run)
    cluster, requests = origin.cluster if origin else None, load_requests(run, config)
    return ComparedRun(config=config, result=result, cluster=cluster, requests=requests, repeats=repeats)
