"""The live line while a run goes on. Training: step, tokens/s, TFLOP/s, time left. Serving: requests, tokens/s over the
last seconds and so far, use of the KV cache, the queue, time left."""

from collections import deque
from typing import TextIO

from llmb.config.spec import Inference, RunConfig
from llmb.events import Event, RunStarted, ServingSample, StepDone
from llmb.perfmodel import flops, metrics
from llmb.report.status_line import StatusLine
from llmb.report.table import number

RECENT_S = 5.0  # what "now" means for a rate


class LiveLine:
    """Feed it events; it draws."""

    def __init__(self, config: RunConfig, out: TextIO | None = None):
        self._config = config
        self._line = StatusLine(out)
        self._recent: list[float] = []
        self._samples: deque[ServingSample] = deque()  # of the last seconds and of this phase

    def show(self, event: Event) -> None:
        """Draw what an event tells."""
        if isinstance(event, RunStarted) and event.rank == 0:
            self._line.draw(f"started on {event.gpu_name or 'an unknown device'}", force=True)
        elif isinstance(event, StepDone) and event.rank == 0 and event.seconds is not None:
            self._line.draw(self._step(event))
        elif isinstance(event, ServingSample) and event.rank == 0 and isinstance(self._config.workload, Inference):
            self._line.draw(self._serving(event, self._config.workload))

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
            sequence_flops = flops.train_flops_per_sequence(
                self._config.model, work.seqlen, self._config.flops_convention
            )
            tflops = metrics.tflops_per_gpu(sequence_flops * event.tokens / work.seqlen, seconds, gpus)
            if tflops is not None:
                parts.append(f"{number(tflops)} TFLOP/s")
            parts.append(f"{(work.steps - event.step) * seconds:.0f} s left")
        if event.loss is not None:
            parts.append(f"loss {event.loss:.4f}")
        return " | ".join(parts)

    def _serving(self, sample: ServingSample, work: Inference) -> str:
        asked = sample.requests if sample.requests is not None else work.num_requests
        parts = [f"{'warm-up: ' if sample.warmup else ''}{sample.done}/{asked} requests"]
        recent, so_far = self._recent_rate(sample), _rate(sample.output_tokens, sample.elapsed_s)
        if recent is not None and so_far is not None:
            parts.append(f"{number(recent)} tokens/s now, {number(so_far)} so far")
        if sample.blocks_used is not None and sample.blocks:
            parts.append(f"KV {100 * sample.blocks_used / sample.blocks:.0f} %")
        if sample.running is not None and sample.waiting is not None:
            parts.append(f"{sample.running} running, {sample.waiting} waiting")
        parts.append(f"{sample.elapsed_s:.0f} s")
        share = _share_done(sample, asked, work)
        if share > 0:
            parts.append(f"{sample.elapsed_s * (1 - share) / share:.0f} s left")
        return " | ".join(parts)

    def _recent_rate(self, sample: ServingSample) -> float | None:
        """Output tokens/s over the last seconds of this phase."""
        kept = self._samples
        if kept and (kept[-1].warmup != sample.warmup or kept[-1].elapsed_s > sample.elapsed_s):
            kept.clear()
        kept.append(sample)
        while len(kept) > 2 and kept[1].elapsed_s <= sample.elapsed_s - RECENT_S:
            kept.popleft()
        first = kept[0]
        if sample.output_tokens is None or first.output_tokens is None:
            return None
        if first is sample:
            return _rate(sample.output_tokens, sample.elapsed_s)
        return _rate(sample.output_tokens - first.output_tokens, sample.elapsed_s - first.elapsed_s)


def _rate(tokens: int | None, seconds: float) -> float | None:
    return tokens / seconds if tokens is not None and seconds > 0 else None


def _share_done(sample: ServingSample, asked: int, work: Inference) -> float:
    """By tokens where their number is known beforehand, as the first requests end late; else by requests."""
    by_requests = sample.done / asked if asked else 0.0
    if work.dataset is not None or not sample.output_tokens or not asked:
        return by_requests
    return min(1.0, max(by_requests, sample.output_tokens / (asked * work.osl)))
