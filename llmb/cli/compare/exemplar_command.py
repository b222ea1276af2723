"""`llmb-run exemplar`: every row of a suite file passes or fails by its thresholds."""

import argparse
import sys
from pathlib import Path
from typing import Any

from llmb.cli.subcommand import command


def add_commands(commands: Any) -> None:
    """Register exemplar."""
    exemplar = command(
        commands, "exemplar", run, "run a suite of workloads against thresholds: pass or fail",
        "llmb-run exemplar examples/suites/cpu_proxies.yaml --dry-run       # rows, thresholds and cost",
        "llmb-run exemplar examples/suites/cpu_proxies.yaml --junit report.xml",
        "llmb-run exemplar examples/suites/gb200_128.yaml --runs 4711 4712  # judge runs that are done",
    )  # fmt: skip
    exemplar.add_argument("suite", type=Path, metavar="SUITE.yaml", help="rows with options of submit and thresholds")
    exemplar.add_argument("--dry-run", action="store_true", help="rows, thresholds and cost; nothing runs")
    exemplar.add_argument(
        "--runs", nargs="+", metavar="RUN", help="judge these finished runs, as of Slurm, by their names"
    )
    exemplar.add_argument("--junit", type=Path, metavar="FILE", help="write junit XML")
    exemplar.add_argument("--json", action="store_true", help="the outcome as JSON; runs print to the standard error")


def run(options: argparse.Namespace) -> int:
    """Run or judge every row; return 1 if one fails."""
    from llmb.cli.compare.ab_sides import side_of
    from llmb.config.serialization import to_json, write_atomic
    from llmb.report.compare.exemplar_report import suite_data, suite_junit, suite_text
    from llmb.report.terminal.colour import print_report
    from llmb.results.compare.exemplar_suite import read_suite

    name, rows = read_suite(options.suite)
    sides = [side_of(row.submit, [], None, None) for row in rows]
    for row, side in zip(rows, sides, strict=True):
        _check_reference(row, side.config)
    output = sys.stderr if options.json else sys.stdout
    print_report(_cost(name, rows, sides), output)
    if options.dry_run:
        return 0
    judge = _judge_finished(options.runs) if options.runs else _run_here(sides, output)
    outcomes = [judge(row, side) for row, side in zip(rows, sides, strict=True)]
    if options.junit:
        write_atomic(options.junit, suite_junit(name, outcomes) + "\n")
    if options.json:
        print(to_json(suite_data(name, outcomes)))
    else:
        print_report(f"\n{suite_text(name, outcomes)}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _check_reference(row: Any, config: Any) -> None:
    """Refuse a row that could never pass, before anything runs."""
    from llmb.errors import ConfigError

    if "reference" in row.thresholds and (config.reference is None or config.proxy):
        why = "a proxy has none" if config.proxy else "its recipe has none for it"
        raise ConfigError(f"{config.name}: a threshold on the reference needs a published result, {why}")


def _cost(name: str, rows: Any, sides: Any) -> str:
    from llmb.cli.batch_confirmation import describe_totals
    from llmb.report.table import render

    table = [
        (
            place,
            f"{side.config.machine.gpus} x {side.config.machine.gpu}",
            _predicted_s(side.config),
            side.config.limits.time_limit_s,
            ", ".join(_limits(figure, threshold) for figure, threshold in row.thresholds.items()),
            row.name or side.config.name,  # last: long names continue below on a narrow terminal
        )
        for place, (row, side) in enumerate(zip(rows, sides, strict=True), 1)
    ]
    totals = describe_totals([(side.config, 1) for side in sides])
    return f"{name}: {totals}\n\n{render(('#', 'hardware', 'predicted_s', 'limit_s', 'thresholds', 'row'), table)}"


def _predicted_s(config: Any) -> float | None:
    """Return the predicted time of all steps of a training run; None: it is not predicted."""
    from llmb.config.spec import Training
    from llmb.perfmodel.step_time.cluster_fabric import FABRICS
    from llmb.perfmodel.step_time.predictor import predict
    from llmb.perfmodel.step_time.step_setup import DTYPES, setup_of

    work, gpu, dtype = config.workload, config.machine.gpu, config.precision.dtype
    if not isinstance(work, Training) or gpu not in FABRICS or dtype not in DTYPES:
        return None
    return predict(setup_of(config)).step_time_s * work.steps


def _limits(figure: str, threshold: Any) -> str:
    low = f" >= {threshold.min:g}" if threshold.min is not None else ""
    return f"{figure}{low}" + (f" <= {threshold.max:g}" if threshold.max is not None else "")


def _run_here(sides: Any, output: Any) -> Any:
    """Return the function that runs a row as submit does; all rows are checked before the first runs."""
    from contextlib import redirect_stdout
    from io import StringIO
    from time import monotonic

    from llmb.cli.local_check import check_runs_here
    from llmb.cli.memory_check import check_memory
    from llmb.cli.run_options import load_recipes
    from llmb.cli.submit import run_one
    from llmb.report.compare.exemplar_report import RowOutcome
    from llmb.report.terminal.colour import print_report
    from llmb.results.compare.exemplar_suite import checks

    for side in sides:
        check_runs_here(side.config)
    check_memory([side.config for side in sides], load_recipes(), local=True)

    def judge(row: Any, side: Any) -> Any:
        start = monotonic()
        with redirect_stdout(StringIO()):
            _, interrupted, result = run_one(
                side.config, side.environment, False, "local", python=side.python, report=False
            )
        if interrupted:
            raise KeyboardInterrupt
        seconds, name = monotonic() - start, row.name or side.config.name
        outcome = RowOutcome(name=name, result=result, seconds=seconds, checks=tuple(checks(row, result)))
        print_report(f"{'pass' if outcome.passed else 'FAIL'} {name} ({seconds:.0f} s)", output)
        return outcome

    return judge


def _judge_finished(names: list[str]) -> Any:
    """Return the function that finds the run of a row by the name of its configuration."""
    from llmb.cli.jobs.jobs import open_run
    from llmb.cli.stored_runs import load_run
    from llmb.report.compare.exemplar_report import RowOutcome
    from llmb.results.compare.exemplar_suite import checks

    results = {result.name: result for _, result in (load_run(open_run(name)) for name in names)}

    def judge(row: Any, side: Any) -> Any:
        result = results.get(side.config.name)
        judged = tuple(checks(row, result)) if result is not None else ()
        return RowOutcome(name=row.name or side.config.name, result=result, seconds=None, checks=judged)

    return judge
