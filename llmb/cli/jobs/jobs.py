"""`llmb-run jobs`: what was run and how it went, from the store and the run folders. Larger verbs are in job_*.py."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from llmb.cli.jobs.job_table import add_filters
from llmb.cli.subcommand import command


def add_commands(commands: Any) -> None:
    """Register jobs and its verbs; `jobs` alone is `jobs list`."""
    jobs = command(
        commands, "jobs", run_list, "runs so far: list, show, log, cancel, retry, refresh, rebuild",
        "llmb-run jobs", "llmb-run jobs --watch --on slurm", "llmb-run jobs --status failed,lost --since 2d",
        "llmb-run jobs show L3", "llmb-run jobs log 4711 -f", "llmb-run jobs cancel --all --status pending",
        "llmb-run jobs retry 4711 --exclude-node n7",
    )  # fmt: skip
    verbs = jobs.add_subparsers(metavar="VERB", parser_class=type(jobs))
    for listing in (jobs, command(verbs, "list", run_list, "the table of runs (the default)")):
        listing.add_argument("-n", "--limit", type=int, metavar="N", help="only the newest N")
        listing.add_argument("--json", action="store_true", help="as JSON, one job a line")
        listing.add_argument("--watch", action="store_true", help="show changes until nothing runs any more")
        add_filters(listing)
    show = command(verbs, "show", run_show, "one run with its figures")
    show.add_argument("job_id")
    show.add_argument("--json", action="store_true", help="the stored Result")
    _add_log(verbs)
    cancel = command(verbs, "cancel", run_cancel, "end runs that go on")
    cancel.add_argument("job_ids", nargs="*", metavar="job_id")
    cancel.add_argument("--all", action="store_true", help="all that go on, or those of them that the filters leave")
    add_filters(cancel)
    retry = command(verbs, "retry", run_retry, "run the same configuration again, in a new folder")
    retry.add_argument("job_ids", nargs="+", metavar="job_id")
    retry.add_argument("--exclude-node", action="append", default=[], metavar="NODE", help="not on this node (Slurm)")
    refresh = command(verbs, "refresh", run_refresh, "look again at runs that seem to be going")
    refresh.add_argument("job_ids", nargs="*", metavar="job_id", help="all that go on when left out")
    command(verbs, "rebuild", run_rebuild, "make the store anew from the run folders")


def _add_log(verbs: Any) -> None:
    log = command(verbs, "log", run_log, "the log of a run")
    log.add_argument("job_id")
    log.add_argument("--tail", type=int, default=200, metavar="N", help="last N lines (200)")
    log.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")
    where = log.add_mutually_exclusive_group()
    where.add_argument("--path", action="store_true", help="print the log's path instead")
    where.add_argument("--dir", action="store_true", help="print the run folder instead")
    where.add_argument("--list", action="store_true", help="list the run folder's files instead")


def open_store() -> Any:
    """The store of this $LLMB_INSTALL."""
    from llmb.launch.install_root import install_root
    from llmb.launch.run_folder import store_path
    from llmb.results.job_store import Store

    return Store(store_path(install_root(os.environ)))


def run_list(options: argparse.Namespace) -> int:
    """One line a run; those said to be going are looked at first."""
    from llmb.cli.jobs.job_table import filters, room, table
    from llmb.config.serialization import to_json
    from llmb.errors import ConfigError

    chosen = filters(options)
    if options.watch and options.json:
        raise ConfigError("--watch shows a table; leave out --json, or call: llmb-run jobs --json")
    with open_store() as store:
        if options.watch:
            from llmb.cli.jobs.watch import watch

            return watch(store, options)
        _refresh(store, _unsettled(store))
        jobs = store.jobs(options.limit, **chosen)
        again = [job.job_id for job in store.to_be_tried_again()]
    if options.json:
        for job in jobs:
            print(to_json(job))
        return 0
    print(table(jobs, room()))
    if again:
        print(f"to try again {', '.join(again)}: llmb-run jobs --watch", file=sys.stderr)
    return 0


def run_show(options: argparse.Namespace) -> int:
    """A run's figures and where it lies."""
    from llmb.cli.stored_runs import load_run
    from llmb.config.serialization import to_json
    from llmb.launch.run_folder import RunDir
    from llmb.report.summary import summary

    with open_store() as store:
        (job,) = _refresh(store, [store.job(options.job_id)])
        again = [other.job_id for other in store.retries_of(job.job_id)]
    _, result = load_run(RunDir.open(Path(job.run_dir)))
    if options.json:
        print(to_json(result))
        return 0
    print("\n".join(_about(job, again)))
    if job.status not in ("submitting", "pending"):  # which have no figures
        print(f"\n{summary(result)}")
    print(f"\nrun folder: {job.run_dir}")
    return 0


def _about(job: Any, again: list[str]) -> list[str]:
    """What the store knows of a job besides its result."""
    from llmb.cli.jobs.job_table import elapsed_s, span, waited_s

    now = time.time()
    lines = [f"job {job.job_id}, {job.status}" + (f" ({job.reason})" if job.reason and job.status != "ok" else "")]
    if job.slurm_state:
        parts = {"on": job.nodes, "waited": span(waited_s(job, now)), "ran": span(elapsed_s(job, now))}
        lines.append(f"Slurm: {job.slurm_state}" + "".join(f", {k} {v}" for k, v in parts.items() if v is not None))
    if job.retry_of:
        lines.append(f"attempt {job.attempt}, again after {job.retry_of}")
    if again:
        lines.append(f"tried again as {', '.join(again)}")
    return lines


def run_log(options: argparse.Namespace) -> int:
    from llmb.cli.jobs.job_log import run

    return run(options)


def run_cancel(options: argparse.Namespace) -> int:
    from llmb.cli.jobs.cancel import run

    return run(options)


def run_retry(options: argparse.Namespace) -> int:
    from llmb.cli.jobs.retry import run

    return run(options)


def run_rebuild(options: argparse.Namespace) -> int:
    from llmb.cli.jobs.rebuild import run

    return run(options)


def run_refresh(options: argparse.Namespace) -> int:
    """Status of the named runs, looked at anew; those that may be tried again are."""
    from llmb.cli.jobs.auto_retry import retry_failed

    with open_store() as store:
        named = [store.job(job_id) for job_id in options.job_ids] or _unsettled(store)
        for job in _refresh(store, named):
            print(f"{job.job_id}: {job.status}" + (f" ({job.reason})" if job.reason else ""))
        retry_failed(store)
    return 0


def _unsettled(store: Any) -> list[Any]:
    """Those whose end is not known; nothing more is read where there is none."""
    from llmb.results.job_store import GOING

    return store.jobs(statuses=(*GOING, "lost"))


def _refresh(store: Any, jobs: list[Any]) -> list[Any]:
    if not any(job.going or job.status == "lost" for job in jobs):
        return jobs
    from llmb.cli.jobs.polling import Poller

    return Poller(store).refresh(jobs)
