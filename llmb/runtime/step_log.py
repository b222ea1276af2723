"""The log on stdout: three lines a step. The first two have the form that readers of Megatron-Bridge logs understand.

The events are the record; the log is for people who watch, and for tools that know only this form. The third line is
ours, save for the peak memory, which those readers know by its name.
"""

import math
from dataclasses import dataclass
from datetime import datetime

from llmb.config.spec import RunConfig
from llmb.perfmodel.flops import train_flops_per_sequence
from llmb.perfmodel.hardware import peak_flops
from llmb.perfmodel.metrics import mfu, tflops_per_gpu, tokens_per_s


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """What is printed of a step."""

    step: int
    steps: int  # asked for in all
    gbs: int
    seqlen: int
    seconds: float
    lr: float
    loss: float
    grad_norm: float
    memory_bytes: int


def step_lines(config: RunConfig, done: LoggedStep) -> str:
    """The rate per GPU, then the iteration, then the rates of all: readers pair a rate with the iteration after it."""
    flops = done.gbs * train_flops_per_sequence(config.model, done.seqlen, config.flops_convention)
    tflops = tflops_per_gpu(flops, done.seconds, config.parallel.world_size)
    utilisation = mfu(tflops, peak_flops(config.machine.gpu, config.precision.dtype))
    lost = not (math.isfinite(done.loss) and math.isfinite(done.grad_norm))
    iteration = (
        f"[{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {done.step:8d}/{done.steps:8d}",
        f"consumed samples: {done.step * done.gbs:12d}",
        f"elapsed time per iteration (ms): {done.seconds * 1e3:.1f}",
        f"learning rate: {done.lr:.6E}",
        f"global batch size: {done.gbs:5d}",
        f"lm loss: {done.loss:.6E}",
        "loss scale: 1.0",
        f"grad norm: {done.grad_norm:.3f}",
        "number of skipped iterations:   0",
        f"number of nan iterations: {lost:3d}",
    )
    rate = tokens_per_s(done.seqlen, done.gbs, done.seconds)
    rates = (
        f"(after {done.step} iterations) tokens/s: {_figure(rate, '.1f')}",
        f"TFLOP/s of a GPU: {_figure(tflops, '.3f')}",
        f"MFU: {_figure(utilisation, '.2%')}",
        f"mem-max-allocated-gigabytes: {done.memory_bytes / 1e9:.3f}",
    )
    lines = [f" {' | '.join(fields)} |" for fields in (iteration, rates)]
    if tflops is not None:
        lines.insert(0, f"Step Time : {done.seconds:.2f}s GPU utilization: {tflops:.1f}MODEL_TFLOP/s/GPU")
    return "\n".join(lines)


def _figure(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
