"""The live line while a run goes on: step, tokens/s, TFLOP/s, time left."""

from typing import TextIO

from llmb import costs, metrics
from llmb.events import Event, RequestDone, RunStarted, StepDone
from llmb.report.statusline import StatusLine
from llmb.report.table import number
from llmb.spec import Inference, RunConfig


class LiveLine:
    """Feed it events; it draws."""

    def __init__(self, config: RunConfig, out: TextIO | None = None):
        self._config = config
        self._line = StatusLine(out)
        self._recent: list[float] = []
        self._requests = 0

    def show(self, event: Event) -> None:
        """Draw what an event tells."""
        if isinstance(event, RunStarted) and event.rank == 0:
            self._line.draw(f"started on {event.gpu_name or 'an unknown device'}", force=True)
        elif isinstance(event, StepDone) and event.rank == 0 and event.seconds is not None:
            self._line.draw(self._step(event))
        elif isinstance(event, RequestDone) and isinstance(self._config.workload, Inference):
            self._requests += 1
            self._line.draw(f"request {self._requests}/{self._config.workload.num_requests}")

    def close(self) -> None:
        """End the line, so that what follows starts on a new one."""
        self._line.close()

    def _step(self, event: StepDone) -> str:
        self._recent = [*self._recent[-9:], event.seconds or 0.0]
        seconds = sorted(self._recent)[len(self._recent) // 2]
        work, gpus = self._config.workload, self._config.machine.gpus
        parts = [f"step {event.step}/{getattr(work, 'steps', '?')}"]
        if event.warmup:
            parts.append("warm-up")
        if event.tokens and seconds > 0 and not isinstance(work, Inference):
            parts.append(f"{number(event.tokens / seconds)} tokens/s")
            flops = costs.train_flops_per_sequence(self._config.model, work.seqlen, self._config.flops_convention)
            tflops = metrics.tflops_per_gpu(flops * event.tokens / work.seqlen, seconds, gpus)
            if tflops is not None:
                parts.append(f"{number(tflops)} TFLOP/s")
            parts.append(f"{(work.steps - event.step) * seconds:.0f} s left")
        if event.loss is not None:
            parts.append(f"loss {event.loss:.4f}")
        return " | ".join(parts)
