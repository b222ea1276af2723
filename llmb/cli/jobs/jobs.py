"""`llmb-run jobs`: past and active runs from the job store and the run folders. Larger verbs have their own modules."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from llmb.cli.jobs.job_table import add_filters
from llmb.cli.subcommand import command

JOB_HELP = "an id from `llmb-run jobs` (L3, 4711), or a run folder"


def add_commands(commands: Any) -> None:
    """Register jobs and its verbs; `jobs` alone is `jobs list`."""
    jobs = command(
        commands, "jobs", run_list, "runs so far: list, show, log, cancel, retry, refresh, rebuild",
        "llmb-run jobs", "llmb-run jobs --watch --on slurm", "llmb-run jobs --status failed,lost --since 2d",
        "llmb-run jobs --html -o runs.html",
        "llmb-run jobs show L3", "llmb-run jobs log 4711 -f", "llmb-run jobs cancel --all --status pending",
        "llmb-run jobs retry 4711 --exclude-node n7",
    )  # fmt: skip
    verbs = jobs.add_subparsers(metavar="VERB", parser_class=type(jobs))
    for listing in (jobs, command(verbs, "list", run_list, "the table of runs (the default)")):
        listing.add_argument("-n", "--limit", type=int, metavar="N", help="only the newest N")
        listing.add_argument("--json", action="store_true", help="as JSON, one job per line")
        listing.add_argument("--watch", action="store_true", help="show changes until no job is active")
        listing.add_argument(
            "--html", action="store_true", help="write a page that sorts and filters, and print its path"
        )
        listing.add_argument("-o", "--output", type=Path, metavar="FILE", help="of --html; default: runs.html here")
        add_filters(listing)
    show = command(verbs, "show", run_show, "one run with its figures")
    show.add_argument("job_id", help=JOB_HELP)
    show.add_argument("--json", action="store_true", help="the stored Result")
    _add_log(verbs)
    cancel = command(verbs, "cancel", run_cancel, "end active runs")
    cancel.add_argument("job_ids", nargs="*", metavar="job_id", help=JOB_HELP)
    cancel.add_argument("--all", action="store_true", help="all active runs, or those that match the filters")
    add_filters(cancel)
    retry = command(verbs, "retry", run_retry, "run the same configuration again, in a new folder")
    retry.add_argument("job_ids", nargs="+", metavar="job_id", help=JOB_HELP)
    retry.add_argument("--exclude-node", action="append", default=[], metavar="NODE", help="not on this node (Slurm)")
    refresh = command(verbs, "refresh", run_refresh, "update the status of active runs")
    refresh.add_argument("job_ids", nargs="*", metavar="job_id", help="default: all active runs")
    command(verbs, "rebuild", run_rebuild, "rebuild the job store from the run folders")


def _add_log(verbs: Any) -> None:
    log = command(verbs, "log", run_log, "the log of a run")
    log.add_argument("job_id", help=JOB_HELP)
    log.add_argument("--tail", type=int, default=200, metavar="N", help="last N lines (200), at most 64 MiB")
    log.add_argument("-f", "--follow", action="store_true", help="follow the log until the run ends")
    where = log.add_mutually_exclusive_group()
    where.add_argument("--path", action="store_true", help="print the log's path instead")
    where.add_argument("--dir", action="store_true", help="print the run folder instead")
    where.add_argument("--list", action="store_true", help="list the run folder's files instead")


def open_store() -> Any:
    """Open the job store of this $LLMB_INSTALL."""
    from llmb.launch.install_root import install_root
    from llmb.launch.run_folder import store_path
    from llmb.results.job_store import Store

    return Store(store_path(install_root(os.environ)))


def open_run(name: str) -> Any:
    """Open the run folder of a job id, a path, or the name of a short path."""
    from llmb.launch.run_folder import RunFolder

    folder = _named_folder(name)
    if folder is not None:
        return RunFolder.open(folder)
    with open_store() as store:
        return RunFolder.open(Path(store.job(name).run_dir))


def stored_job(store: Any, name: str) -> Any:
    """Return the row of a job id, of a run folder, or of the name of a short path."""
    from llmb.errors import ConfigError

    try:
        return store.job(name)
    except ConfigError:
        folder = _named_folder(name)
        jobs = () if folder is None else store.jobs()
        rows = [job for job in jobs if folder is not None and Path(job.run_dir).resolve() == folder.resolve()]
        if not rows:
            raise
        return rows[-1]


def _named_folder(name: str) -> Path | None:
    """Return the run folder of a path, or of the name of a short path; None: there is none."""
    from llmb.launch.install_root import install_root
    from llmb.launch.run_files.short_path import short_paths

    return next((path for path in (Path(name), short_paths(install_root(os.environ)) / name) if path.is_dir()), None)


def run_list(options: argparse.Namespace) -> int:
    """Print one line per run, after refreshing the active ones."""
    from llmb.cli.jobs.job_table import empty_text, filters, table
    from llmb.config.serialization import to_json
    from llmb.errors import ConfigError
    from llmb.report.table import terminal_width
    from llmb.report.terminal.colour import print_report

    selected = filters(options)
    if options.watch and options.json:
        raise ConfigError("--watch shows a table; leave out --json, or call: llmb-run jobs --json")
    if options.output is not None and not options.html:
        raise ConfigError("-o names the page of --html; add --html")
    if options.html and (options.watch or options.json):
        raise ConfigError("--html writes a page; leave out --watch and --json")
    with open_store() as store:
        if options.watch:
            from llmb.cli.jobs.watch import watch

            return watch(store, options)
        _refresh(store, _unfinished(store))
        jobs = store.jobs(options.limit, **selected)
        no_jobs = "" if jobs else empty_text(store, options)
        to_retry = [job.job_id for job in store.jobs_to_retry()]
    if options.html:
        from llmb.cli.report.jobs_page import write_jobs_page

        print(write_jobs_page(jobs, options.output or Path("runs.html")))
        return 0
    if options.json:
        for job in jobs:
            print(to_json(job))
        return 0
    print_report(no_jobs or table(jobs, terminal_width()))
    if to_retry:
        print(f"to retry {', '.join(to_retry)}: llmb-run jobs --watch", file=sys.stderr)
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Print the figures and the folder of a run."""
    from dataclasses import replace

    from llmb.cli.profile_pictures import describe_profile
    from llmb.cli.stored_runs import load_run
    from llmb.config.serialization import to_json
    from llmb.launch.run_folder import RunFolder
    from llmb.report.summary import summary
    from llmb.report.terminal.colour import print_report

    with open_store() as store:
        (job,) = _refresh(store, [stored_job(store, options.job_id)])
        retries = [retry.job_id for retry in store.retries_of(job.job_id)]
    run = RunFolder.open(Path(job.run_dir))
    config, result = load_run(run)
    if options.json:
        print(to_json(result))
        return 0
    print_report("\n".join(_describe(job, retries)))
    if job.status == "running":
        result = replace(result, reason=_progress(result))
    if job.status not in ("submitting", "pending"):  # which have no figures
        print_report(f"\n{summary(result)}")
    print(f"\nrun folder: {run.short_path}")
    if not job.going:
        print("".join(f"{line}\n" for line in describe_profile(run, config)), end="")
        if run.report_page.exists():
            print(f"report: {run.short_path_of(run.report_page)}")
    return 0


