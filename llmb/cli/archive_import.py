"""`llmb-run archive` and `import`: pack runs into one file, and add the runs of such a file."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llmb.cli.subcommand import command


def add_commands(commands: Any) -> None:
    """Register archive and import."""
    archive = command(
        commands, "archive", run_archive, "pack runs into one file, without profiles and secrets",
        "llmb-run archive", "llmb-run archive L3 4711 --output for-a-friend.tar.zst",
        "llmb-run archive --since 7d --anonymous",
    )  # fmt: skip
    archive.add_argument("jobs", nargs="*", metavar="JOB", help="job ids or run folders; all that have ended if none")
    archive.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a new file; default llmb-archive_...tar.zst"
    )
    archive.add_argument("--since", metavar="WHEN", help="only those made since: 2h, 3d, 2026-01-31")
    archive.add_argument("--anonymous", action="store_true", help="without user names and home folders in paths")
    archive.add_argument("--json", action="store_true", help="what was written, as JSON")

    importing = command(
        commands, "import", run_import, "bring in the runs of an archive from another cluster",
        "llmb-run import llmb-archive_0.1.0_20260131-120000.tar.zst", "llmb-run import runs.tar.zst --as eos",
    )  # fmt: skip
    importing.add_argument("file", type=Path, help="what llmb-run archive wrote")
    importing.add_argument("--as", dest="cluster", metavar="NAME", help="name of the cluster; default: as the runs say")


def run_archive(options: argparse.Namespace) -> int:
    """Pack runs, verify the file, print what was left out."""
    from datetime import UTC, datetime

    from llmb import __version__
    from llmb.config.serialization import to_plain
    from llmb.launch.archive.checksummed_file import default_archive_name
    from llmb.launch.archive.pack import write_archive

    runs, unfinished = _select_runs(options)
    output = options.output or default_archive_name(__version__, f"{datetime.now(UTC):%Y%m%d-%H%M%S}")
    with _InterruptibleProgress(f"archiving {len(runs)} runs") as progress:
        done = write_archive(runs, output, os.environ, anonymous=options.anonymous, progress=progress)
    if options.json:
        import json

        print(json.dumps({**to_plain(done), "output": str(output), "unfinished": unfinished}))
        return 0
    size = f"{_size(output.stat().st_size)} ({_size(done.bytes)} unpacked)"
    print(f"{output}: {done.runs} runs, {done.files} files, {size}")
    print(f"checksum {done.checksum}")
    if unfinished:
        subject = "1 run that has" if unfinished == 1 else f"{unfinished} runs that have"
        print(f"left out: {subject} not ended", file=sys.stderr)
    if done.left_out:
        print(f"left out, as secrets in them cannot be seen: {_abbreviate(done.left_out)}", file=sys.stderr)
    return 0


def run_import(options: argparse.Namespace) -> int:
    """Unpack runs beside the existing ones and add them to the store."""
    from llmb.cli.jobs.damaged_runs import damaged_row, report_damage
    from llmb.cli.jobs.imported_rows import add_imported
    from llmb.cli.jobs.jobs import open_store
    from llmb.errors import LaunchError
    from llmb.launch.archive.import_runs import import_archive
    from llmb.launch.archive.run_origin import read_origin
    from llmb.launch.install_root import install_root

    with _InterruptibleProgress(f"importing {options.file.name}") as progress:
        done = import_archive(options.file, install_root(os.environ), options.cluster, progress)
    with open_store() as store:
        unreadable = 0
        stored = {job.run_dir for job in store.jobs()}
        for run in (*done.new, *done.existing):  # a known one may lack its row, where an import was killed
            try:
                origin = read_origin(run)
                if origin is not None and str(run.path) not in stored:
                    add_imported(store, run, origin)
            except LaunchError:  # of the store
                raise
            except Exception as error:
                report_damage(run, error)
                store.put(damaged_row(run, error))
                unreadable += 1
    clusters = ", ".join(sorted({origin.cluster for run in done.new if (origin := read_origin(run))}))
    source = f" from {clusters}" if clusters else ""
    print(f"{len(done.new)} runs imported{source}, {len(done.existing)} were here already")
    return 2 if unreadable else 0


def _select_runs(options: argparse.Namespace) -> tuple[list[Any], int]:
    """Return the runs to pack and the number of unfinished ones left out; naming an unfinished run is an error."""
    from llmb.cli.jobs.job_table import parse_since
    from llmb.cli.jobs.jobs import open_run
    from llmb.errors import ConfigError
    from llmb.launch.install_root import install_root
    from llmb.launch.run_folder import RunFolder

    is_ended = _ended_check()
    if options.jobs:
        runs = [open_run(name) for name in options.jobs]
        running = [name for name, run in zip(options.jobs, runs, strict=True) if not is_ended(run)]
        if running:
            raise ConfigError(
                f"not ended yet: {', '.join(running)}; wait, or end it: llmb-run jobs cancel {running[0]}"
            )
    else:
        runs = list(_readable(RunFolder.find_all(install_root(os.environ))))
    if options.since:
        since = parse_since(options.since)
        runs = [run for run in runs if run.created_at >= since]
    ended = [run for run in runs if is_ended(run)]
    return ended, len(runs) - len(ended)


def _readable(runs: Iterable[Any]) -> Iterator[Any]:
    """Yield the runs that can be packed; the others are reported and left out."""
    from llmb.cli.jobs.damaged_runs import report_damage
    from llmb.launch.archive.pack import check_packable

    for run in runs:
        try:
            check_packable(run)
            yield run
        except Exception as error:
            report_damage(run, error)


def _ended_check() -> Callable[[Any], bool]:
    """Return a check whether a run has ended; only the store knows of jobs that Slurm will restart."""
    from llmb.cli.jobs.jobs import open_store
    from llmb.launch.archive.pack import has_ended
    from llmb.results.job_store import GOING

    with open_store() as store:
        running = {job.run_dir for job in store.jobs(statuses=GOING, launcher="slurm")}
    return lambda run: str(run.path) not in running and has_ended(run)


class _InterruptibleProgress:
    """Progress line; SIGTERM and SIGHUP act as Ctrl-C, so that nothing half-done is left."""

    def __init__(self, label: str):
        from llmb.report.status_line import StatusLine

        self._label, self._line = label, StatusLine()
        self._done = self._drawn = 0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "_InterruptibleProgress":
        if threading.current_thread() is threading.main_thread():  # no other thread may ask for signals
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous_handlers[number] = signal.signal(number, signal.default_int_handler)
        return self

    def __call__(self, count: int) -> None:
        self._done += count
        if self._done - self._drawn >= 64 * 2**20:
            self._drawn = self._done
            self._line.draw(f"{self._label}: {_size(self._done)} processed")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._line.close()


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"


def _abbreviate(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
