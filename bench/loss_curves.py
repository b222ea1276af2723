"""Does the default learning-rate schedule train? Losses of the H200 rows over 50 steps, through `llmb-run submit`.

    python bench/loss_curves.py --budget 560                     # rows by their own recipes; 1b first, MoEs last
    python bench/loss_curves.py --gbs 4 --budget 560             # fewer sequences a step at the row's own peak: harsher
    python bench/loss_curves.py --rows "8b bf16,8b fp8" --gbs 2  # only rows with one of these in their title
    python bench/loss_curves.py --proxy --seeds 3                # small proxies of every workload, on any machine

Prints a line after each row: peak learning rate, first, highest and last loss, and whether the last is above the first;
then the curve. A row that the budget cuts off is incomplete and is judged by the steps that it did. Ends with exit code
1 if a row failed or ended above its first loss. Tokens are synthetic: the loss begins at ln(vocabulary) plus
half the variance of the logits and can fall to ln(vocabulary) - 0.9 (docs/runs.md).
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.bench_report import BenchReport
from measure.options import select_rows

from llmb.events import RunEnded, StepDone, read

ROOT = Path(__file__).parent.parent
COMMAND = (sys.executable, "-m", "llmb.cli.llmb_run")
CURVE_POINTS = 12  # losses of a curve that are printed
END_SECONDS = 60.0  # that a run may take to end after the signal


@dataclass(frozen=True)
class LossRow:
    """A run of a recipe."""

    workload: str
    size: str
    dtype: str
    options: tuple[str, ...] = ("--gpu-type", "h200")

    @property
    def title(self) -> str:
        return f"{self.workload.removeprefix('pretrain_')} {self.size} {self.dtype}"

    def arguments(self, *settings: str) -> list[str]:
        """Return the arguments of `llmb-run submit` and `llmb-run show`."""
        selected = ["-w", self.workload, "-s", self.size, "--dtype", self.dtype, "--scale", "1", *self.options]
        return selected + [word for setting in settings for word in ("--set", setting)]


H200 = ("--gpu-type", "h200")
# Budgets and lengths of a row decide how long a step takes and not what it computes: these take the least device time.
AMPLE_MEMORY = ("--seqlen", "8192", "--host-gb", "100", "--device-gb", "130")
ROWS = (
    *(LossRow("pretrain_llama3.1", size, dtype) for size in ("1b", "3b") for dtype in ("bf16", "fp8")),
    LossRow("outofcore_llama3", "1b", "bf16", (*H200, "--host-gb", "16", "--device-gb", "24")),
    LossRow("outofcore_llama3", "3b", "bf16", H200),
    *(LossRow("outofcore_llama3", size, "bf16", (*H200, *AMPLE_MEMORY)) for size in ("8b", "15b")),
    *(LossRow(f"pretrain_{name}", "8b", dtype) for dtype in ("fp8", "bf16") for name in ("llama3.1", "nemotronh")),
    *(
        LossRow(f"pretrain_{name}", size, dtype, (*H200, "--proxy", "true-width", "--seqlen", "4096"))
        for dtype in ("fp8", "bf16")
        for name, size in (("grok1", "314b"), ("deepseek-v3", "671b"))
    ),
)
PROXIES = tuple(
    LossRow(workload, size, dtype, ("--proxy",))
    for workload, size in (
        ("pretrain_llama3.1", "8b"),
        ("pretrain_nemotronh", "8b"),
        ("pretrain_grok1", "314b"),
        ("pretrain_deepseek-v3", "671b"),
        ("outofcore_llama3", "1b"),
    )
    for dtype in ("fp32", "bf16")
)


def run_command(arguments: list[str], install: Path, timeout_s: float | None = None) -> tuple[str, str]:
    """Run `llmb-run` and return its output and errors; at the timeout it is interrupted and ends the run itself."""
    environment = os.environ | {"LLMB_INSTALL": str(install), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()


def row_settings(row: LossRow, options: argparse.Namespace, install: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the settings of a run and its workload as resolved; a smaller batch keeps the peak of the row's own."""
    settings = [f"steps={options.steps}"]
    output, errors = run_command(["show", "--json", *row.arguments(*settings)], install)
    if not output:
        sys.exit(f"{row.title}: {errors.strip()}")
    work = json.loads(output)["workload"]
    if options.gbs is not None:
        settings += [f"gbs={options.gbs}", f"lr={work['lr']}"]
        settings += [f"mbs={math.gcd(options.gbs, work['mbs'])}"] if "mbs" in work else []
    return settings, work