def _progress(result: Any) -> str:
    """Return how far a running job is; its files alone do not tell whether it was killed."""
    if result.steps_asked is None:
        return "still running"
    return f"still running: {result.steps_done or 0} of {result.steps_asked} steps are done"


def _describe(job: Any, retries: list[str]) -> list[str]:
    """Describe a job beyond its result."""
    from llmb.cli.jobs.job_table import elapsed_s, waited_s
    from llmb.report.terminal.clock_time import format_duration

    now = time.time()
    lines = [f"job {job.job_id}, {job.status}" + (f" ({job.reason})" if job.reason and job.status != "ok" else "")]
    if job.slurm_state:
        facts = {
            "on": job.nodes,
            "waited": format_duration(waited_s(job, now)),
            "ran": format_duration(elapsed_s(job, now)),
        }
        lines.append(f"Slurm: {job.slurm_state}" + "".join(f", {k} {v}" for k, v in facts.items() if v is not None))
    if job.retry_of:
        lines.append(f"attempt {job.attempt}, retry of {job.retry_of}")
    if retries:
        lines.append(f"retried as {', '.join(retries)}")
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
    """Refresh and print the status of the named runs, then retry those that failed and have retries left."""
    from llmb.cli.jobs.auto_retry import retry_failed

    with open_store() as store:
        jobs = [stored_job(store, name) for name in options.job_ids] or _unfinished(store)
        for job in _refresh(store, jobs):
            print(f"{job.job_id}: {job.status}" + (f" ({job.reason})" if job.reason else ""))
        retry_failed(store)
    return 0


def _unfinished(store: Any) -> list[Any]:
    """Return the jobs whose outcome is not known yet."""
    from llmb.results.job_store import GOING

    return store.jobs(statuses=(*GOING, "lost"))


def _refresh(store: Any, jobs: list[Any]) -> list[Any]:
    if not any(job.going or job.status == "lost" for job in jobs):
        return jobs
    from llmb.cli.jobs.polling import Poller

    return Poller(store).refresh(jobs)
