"""Runs of a search's candidates, one after the other, through the same path as `submit`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

from llmb.cli.run_options import load_recipes
from llmb.config.spec import RunConfig
from llmb.results.result import Result

NamedRun = tuple[tuple[str, ...], RunConfig]  # a configuration and the candidates that it stands for


class MeasuredRuns:
    """Checks all runs before the first starts; `code` is the highest exit code so far."""

    def __init__(self, runs: Sequence[NamedRun], as_json: bool):
        from llmb.cli.local_check import check_runs_here
        from llmb.cli.memory_check import check_memory

        self._runs, self._as_json, self.code = runs, as_json, 0
        for _, config in runs:
            check_runs_here(config)
        check_memory([config for _, config in runs], load_recipes(), local=True)

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], RunConfig, Result]]:
        from llmb.cli.submit import run_one

        for names, config in self._runs:
            with _standard_output(to_stderr=self._as_json):
                code, interrupted, result = run_one(config, {}, False, "local")
            self.code = max(self.code, code)
            yield names, config, result
            if interrupted:
                return


def _standard_output(to_stderr: bool) -> AbstractContextManager[Any]:
    """Send what a run prints to the standard error, so that the output stays JSON."""
    return redirect_stdout(sys.stderr) if to_stderr else nullcontext()
