"""`llmb-run gate`: pass or fail of a run against a baseline file, for CI."""

import argparse
from pathlib import Path
from typing import Any

from llmb.cli.subcommand import command

SLOWER, UNDECIDED = 1, 3  # exit codes


def add_commands(commands: Any) -> None:
    """Register gate."""
    gate = command(
        commands, "gate", run, "has a run become slower than its baseline?",
        "llmb-run gate --save baseline.json L1 L2 L3        # repeats: their noise is in the interval",
        "llmb-run gate --baseline baseline.json --max-slowdown 2% L4 L5 L6",
        "llmb-run gate --baseline serving.json --figure ttft_ms --max-slowdown 5% L7",
    )  # fmt: skip
    gate.epilog = (
        f"{gate.epilog}\nexit codes: 0 within the limit, 1 slower, or a wrong request, 3 undecided: too noisy\n"
    )
    file = gate.add_mutually_exclusive_group(required=True)
    file.add_argument("--save", type=Path, metavar="FILE", help="write the baseline of these runs")
    file.add_argument("--baseline", type=Path, metavar="FILE", help="compare these runs with a baseline")
    gate.add_argument("--max-slowdown", default="2%", metavar="X%", help="more time that is accepted; default: 2%%")
    gate.add_argument(
        "--figure", help="default: tokens_per_s, of serving output_tokens_per_s; ttft_ms, tpot_ms, e2e_ms"
    )
    gate.add_argument("--json", action="store_true", help="the verdict as JSON")
    gate.add_argument("runs", nargs="+", metavar="RUN", help="job id or run folder; several are repeats of one another")


def run(options: argparse.Namespace) -> int:
    """Write a baseline, or print one line and return whether the limit holds."""
    from llmb.config.serialization import to_json, to_plain, write_atomic
    from llmb.report.terminal.colour import print_report
    from llmb.results.compare.baseline import baseline_of, check_comparable, judge, read_baseline

    limit = percentage(options.max_slowdown, "--max-slowdown")
    current = baseline_of([measured_run(name) for name in options.runs])
    if options.save:
        write_atomic(options.save, to_json(current, indent=1) + "\n")
        print_report(f"{options.save}: {current.name}, runs: {current.runs}, {', '.join(current.times)}")
        return 0
    baseline = read_baseline(options.baseline)
    check_comparable(baseline, current)
    figure = options.figure or next(iter(baseline.times))
    verdict = judge(baseline, current, figure, limit)
    if options.json:
        print(to_json({"figure": figure, "limit": limit, "name": current.name, **to_plain(verdict)}))
    else:
        print_report(_line(figure, limit, verdict, current.name))
    return {"ok": 0, "slower": SLOWER, "undecided": UNDECIDED}[verdict.state]


def _line(figure: str, limit: float, verdict: Any, name: str) -> str:
    change = f"{100 * abs(verdict.slowdown):.2f} % {'slower' if verdict.slowdown > 0 else 'faster'} in {figure}"
    if verdict.low is None:
        return f"undecided: {name} looks {change}, too few samples for an interval; measure more steps or repeats"
    interval = f"95 % interval of the slowdown {100 * verdict.low:+.2f} to {100 * verdict.high:+.2f} %"
    text = f"{name} is {change} ({interval}, limit {100 * limit:g} %)"
    if verdict.state == "undecided":
        return f"undecided: {text}: the noise is larger than the limit can tell; give repeats or raise --max-slowdown"
    return f"{'slower' if verdict.state == 'slower' else 'ok'}: {text}"


def percentage(text: str, option: str) -> float:
    """Return 0.02 for 2%."""
    from llmb.errors import ConfigError

    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not text.endswith("%") or not 0 <= value < 10:
        raise ConfigError(f"{option}: expected a percentage such as 2%, got {text!r}")
    return value


def measured_run(name: str) -> Any:
    """Return configuration, result and requests of a job id or a run folder."""
    from llmb.cli.jobs.jobs import open_run
    from llmb.cli.stored_runs import load_requests, load_run

    folder = open_run(name)
    config, result = load_run(folder)
    return config, result, load_requests(folder, config)