def train(row: LossRow, seed: int | None, options: argparse.Namespace, timeout_s: float | None) -> dict[str, Any]:
    """Run a row and return what happened, with the loss of every step."""
    with tempfile.TemporaryDirectory() as name:
        install, began = Path(name), time.perf_counter()
        settings, work = row_settings(row, options, install)
        settings += [] if seed is None else [f"seed={seed}"]
        _, errors = run_command(["submit", *row.arguments(*settings)], install, timeout_s)
        events = [event for path in install.glob("workloads/**/events.rank0.jsonl") for event in read(path)]
        ended = next((event for event in reversed(events) if isinstance(event, RunEnded)), None)
    losses = [event.loss for event in events if isinstance(event, StepDone) and event.loss is not None]
    seconds = time.perf_counter() - began
    cut_off = timeout_s is not None and seconds > timeout_s and len(losses) < options.steps
    reason = "cut off by the budget" if cut_off else ended.reason if ended is not None else errors.strip()[-400:]
    return {
        "row": row.title, "seed": seed, "settings": settings, "lr": work["lr"], "losses": losses, "seconds": seconds,
        "status": "incomplete" if cut_off else ended.status if ended is not None else "failed", "reason": reason,
        "rose": losses[-1] > losses[0] if losses else None,
    }  # fmt: skip


HEADER = ("row", "seed", "status", "lr", "steps", "first", "highest", "last", "above first", "s")


def cells(run: dict[str, Any]) -> tuple[Any, ...]:
    losses = run["losses"]
    ends = (losses[0], max(losses), losses[-1]) if losses else (None, None, None)
    figures = (None if loss is None else f"{loss:.3f}" for loss in ends)
    return (
        run["row"], run["seed"], run["status"], f"{run['lr']:.2g}", len(losses), *figures, run["rose"],
        f"{run['seconds']:.0f}",
    )  # fmt: skip


def curve(losses: list[float]) -> str:
    """Return some of the losses with their steps, the last among them."""
    stride = max(1, -(-len(losses) // CURVE_POINTS))
    points = sorted({*range(0, len(losses), stride), len(losses) - 1})
    return " ".join(f"{step + 1}:{losses[step]:.2f}" for step in points if step >= 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows with one of these, separated by commas, in their title")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--gbs", type=int, help="sequences a step instead of the row's, at the row's peak learning rate"
    )
    parser.add_argument("--seeds", type=int, default=0, help="runs of each row, with seeds 1, 2, ...; default: its own")
    parser.add_argument("--proxy", action="store_true", help="small proxies of all workloads instead of the H200 rows")
    parser.add_argument("--budget", type=float, help="seconds for all rows together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    every_row = PROXIES if options.proxy else ROWS
    rows = select_rows(every_row, options.rows)
    if not rows:
        parser.error(f"no row is called {options.rows}; rows are: {', '.join(row.title for row in every_row)}")
    report = BenchReport(json=options.json)
    runs: list[dict[str, Any]] = []
    for row in rows:
        for seed in range(1, options.seeds + 1) or (None,):
            left = None if options.budget is None else options.budget - (time.perf_counter() - report.began)
            if left is not None and left <= 0:
                print(f"not run, the budget is spent: {row.title}" + (f", seed {seed}" if seed else ""), flush=True)
                continue
            run = train(row, seed, options, left)
            runs.append(run)
            report.record("runs", run)
            notes = [note for note in (curve(run["losses"]), run["reason"]) if note]
            report.print_table(row.title, HEADER, [cells(run)], *notes)
    report.print_table(
        f"{options.steps} steps" + (f", gbs {options.gbs}" if options.gbs else ""), HEADER, map(cells, runs)
    )
    bad = [run["row"] for run in runs if run["rose"] or run["status"] not in ("ok", "incomplete")]
    print(f"failed, or ended above their first loss: {', '.join(bad)}" if bad else "no loss ended above its first")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
