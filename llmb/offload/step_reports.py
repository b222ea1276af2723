"""Reports of steps, made when the device is done with them while Python already issues the next ones.

    reporter = StepReporter(config, workload, recorder, trainer, resumed_at=None)
    reporter.add(trainer.step(1, poll=reporter.report_done))
    reporter.finish()                                   # waits for all issued steps

The device's own events measure a step, so its time does not depend on when Python looks.
"""

import math
from collections import deque

from llmb.config.spec import OutOfCore, RunConfig
from llmb.offload.cuda_streams import StreamEvent
from llmb.offload.trainer import IssuedStep, Trainer
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.run_ending import Diverged
from llmb.runtime.step_log import MeasuredStep, StepReport

MAX_AHEAD = 2  # steps that Python issues ahead of the device


class StepReporter:
    """A step's time is measured from the end of the previous step to its own end."""

    def __init__(
        self, config: RunConfig, workload: OutOfCore, recorder: EventRecorder, trainer: Trainer, resumed_at: int | None
    ):
        self._report, self._trainer = StepReport(config, workload, trainer.plan.gbs, recorder, resumed_at), trainer
        self._issued: deque[IssuedStep] = deque()
        self._last_done: StreamEvent
        self.restart()

    def restart(self) -> None:
        """Measure the next step from here: what happens between two steps counts for neither."""
        self._last_done = self._trainer.streams.record_event("compute")

    def add(self, issued: IssuedStep) -> None:
        """Add an issued step; waits if there are too many."""
        self._issued.append(issued)
        while len(self._issued) > MAX_AHEAD:
            self._issued[0].done.wait()
            self.report_done()

    def report_done(self) -> None:
        """Report the steps that are done; waits for nothing."""
        while self._issued and self._issued[0].done.is_done():
            issued = self._issued.popleft()
            seconds = self._last_done.elapsed_s(issued.done)
            self._last_done = issued.done
            self._report.add(
                MeasuredStep(
                    step=issued.number,
                    seconds=seconds,
                    loss=issued.loss,
                    grad_norm=issued.grad_norm,
                    memory_bytes=self._trainer.arena.device_bytes,
                )
            )
            _stop_if_diverged(issued)

    def finish(self) -> None:
        """Wait for all issued steps and report them."""
        while self._issued:
            self._issued[0].done.wait()
            self.report_done()


def _stop_if_diverged(issued: IssuedStep) -> None:
    for name, value in (("loss", issued.loss), ("grad norm", issued.grad_norm)):
        if not math.isfinite(value):
            raise Diverged(f"{name} became {value} at step {issued.number}")
