"""Pages that runs and sweeps write when they end; no failure to write one changes the outcome of the run.

Everything is imported only when a page is written, as every command that ends a run calls this module.
"""

from collections.abc import Callable
from pathlib import Path

from llmb.launch.run_folder import RunFolder
from llmb.loadgen.sweep.sweep_folder import SweepFolder


def write_report(run: RunFolder) -> str:
    """Write report.html of a run; return the line that says where it is, or why there is none."""

    def html() -> str:
        from llmb.cli.report.run_records import run_record
        from llmb.report.page.run_page import run_page

        return run_page(run_record(run, run.report_page))

    return _write(run.report_page, html, run.short_path_of(run.report_page))


def write_sweep_report(folder: SweepFolder) -> str:
    """Write report.html of a sweep; return the line that says where it is, or why there is none."""

    def html() -> str:
        from llmb.cli.report.sweep_records import sweep_html

        return sweep_html(folder, folder.report_page)

    return _write(folder.report_page, html, folder.report_page)


def write_page(page: Path, html: str) -> None:
    """Write a page to the file that the user named."""
    from llmb.config.serialization import write_atomic
    from llmb.errors import ConfigError

    if not page.parent.is_dir():
        raise ConfigError(f"-o {page}: cannot write, there is no folder {page.parent}")
    write_atomic(page, html)


def _write(page: Path, html: Callable[[], str], shown_path: Path) -> str:
    from llmb.config.serialization import write_atomic
    from llmb.errors import LlmbError

    try:
        write_atomic(page, html())
    except LlmbError as error:
        return f"report: none was written: {error}"
    except Exception as error:  # a full disk, or a figure that nothing here expects
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        return f"report: none was written: {cause}; llmb-run -v report {shown_path.parent} shows where"
    return f"report: {shown_path}"
