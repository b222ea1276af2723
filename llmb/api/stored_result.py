"""A stored run as one object: its figures, configuration, folder and raw samples."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.api.html_table import html_table, section
from llmb.api.inline_page import InlinePage
from llmb.api.sample_rows import sample_rows
from llmb.cli.jobs.jobs import open_run
from llmb.cli.report.page_writer import write_page
from llmb.cli.report.run_records import run_record
from llmb.cli.stored_runs import load_events, load_run
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.events import RequestDone, StepDone
from llmb.launch.run_folder import RunFolder
from llmb.report.page.run_page import run_page
from llmb.report.summary import DISTRIBUTION_HEADER, FIGURE_HEADER, distribution_rows, figure_rows, summary
from llmb.report.table import number
from llmb.results.job_store import Job
from llmb.results.result import Result as Figures

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(Figures):
    """One run: every figure of result.json as an attribute, None where unknown, and the run that it comes from.

    `print(result)` shows what `llmb-run submit` ends with, a notebook shows it as a table.

    >>> result = llmb.load("L1")
    >>> result.status, result.dtype, result.config.workload.steps
    ('ok', 'fp32', 3)
    >>> [(step.step, step.warmup) for step in result.samples]
    [(1, True), (2, False), (3, False)]
    >>> result.step_time_s.n, result.tokens_per_s > 0, result.mfu
    (2, True, None)
    """

    config: RunConfig = field(compare=False)
    folder: Path
    job_id: str | None

    @cached_property
    def samples(self) -> tuple[StepDone, ...] | tuple[RequestDone, ...]:
        """Steps of training or requests of serving, as they were recorded, warm-up included and marked."""
        events = load_events(RunFolder.open(self.folder), self.config)
        requests = tuple(event for event in events if isinstance(event, RequestDone))
        if requests:
            return requests
        steps = [event for event in events if isinstance(event, StepDone)]
        rank = min((event.rank for event in steps), default=0)  # some engines log on the last
        return tuple(event for event in steps if event.rank == rank)

    def to_frame(self) -> "pandas.DataFrame":
        """Return the samples as a pandas DataFrame, a row per step or request; latencies of requests in ms.

        >>> frame = llmb.load("L1").to_frame()  # doctest: +SKIP
        >>> frame[~frame.warmup].seconds.median()  # doctest: +SKIP
        0.2991
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ConfigError("to_frame() needs pandas, which is not installed: pip install pandas") from error
        return DataFrame(sample_rows(self.samples))

    def report(self, path: str | Path | None = None) -> InlinePage:
        """Write the HTML page of `llmb-run report`, into the run's folder by default; a notebook shows it.

        >>> page = llmb.load("L1").report()
        >>> page.path.name
        'report.html'
        """
        folder = RunFolder.open(self.folder)
        page = (folder.report_page if path is None else Path(path)).absolute()
        write_page(page, run_page(run_record(folder, page)))
        return InlinePage(page)

    def __repr__(self) -> str:
        rate = self.output_tokens_per_s if self.tokens_per_s is None else self.tokens_per_s
        speed = "" if rate is None else f", {number(rate)} tokens/s"
        return f"<llmb.Result {self.job_id or self.folder}: {self.name}, {self.status}{speed}>"

    def __str__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        distributions = list(distribution_rows(self))
        return section(
            f"{self.name}: {self.status}{reason}",
            html_table(FIGURE_HEADER, figure_rows(self)),
            html_table(DISTRIBUTION_HEADER, distributions) if distributions else "",
            notes=[f"{caution.code}: {caution.text}" for caution in self.warnings],
        )


def load(run: str | Path | Job) -> Result:
    """Return a stored run by its job id, its folder or its row of `llmb.runs()`.

    >>> llmb.load("L1").status
    'ok'
    >>> llmb.load("L99")
    Traceback (most recent call last):
    llmb.errors.ConfigError: no job 'L99'; the newest are: L1
    """
    folder = open_run(run.run_dir if isinstance(run, Job) else str(run))
    config, figures = load_run(folder)
    return of_figures(figures, config, folder, run.job_id if isinstance(run, Job) else folder.job_id)


def of_figures(figures: Figures, config: RunConfig, folder: RunFolder, job_id: str | None) -> Result:
    """Return figures together with the run that they come from."""
    values: dict[str, Any] = {each.name: getattr(figures, each.name) for each in fields(Figures)}
    return Result(**values, config=config, folder=folder.path, job_id=job_id)
