"""`llmb-run report`: one HTML file of a run, a sweep, or several runs side by side."""

import argparse
import os
from pathlib import Path
from typing import Any

from llmb.cli.subcommand import command

EXAMPLES = (
    "llmb-run report L3                      # writes report.html into the run's folder, and prints its path",
    "llmb-run report L3 -o page.html",
    "llmb-run report L3 L4 4711 -o three_runs.html",
    "llmb-run report SWEEP                   # the name or the folder of a sweep",
    "llmb-run jobs --html -o runs.html       # an index of all runs",
    "",
    "the file needs no network and no other file: it can be mailed",
)
SEVERAL = Path("report.html")  # in the current folder


def add_commands(commands: Any) -> None:
    """Register report."""
    parser = command(commands, "report", run, "one HTML page of a run, a sweep, or several runs", *EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a job id, a run folder, or one sweep")
    where = "default: report.html in the run's folder, of several runs in this one"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"the page; {where}")


def run(options: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from llmb.cli.report.page_writer import write_page

    if len(options.runs) == 1 and (sweep := _sweep(options.runs[0])) is not None:
        from llmb.cli.report.sweep_records import sweep_html

        page = shown_path = (options.output or sweep.report_page).absolute()
        text = sweep_html(sweep, page)
    else:
        page, shown_path, text = _runs_page(options.runs, options.output)
    write_page(page, text)
    print(shown_path)
    return 0


def _runs_page(names: list[str], output: Path | None) -> tuple[Path, Path, str]:
    """Return the page's path, the same as it is printed, and its text."""
    from llmb.cli.jobs.jobs import open_run
    from llmb.cli.report.run_records import run_record
    from llmb.report.page.run_page import run_page
    from llmb.report.page.several_page import several_page

    folders = [open_run(name) for name in names]
    if len(folders) == 1:
        folder = folders[0]
        page = (output or folder.report_page).absolute()
        return page, page if output else folder.short_path_of(page), run_page(run_record(folder, page))
    page = (output or SEVERAL).absolute()
    return page, page, several_page(run_record(folder, page) for folder in folders)


def _sweep(name: str) -> Any:
    """Return the folder of a sweep of this path or name; None: it is something else."""
    from llmb.launch.install_root import install_root
    from llmb.loadgen.sweep.sweep_folder import PLAN_FILE, SweepFolder, sweeps_path

    parent = sweeps_path(install_root(os.environ))
    return (
        SweepFolder.open(parent, name) if any((p / PLAN_FILE).is_file() for p in (Path(name), parent / name)) else None
    )
