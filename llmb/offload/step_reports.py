"""Says what each step came to when the device is done with it, while Python already issues the steps behind it.

    reports = Reports(config, work, record, trainer, resumed_at=None)
    reports.add(trainer.step(1, between=reports.tell))
    reports.finish()                                    # waits for what is under way

The device's own events tell when a step ended, so its time does not depend on when Python looks.
"""

import math
import time
from collections import deque

from llmb.config.spec import OutOfCore, RunConfig
from llmb.events import StepDone
from llmb.offload.cuda_streams import Moment
from llmb.offload.trainer import Issued, Trainer
from llmb.runtime.recorder import Record
from llmb.runtime.run_ending import Diverged
from llmb.runtime.step_log import LoggedStep, step_lines

UNDER_WAY = 2  # steps that Python issues ahead of the device, at most


class Reports:
    """A step's time is from the end of the one before to its own end: all that happens is in it."""

    def __init__(self, config: RunConfig, work: OutOfCore, record: Record, trainer: Trainer, resumed_at: int | None):
        self._config, self._work, self._record, self._trainer = config, work, record, trainer
        self._resumed_at = resumed_at
        self._issued: deque[Issued] = deque()
        self._before: Moment
        self.restart()

    def restart(self) -> None:
        """The next step is measured from here: what came between two steps is in neither."""
        self._before = self._trainer.lanes.moment("compute")

    def add(self, issued: Issued) -> None:
        """One more is under way; waits if there are too many."""
        self._issued.append(issued)
        while len(self._issued) > UNDER_WAY:
            self._issued[0].ended.wait()
            self.tell()

    def tell(self) -> None:
        """Whatever is done by now; waits for nothing."""
        while self._issued and self._issued[0].ended.is_past():
            issued = self._issued.popleft()
            seconds = self._before.seconds_until(issued.ended)
            self._before = issued.ended
            self._report(issued, seconds)
            _stop_if_diverged(issued)

    def finish(self) -> None:
        """All that are under way."""
        while self._issued:
            self._issued[0].ended.wait()
            self.tell()

    def _report(self, issued: Issued, seconds: float) -> None:
        work, plan, step = self._work, self._trainer.plan, issued.number
        loss, grad_norm, memory = issued.loss, issued.grad_norm, self._trainer.arena.device_bytes
        self._record.add(
            StepDone(
                time=time.time(),
                step=step,
                steps=work.steps,
                seconds=seconds,
                tokens=plan.step_tokens,
                loss=loss if math.isfinite(loss) else None,  # JSON has no NaN; the last event names it
                grad_norm=grad_norm if math.isfinite(grad_norm) else None,
                memory_bytes=memory,
                warmup=step < work.window[0] or step == self._resumed_at,
            )
        )
        logged = LoggedStep(
            step=step,
            steps=work.steps,
            gbs=plan.gbs,
            seqlen=plan.seqlen,
            seconds=seconds,
            lr=self._trainer.lr(step),
            loss=loss,
            grad_norm=grad_norm,
            memory_bytes=memory,
        )
        print(step_lines(self._config, logged), flush=True)


def _stop_if_diverged(issued: Issued) -> None:
    for name, value in (("loss", issued.loss), ("grad norm", issued.grad_norm)):
        if not math.isfinite(value):
            raise Diverged(f"{name} became {value} at step {issued.number}")
