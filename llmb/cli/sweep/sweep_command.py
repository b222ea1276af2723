"""`llmb-run sweep`: a ladder of loads or a search for the highest load of an SLO; table, csv, json and Pareto chart."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from llmb.cli.load import add_request_options
from llmb.cli.run_options import add_run_options
from llmb.cli.subcommand import command

EXAMPLES = (
    "llmb-run sweep --base-url http://localhost:8000 --isl 1000 --osl 1000 --concurrency 1..1024 --gpus 1",
    "llmb-run sweep --base-url http://localhost:8000 --rate 1..50 --slo ttft=500ms,tpot=50ms",
    "llmb-run sweep -w inference_llama3.1 -s 8b --dtype fp8 --scale 1 --concurrency 1,2,4..1024",
    "llmb-run sweep -w inference_llama3.1 -s 8b --dtype fp8 --scale 1 --in-process --set max_num_tokens=2048,4096,8192",
    "llmb-run sweep --base-url http://localhost:8000 --concurrency 1..512 --slo-tiers tiers.yaml",
    "llmb-run sweep --resume SWEEP",
    "",
    "measured is a server (--base-url), a server that the sweep starts (-w ...), or the engine without one "
    "(-w ... --in-process)",
)


def add_commands(commands: Any) -> None:
    """Register sweep."""
    parser = command(commands, "sweep", run, "figures over a ladder of loads, and the Pareto chart", *EXAMPLES)
    loads = parser.add_argument_group("loads")
    add = loads.add_argument
    add("--concurrency", metavar="LADDER", help="requests at once: 1,2,4..1024 doubles from 4; 10..50+10 steps by 10")
    add("--rate", metavar="LADDER", help="requests/s at random times: 1..50 or 0.5,1,2")
    add("--slo", metavar="LIMITS", help="search the highest load that holds: ttft=500ms,tpot.p50=50ms (default p99)")
    add("--slo-tiers", type=Path, metavar="FILE", help="several limits, YAML: 'NAME: {ttft: 500ms, tpot: 50ms}'")
    add("--precision", metavar="P", help="where a search ends: 2 or 5%% (default: 1 of concurrency, 5%% of rate)")
    add("--all-points", action="store_true", help="with --slo: measure the whole ladder, no search")
    add("--repeats", type=int, default=1, metavar="N", help="measure each load N times: medians, and their noise")
    add("--point-seconds", type=float, default=10.0, metavar="S", help="send requests for about S a point (10)")
    add("--waves", type=float, default=2.0, metavar="N", help="requests per unit of concurrency at least (2)")
    ramp = "spread the start of users over this fraction of a request's time (with --slo 0.5, else 0: all at once)"
    add("--ramp", type=float, metavar="F", help=ramp)
    server = parser.add_argument_group("a server that runs already, by --base-url http://HOST:PORT")
    add = server.add_argument
    add("--model", metavar="NAME", help="its name there; default: the only one that the server lists")
    add("--chat", action="store_true", help="chat completions; default: completions")
    add("--api-key-env", metavar="VARIABLE", help="environment variable that holds the API key")
    add("--gpus", type=int, metavar="N", help="GPUs behind the server, for tokens/s per GPU")
    add("--processes", type=int, metavar="N", help="of the client; default: as many as the load needs")
    add("--no-calibrate", action="store_true", help="do not measure the client on a no-op server first")
    add_request_options(parser.add_argument_group("requests; with -w lengths are those of the recipe").add_argument)
    run_options = parser.add_argument_group("a server or an engine of llmb, as for submit")
    add_run_options(run_options)  # type: ignore[arg-type]
    add = parser.add_argument
    add("--in-process", action="store_true", help="without HTTP: each point is a run of the engine")
    add("--resume", metavar="SWEEP", help="continue a sweep by its name or folder; finished points are kept")
    add("-o", "--output", type=Path, metavar="FOLDER", help="where sweep folders go; default: $LLMB_INSTALL/sweeps")
    add("--no-report", action="store_true", help="write no report.html")
    add("--dry-run", action="store_true", help="print plan and estimate, measure nothing")
    add("--json", action="store_true", help="print the stored result as the last line")


def run(options: argparse.Namespace) -> int:
    """Plan, estimate, measure, report."""
    from datetime import datetime

    from llmb.cli.sweep.plan_builder import build_plan
    from llmb.cli.sweep.sweep_progress import SweepProgress, describe_plan
    from llmb.errors import ConfigError
    from llmb.launch.install_root import install_root
    from llmb.loadgen.sweep.sweep_folder import SweepFolder, read_plan, sweeps_path

    output = sys.stderr if options.json else sys.stdout
    parent = options.output or sweeps_path(install_root(os.environ))
    if options.resume:
        if options.base_url or options.workload or options.concurrency or options.rate:
            raise ConfigError("--resume continues a sweep as it was planned; leave out what to measure")
        folder = SweepFolder.open(parent, options.resume)
        plan = read_plan(folder)
        print(describe_plan(plan), file=output, flush=True)
        if options.dry_run:
            return 0
    else:
        plan = build_plan(options)
        print(describe_plan(plan), file=output, flush=True)
        if options.dry_run:
            return 0
        folder = SweepFolder.create(parent, plan.name, plan, datetime.now())
    print(f"sweep folder: {folder.path}", file=output, flush=True)
    with folder.locked():
        return _measure(plan, folder, SweepProgress(plan, output), options, output)


def _measure(plan: Any, folder: Any, progress: Any, options: argparse.Namespace, output: Any) -> int:
    from llmb.cli.sweep.point_drivers import open_driver
    from llmb.cli.sweep.sweep_loop import run_sweep
    from llmb.report.sweep_table import sweep_text
    from llmb.report.table import terminal_width

    try:
        with open_driver(plan, folder, progress) as driver:
            result = run_sweep(plan, folder, driver, progress.start, progress.done)
    except BaseException:
        progress.clear()
        print(f"to continue: llmb-run sweep --resume {folder.path}", file=sys.stderr, flush=True)
        raise
    print(f"\n{sweep_text(result, terminal_width())}\n", file=output)
    print(f"{folder.svg}\n{folder.csv}\n{folder.result}", file=output)
    if not options.no_report:
        from llmb.cli.report.page_writer import write_sweep_report

        print(write_sweep_report(folder), file=output)
    if options.json:
        from llmb.config.serialization import to_json

        print(to_json(result))
    return 0 if any(row.excluded is None for row in result.rows) else 2
