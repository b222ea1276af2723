"""Totals of what a command submits to Slurm, and the question before it does.

    confirm([(config, repeats), ...], yes=False)      shows jobs, GPUs and GPU-hours; asks a terminal, refuses a script

One job is submitted without a question: its command line names it. Runs on this machine, and inside an allocation that
the user already has, are never asked about: they come one after the other, and Ctrl-C ends them all.
"""

import sys
from collections.abc import Sequence

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError

MOST_JOBS = 10_000  # of one command: sbatch takes milliseconds to seconds each


def confirm(runs: Sequence[tuple[RunConfig, int]], *, yes: bool) -> None:
    """Show the totals of several jobs; raise ConfigError unless `yes` or the user at the terminal agrees."""
    jobs = sum(repeats for _, repeats in runs)
    if jobs <= 1:
        return
    if jobs > MOST_JOBS:
        raise ConfigError(
            f"{jobs:,} jobs: one command submits at most {MOST_JOBS:,}; choose fewer with -w, --scale or -r"
        )
    totals = describe_totals(runs)
    if yes:
        print(totals, file=sys.stderr)
    elif not _has_terminal():
        raise ConfigError(f"{totals}; add --yes to submit them, or --dry-run to list them")
    elif not _agrees(totals):
        raise ConfigError("nothing was submitted")


def describe_totals(runs: Sequence[tuple[RunConfig, int]]) -> str:
    """Return the totals of all jobs in a line."""
    jobs = sum(repeats for _, repeats in runs)
    gpus = sum(config.machine.gpus * repeats for config, repeats in runs)
    seconds = sum(config.machine.gpus * config.limits.time_limit_s * repeats for config, repeats in runs)
    largest = max(config.machine.gpus for config, _ in runs)
    hours = f"{seconds / 3600:,.0f}" if seconds >= 36000 else f"{seconds / 3600:,.2g}"
    noun = "ranks on CPUs" if all(config.machine.gpu == "cpu" for config, _ in runs) else "GPUs"
    unit = "rank-hours" if noun != "GPUs" else "GPU-hours"
    return (
        f"{jobs:,} jobs, {gpus:,} {noun} in all (at most {largest:,} in one), up to {hours} {unit} by their time limits"
    )


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _agrees(totals: str) -> bool:
    print(f"{totals}\nsubmit them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
