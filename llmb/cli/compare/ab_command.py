"""`llmb-run ab`: two configurations, environments or checkouts in turns on this machine, until one is faster or not."""

import argparse
import sys
from pathlib import Path
from typing import Any

from llmb.cli.subcommand import command

REPEATS = 10


def add_commands(commands: Any) -> None:
    """Register ab."""
    proxy = "-w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy"
    ab = command(
        commands, "ab", run, "run two configurations in turns: which is faster?",
        f'llmb-run ab "{proxy}" "{proxy} --set mbs=4" --repeats 10',
        "llmb-run ab L1 L1 --env-b OMP_NUM_THREADS=2",
        "llmb-run ab L1 L1 --checkout-a ../main --checkout-b . --python-b ../new/bin/python",
    )  # fmt: skip
    spec = "options of submit as one argument, a job id, a run folder, or a config.json"
    ab.add_argument("a", metavar="A", help=spec)
    ab.add_argument("b", metavar="B", help="the same")
    ab.add_argument(
        "-r", "--repeats", type=int, default=REPEATS, metavar="N", help=f"most pairs of runs; default: {REPEATS}"
    )
    for label in ("a", "b"):
        name = label.upper()
        ab.add_argument(
            f"--env-{label}", action="append", default=[], metavar="K=V", help=f"variable for ranks of {name}"
        )
        ab.add_argument(f"--python-{label}", metavar="PYTHON", help=f"interpreter that runs {name}")
        ab.add_argument(f"--checkout-{label}", type=Path, metavar="DIR", help=f"checkout of llmb that runs {name}")
    ab.add_argument("--dry-run", action="store_true", help="say what would run, and run nothing")
    ab.add_argument("--json", action="store_true", help="the outcome as JSON; runs print to the standard error")


def run(options: argparse.Namespace) -> int:
    """Run A against itself, then A and B in turns; print the verdict."""
    from llmb.cli.compare.ab_sides import side_of
    from llmb.cli.local_check import check_runs_here
    from llmb.cli.memory_check import check_memory
    from llmb.cli.run_options import load_recipes
    from llmb.config.serialization import to_json
    from llmb.report.compare.ab_text import ab_data, ab_text, look_line
    from llmb.report.compare.compare_doubts import doubts
    from llmb.report.terminal.colour import print_report
    from llmb.results.compare.differing_settings import differing_fields
    from llmb.results.compare.paired_test import AA_PAIRS, look_pairs, paired_test

    looks = look_pairs(options.repeats)
    sides = {
        "A": side_of(options.a, options.env_a, options.python_a, options.checkout_a),
        "B": side_of(options.b, options.env_b, options.python_b, options.checkout_b),
    }
    output = sys.stderr if options.json else sys.stdout
    for label, side in sides.items():
        print(f"{label}: {side.config.name}{side.process}", file=output)
    for field, (a, b) in differing_fields([side.config for side in sides.values()]).items():
        print(f"  {field}: A {a}, B {b}", file=output)
    least, most = 2 * (AA_PAIRS + looks[0]), 2 * (AA_PAIRS + options.repeats)
    runs = f"{least} to {most} runs" if least < most else f"{most} runs"
    listed = ", ".join(map(str, looks))
    plan = f"{2 * AA_PAIRS} runs of A against itself, then A and B in turns with looks after {listed} pairs: "
    print(f"{plan}{runs}", file=output, flush=True)
    if options.dry_run:
        return 0
    for side in sides.values():
        check_runs_here(side.config)
    check_memory([side.config for side in sides.values()], load_recipes(), local=True)
    runner = Runner(sides, output)
    test = paired_test(runner.measure, options.repeats, lambda look: print(look_line(look), file=output, flush=True))
    results = runner.results
    reasons = list(doubts((sides["A"].config, results["A"]), (sides["B"].config, results["B"])))
    if options.json:
        print(to_json(ab_data(test, runner.unit, reasons, (results["A"].name, results["B"].name))))
    else:
        print_report(f"\n{ab_text(test, runner.unit, reasons)}")
    return 0


class Runner:
    """Runs a side once more, as submit does, and keeps the newest result of each."""

    def __init__(self, sides: dict[str, Any], output: Any):
        self._sides, self._output, self._count = sides, output, 0
        self.results: dict[str, Any] = {}
        self.unit = "tokens/s"

    def measure(self, label: str) -> float:
        """Return the time per token of one run: the median over its steps, of serving over the whole load."""
        from contextlib import redirect_stdout
        from io import StringIO

        from llmb.cli.submit import run_one
        from llmb.errors import LaunchError
        from llmb.report.table import number
        from llmb.results.compare.speed_ratio import time_per_token

        side = self._sides[label]
        self._count += 1
        with redirect_stdout(StringIO()) as printed:
            _, interrupted, result = run_one(
                side.config, side.environment, False, "local", python=side.python, report=False
            )
        if interrupted:
            raise KeyboardInterrupt
        time = time_per_token(side.config, result) if result.status == "ok" else None
        if time is None:
            print(printed.getvalue(), file=sys.stderr)
            raise LaunchError(f"run {self._count} ({label}) is {result.status}: {result.reason or 'it has no speed'}")
        self.unit = "output tokens/s" if result.step_time_s is None else "tokens/s"
        self.results[label] = result
        print(f"run {self._count}: {label} {number(1 / time)} {self.unit}", file=self._output, flush=True)
        return time
