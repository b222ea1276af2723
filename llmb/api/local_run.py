"""One run on this machine, started from Python: the same steps as `llmb-run submit`, without its text."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace

from llmb.api.stored_result import Result, of_figures
from llmb.cli.local_check import check_runs_here
from llmb.cli.memory_check import check_memory
from llmb.cli.report.page_writer import write_report
from llmb.cli.submit import execute
from llmb.config.spec import RunConfig
from llmb.events import Event
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunFolder
from llmb.launch.secrets import mask
from llmb.perfmodel.explain.run_prediction import with_prediction
from llmb.report.live_progress import LiveLine


def run(
    config: RunConfig,
    progress: bool = True,
    *,
    environment: Mapping[str, str] | None = None,
    force: bool = False,
    report: bool = True,
) -> Result:
    """Run a configuration here and return its result, which is stored as that of `llmb-run submit` is.

    What cannot run here, or does not fit into memory unless `force`, raises a ConfigError before anything starts. A
    run that fails returns a Result whose `status` and `reason` say so. `environment`: variables for the ranks.
    `report`: write report.html into its folder.

    >>> config = llmb.resolve("pretrain_llama3.1", size="8b", dtype="fp32", gpus=1, proxy=True, steps=3)
    >>> result = llmb.run(config, progress=False)
    >>> result.status, result.job_id, len(result.samples)
    ('ok', 'L1', 3)
    >>> (result.folder / "report.html").exists()
    True
    """
    variables = dict(environment or {})
    config = replace(config, environment=mask({**config.environment, **variables}))
    config = with_prediction(config, install_root(os.environ))
    check_runs_here(config, advice="")
    if config.engine != "openai":
        check_memory([config], {}, local=True, force=force)
    live = LiveLine(config) if progress else None
    show: Callable[[Event], None] = live.show if live else _ignore
    jobs: list[str] = []
    try:
        folder, outcome, figures = execute(config, variables, "local", lambda job, _: jobs.append(job), show)
    finally:
        if live:
            live.close()
    assert isinstance(folder, RunFolder)
    if report:
        write_report(folder)  # that none could be written does not change the outcome
    if outcome.interrupted == signal.SIGINT:
        raise KeyboardInterrupt
    return of_figures(figures, config, folder, jobs[0])


def _ignore(event: Event) -> None:
    """Ignore an event; it is in its file."""
