"""Drivers of points by the mode of a plan: a server's URL, a server that the sweep starts, or the engine itself."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmb.cli.sweep.in_process_points import InProcessPoints
from llmb.cli.sweep.sweep_loop import Measurement, PointDriver
from llmb.cli.sweep.sweep_server import SweepServer
from llmb.cli.sweep.url_points import UrlPoints, goodput_limits
from llmb.config.load_settings import LoadSettings
from llmb.config.serialization import build
from llmb.loadgen.sweep.sweep_folder import SweepFolder
from llmb.loadgen.sweep.sweep_plan import PointLoad, SweepPlan
from llmb.results.sweep.sweep_points import PointKey

LEAST_QUEUE = 2048


@contextmanager
def open_driver(plan: SweepPlan, folder: SweepFolder, progress: Any) -> Iterator[PointDriver]:
    """Open the driver of a plan; what it started ends with it."""
    if plan.mode == "in_process":
        yield InProcessPoints(plan.configs, progress.on_event)
    elif plan.mode == "url":
        yield UrlPoints(_settings(plan, ""), plan.gpus, progress.on_event, progress.say)
    else:
        with ServedPoints(plan, folder, progress) as driver:
            yield driver


def _settings(plan: SweepPlan, variant: str) -> LoadSettings:
    """Return the load of a variant; a single tier is also the limit of goodput."""
    return replace(build(LoadSettings, plan.configs[variant]["load"], "sweep.json"), slo=goodput_limits(plan.tiers))


class ServedPoints:
    """Driver of points on servers of llmb: one server at a time, one for each variant."""

    def __init__(self, plan: SweepPlan, folder: SweepFolder, progress: Any):
        self._plan, self._folder, self._progress = plan, folder, progress
        self._stack = ExitStack()
        self._variant: str | None = None
        self._points: UrlPoints | None = None

    def __enter__(self) -> "ServedPoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, key: PointKey) -> None:
        """Start the variant's server, unless it runs already."""
        if self._points is None or self._variant != key.variant:
            self._points = self._start(key.variant)
            self._variant = key.variant

    def measure(self, key: PointKey, load: PointLoad, folder: Path) -> Measurement:
        """Measure on the server that `prepare` started."""
        assert self._points is not None
        return self._points.measure(key, load, folder)

    def _start(self, variant: str) -> UrlPoints:
        self._stack.close()
        config = self._plan.configs[variant]
        self._progress.say(f"starting llmb-run serve{f' with {variant}' if variant else ''}")
        queue = max(LEAST_QUEUE, 2 * int(self._plan.ladder[-1]))
        server = self._stack.enter_context(SweepServer(config["arguments"], self._folder.server_log, queue))
        settings = replace(_settings(self._plan, variant), base_url=server.url)
        return UrlPoints(settings, self._plan.gpus, self._progress.on_event, self._progress.say)
