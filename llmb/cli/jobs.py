"""`llmb-run jobs`: what was run and how it went, from the store and the run folders."""

import argparse
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.cli.parsing import command


def add_commands(commands: Any) -> None:
    """Register jobs and its verbs; `jobs` alone is `jobs list`."""
    jobs = command(
        commands, "jobs", run_list, "runs so far: list, show, log, refresh, rebuild",
        "llmb-run jobs", "llmb-run jobs show L3", "llmb-run jobs log L3 -f",
    )  # fmt: skip
    verbs = jobs.add_subparsers(metavar="VERB", parser_class=type(jobs))
    for listing in (jobs, command(verbs, "list", run_list, "the table of runs (the default)")):
        listing.add_argument("-n", "--limit", type=int, metavar="N", help="only the newest N")
        listing.add_argument("--json", action="store_true", help="as JSON, one job a line")
    show = command(verbs, "show", run_show, "one run with its figures")
    show.add_argument("job_id")
    show.add_argument("--json", action="store_true", help="the stored Result")
    log = command(verbs, "log", run_log, "the log of a run")
    log.add_argument("job_id")
    log.add_argument("--tail", type=int, default=200, metavar="N", help="last N lines (200)")
    log.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")
    where = log.add_mutually_exclusive_group()
    where.add_argument("--path", action="store_true", help="print the log's path instead")
    where.add_argument("--dir", action="store_true", help="print the run folder instead")
    where.add_argument("--list", action="store_true", help="list the run folder's files instead")
    refresh = command(verbs, "refresh", run_refresh, "look again at runs that seem to be going")
    refresh.add_argument("job_ids", nargs="+", metavar="job_id")
    command(verbs, "rebuild", run_rebuild, "make the store anew from the run folders")


def _store() -> Any:
    from llmb.launch.root import install_root
    from llmb.launch.rundir import store_path
    from llmb.results.store import Store

    return Store(store_path(install_root(os.environ)))


def run_list(options: argparse.Namespace) -> int:
    """One line a run; those said to be going are looked at first."""
    from llmb.cli.runs import refresh
    from llmb.errors import LlmbError
    from llmb.plain import to_json
    from llmb.report.table import render

    with _store() as store:
        jobs = store.jobs(options.limit)
        for number, job in enumerate(jobs):
            if job.status == "running":
                try:
                    jobs[number] = refresh(store, job)
                except LlmbError as error:  # a folder someone moved away must not hide the other runs
                    print(f"ERROR: {job.job_id}: {error}", file=sys.stderr)
    if options.json:
        for job in jobs:
            print(to_json(job))
        return 0
    header = ("job", "workload", "size", "dtype", "scale", "gpu", "proxy", "started", "status", "s/step",
              "tokens/s/gpu", "TFLOP/s/gpu", "MFU %", "vs ref")  # fmt: skip
    rows = [
        (j.job_id, j.workload, j.size, j.dtype, j.scale, j.gpu, bool(j.proxy),
         datetime.fromtimestamp(j.created_at).strftime("%m-%d %H:%M"), j.status, j.step_time_s, j.tokens_per_s_per_gpu,
         j.tflops_per_gpu, None if j.mfu is None else 100 * j.mfu, j.reference_ratio)
        for j in jobs
    ]  # fmt: skip
    print(render(header, rows) if rows else "no runs yet; start one: llmb-run submit --help")
    return 0


def run_show(options: argparse.Namespace) -> int:
    """A run's figures and where it lies."""
    from llmb.cli.runs import load_run, refresh
    from llmb.launch.rundir import RunDir
    from llmb.plain import to_json
    from llmb.report.summary import summary

    with _store() as store:
        job = store.job(options.job_id)
        if job.status == "running":
            job = refresh(store, job)
    _, result = load_run(RunDir.open(Path(job.run_dir)))
    if options.json:
        print(to_json(result))
        return 0
    print(f"job {job.job_id}, {job.status}\n\n{summary(result)}\n\nrun folder: {job.run_dir}")
    return 0


def run_log(options: argparse.Namespace) -> int:
    """The end of a log; -f goes on until the run does."""
    from llmb.errors import ConfigError
    from llmb.launch.rundir import RunDir, is_alive

    with _store() as store:
        run = RunDir.open(Path(store.job(options.job_id).run_dir))
    if options.path or options.dir:
        print(run.log if options.path else run.path)
        return 0
    if options.list:
        print("\n".join(sorted(str(p.relative_to(run.path)) for p in run.path.rglob("*"))))
        return 0
    try:
        with run.log.open(errors="replace") as log:
            print("".join(log.readlines()[-options.tail :] if options.tail > 0 else []), end="", flush=True)
            while options.follow and is_alive(run):
                print(log.read(), end="", flush=True)
                time.sleep(0.2)
            print(log.read() if options.follow else "", end="")
    except FileNotFoundError as error:
        raise ConfigError(f"{run.log} does not exist; the run ended before it wrote a log") from error
    return 0


def run_refresh(options: argparse.Namespace) -> int:
    """Status of the named runs, looked at anew."""
    from llmb.cli.runs import refresh

    with _store() as store:
        for job_id in options.job_ids:
            job = store.job(job_id)
            job = refresh(store, job) if job.status == "running" else job
            print(f"{job.job_id}: {job.status}" + (f" ({job.reason})" if job.reason else ""))
    return 0


def run_rebuild(_: argparse.Namespace) -> int:
    """The store from run folders alone; a folder that cannot be read is named and left out."""
    from llmb.cli.runs import keep_result, load_run
    from llmb.errors import LlmbError
    from llmb.launch.root import install_root
    from llmb.launch.rundir import RunDir, is_alive

    found = unreadable = 0
    with _store() as store:
        store.clear()
        for run in sorted(RunDir.find_all(install_root(os.environ)), key=lambda r: r.created_at):
            try:
                config, result = load_run(run)
                over = is_alive(run) is False
                if over and not run.result.exists():
                    result = keep_result(run, config)
            except LlmbError as error:
                print(f"ERROR: {error}", file=sys.stderr)
                unreadable += 1
                continue
            job_id = store.add(config, run.path, job_id=run.job_id)
            if over:
                store.restore(config, run.path, job_id, result, run.created_at)
            found += 1
    print(f"{found} runs found" + (f", {unreadable} folders could not be read" if unreadable else ""))
    return 0
