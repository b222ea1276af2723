"""Report of a step: an event, and three lines on stdout, the first two as parsers of Megatron-Bridge logs read them.

Results come from the events; the log is for people, and for tools that know only this format. The third line is ours,
except for the peak memory, which those parsers know by its name.
"""

import math
import time
from dataclasses import dataclass
from datetime import datetime

from llmb.config.spec import OutOfCore, RunConfig, Training
from llmb.events import StepDone
from llmb.perfmodel.flops import run_flops_per_sequence
from llmb.perfmodel.hardware import peak_flops
from llmb.perfmodel.metrics import mfu, tflops_per_gpu, tokens_per_s
from llmb.runtime.adamw_settings import learning_rate
from llmb.runtime.recorder import EventRecorder


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One step of a run."""

    step: int
    seconds: float
    busy_s: float | None = None  # not spent waiting for other ranks; None: unknown
    loss: float | None  # this and the next: None of one rank alone, which does not have the sums over ranks
    grad_norm: float | None
    memory_bytes: int


class StepReport:
    """Reporter of the steps of a run, of `gbs` sequences each."""

    def __init__(
        self, config: RunConfig, workload: Training | OutOfCore, gbs: int, recorder: EventRecorder, resumed: int | None
    ):
        self._config, self._workload, self._gbs, self._recorder = config, workload, gbs, recorder
        self._resumed = resumed  # first step of this process after a resume

    def add(self, done: MeasuredStep) -> None:
        """Record a step as an event of this rank and, on rank 0, print it."""
        workload = self._workload
        self._recorder.add(
            StepDone(
                time=time.time(),
                rank=self._recorder.rank,
                step=done.step,
                steps=workload.steps,
                seconds=done.seconds,
                busy_s=done.busy_s,
                tokens=self._gbs * workload.seqlen,
                loss=_finite(done.loss),
                grad_norm=_finite(done.grad_norm),
                memory_bytes=done.memory_bytes,
                warmup=done.step < workload.window[0] or done.step == self._resumed,
            )
        )
        if self._recorder.rank == 0:
            print(self._lines(done), flush=True)

    def _lines(self, done: MeasuredStep) -> str:
        """Return TFLOP/s per GPU, the iteration, then total rates; parsers pair a rate with the iteration after it."""
        config, workload, gbs = self._config, self._workload, self._gbs
        flops = gbs * run_flops_per_sequence(config)
        tflops = tflops_per_gpu(flops, done.seconds, config.parallel.world_size)
        utilization = mfu(tflops, peak_flops(config.machine.gpu, config.precision.dtype))
        is_nan = any(value is not None and not math.isfinite(value) for value in (done.loss, done.grad_norm))
        iteration = (
            f"[{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {done.step:8d}/{workload.steps:8d}",
            f"consumed samples: {done.step * gbs:12d}",
            f"elapsed time per iteration (ms): {done.seconds * 1e3:.1f}",
            f"learning rate: {learning_rate(done.step, workload):.6E}",
            f"global batch size: {gbs:5d}",
            f"lm loss: {_format(done.loss, '.6E')}",
            "loss scale: 1.0",
            f"grad norm: {_format(done.grad_norm, '.3f')}",
            "number of skipped iterations:   0",
            f"number of nan iterations: {is_nan:3d}",
        )
        rates: tuple[str, ...] = (
            f"(after {done.step} iterations) "
            f"tokens/s: {_format(tokens_per_s(workload.seqlen, gbs, done.seconds), '.1f')}",
            f"TFLOP/s of a GPU: {_format(tflops, '.3f')}",
            f"MFU: {_format(utilization, '.2%')}",
            f"mem-max-allocated-gigabytes: {done.memory_bytes / 1e9:.3f}",
        )
        if config.one_rank is not None:  # a rate would be that of a cluster without communication
            alone = f"(after {done.step} iterations) one rank of {config.parallel.world_size} without communication"
            rates, tflops = (alone, rates[-1]), None
        lines = [f" {' | '.join(fields)} |" for fields in (iteration, rates)]
        if tflops is not None:
            lines.insert(0, f"Step Time : {done.seconds:.2f}s GPU utilization: {tflops:.1f}MODEL_TFLOP/s/GPU")
        return "\n".join(lines)


def _finite(value: float | None) -> float | None:
    """Return a value as JSON has it, without NaN; the last event of a run reports one."""
    return value if value is not None and math.isfinite(value) else None


def _format(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)
