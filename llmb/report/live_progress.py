"""Live progress line of a run. Training: step, tokens/s, TFLOP/s, time left. Serving: requests, tokens/s over the
last seconds and so far, KV cache usage, the queue, time left."""

from collections import deque
from typing import TextIO

from llmb.config.load_settings import LoadSettings
from llmb.config.spec import Inference, RunConfig
from llmb.events import Event, RunStarted, ServingSample, StepDone
from llmb.perfmodel import flops, metrics
from llmb.report.status_line import StatusLine
from llmb.report.table import number
from llmb.report.terminal.clock_time import format_duration

RECENT_S = 5.0  # what "now" means for a rate


class LiveLine:
    """Progress line fed with events."""

    def __init__(self, config: RunConfig, out: TextIO | None = None):
        self._config = config
        self._line = StatusLine(out)
        self._recent: list[float] = []
        self._samples: deque[ServingSample] = deque()  # of the last seconds and of this phase

    def show(self, event: Event) -> None:
        """Draw an event."""
        if isinstance(event, RunStarted) and event.rank == 0:
            server = getattr(self._config.workload, "base_url", None)  # of a load, which is sent from here
            place = server or event.gpu_name or "an unknown device"
            self._line.draw(f"{'preparing the load on' if server else 'started on'} {place}", force=True)
        elif isinstance(event, StepDone) and event.rank == 0 and event.seconds is not None:
            steps = getattr(self._config.workload, "steps", None)
            self._line.draw(self._step(event), fraction=event.step / steps if steps else None)
        elif isinstance(event, ServingSample) and event.rank == 0:
            work = self._config.workload
            if isinstance(work, (Inference, LoadSettings)):
                fraction = _fraction_done(event, _requested(event, work), work)
                self._line.draw(self._serving(event, work, fraction), fraction=fraction)

    def close(self) -> None:
        """End the line, so that what follows starts on a new one."""
        self._line.close()

    def _step(self, event: StepDone) -> str:
        self._recent = [*self._recent[-9:], event.seconds or 0.0]
        seconds = sorted(self._recent)[len(self._recent) // 2]
        work, gpus = self._config.workload, self._config.machine.gpus
        steps = getattr(work, "steps", None)
        parts = [f"step {event.step}/{steps or '?'}"]
        if steps is not None:
            parts.append(f"{format_duration((steps - event.step) * seconds)} left")
        if event.warmup:
            parts.append("warm-up")
        if self._config.one_rank is not None:
            parts.append(f"{number(seconds)} s a step of one rank")
        elif event.tokens and seconds > 0 and not isinstance(work, Inference):
            parts.append(f"{number(event.tokens / seconds)} tokens/s")
            sequence_flops = flops.run_flops_per_sequence(self._config)
            tflops = metrics.tflops_per_gpu(sequence_flops * event.tokens / work.seqlen, seconds, gpus)
            if tflops is not None:
                parts.append(f"{number(tflops)} TFLOP/s{'/GPU' if gpus > 1 else ''}")
        if event.loss is not None:
            parts.append(f"loss {event.loss:.4f}")
        return " | ".join(parts)

    def _serving(self, sample: ServingSample, work: Inference | LoadSettings, fraction: float) -> str:
        requested = _requested(sample, work)
        total = "" if requested is None else f"/{requested}"  # a load of a given duration has no number
        parts = [f"{'warm-up: ' if sample.warmup else ''}{sample.done}{total} requests"]
        if fraction > 0:
            parts.append(f"{format_duration(sample.elapsed_s * (1 - fraction) / fraction)} left")
        recent, so_far = self._recent_rate(sample), _rate(sample.output_tokens, sample.elapsed_s)
        if recent is not None and so_far is not None:
            parts.append(f"{number(recent)} tokens/s now, {number(so_far)} so far")
        if sample.blocks_used is not None and sample.blocks:
            parts.append(f"KV {100 * sample.blocks_used / sample.blocks:.0f} %")
        if sample.running is not None and sample.waiting is not None:
            parts.append(f"{sample.running} running, {sample.waiting} waiting")
        parts.append(f"{format_duration(sample.elapsed_s)} elapsed")
        return " | ".join(parts)

    def _recent_rate(self, sample: ServingSample) -> float | None:
        """Return output tokens/s over the last seconds of this phase."""
        samples = self._samples
        if samples and (samples[-1].warmup != sample.warmup or samples[-1].elapsed_s > sample.elapsed_s):
            samples.clear()
        samples.append(sample)
        while len(samples) > 2 and samples[1].elapsed_s <= sample.elapsed_s - RECENT_S:
            samples.popleft()
        first = samples[0]
        if sample.output_tokens is None or first.output_tokens is None:
            return None
        if first is sample:
            return _rate(sample.output_tokens, sample.elapsed_s)
        return _rate(sample.output_tokens - first.output_tokens, sample.elapsed_s - first.elapsed_s)


def _rate(tokens: int | None, seconds: float) -> float | None:
    return tokens / seconds if tokens is not None and seconds > 0 else None


def _requested(sample: ServingSample, work: Inference | LoadSettings) -> int | None:
    return sample.requests if sample.requests is not None else work.num_requests


def _fraction_done(sample: ServingSample, requested: int | None, work: Inference | LoadSettings) -> float:
    """Return the fraction done, by tokens if their number is known (the first requests end late), else by requests."""
    by_requests = sample.done / requested if requested else 0.0
    if isinstance(work, LoadSettings) and work.duration_s is not None:
        return min(1.0, max(by_requests, sample.elapsed_s / work.duration_s))
    if work.dataset is not None or not sample.output_tokens or not requested:
        return by_requests
    return min(1.0, max(by_requests, sample.output_tokens / (requested * work.osl)))
