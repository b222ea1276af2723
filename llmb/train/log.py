"""The log on stdout: three lines a step. The first two have the form that readers of Megatron-Bridge logs understand.

The events are the record; the log is for people who watch, and for tools that know only this form. The third line is
ours, save for the peak memory, which those readers know by its name.
"""

import math
from collections.abc import Sequence
from datetime import datetime

from llmb.events import TimeSpent
from llmb.metrics import tokens_per_s
from llmb.spec import Training


def step_lines(
    work: Training,
    step: int,
    seconds: float,
    lr: float,
    loss: float,
    grad_norm: float,
    tflops: float | None,
    mfu: float | None,
    memory_bytes: int,
) -> str:
    """The rate per GPU, then the iteration, then the rates of all: readers pair a rate with the iteration after it."""
    lost = not (math.isfinite(loss) and math.isfinite(grad_norm))
    iteration = (
        f"[{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {step:8d}/{work.steps:8d}",
        f"consumed samples: {step * work.gbs:12d}",
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f}",
        f"learning rate: {lr:.6E}",
        f"global batch size: {work.gbs:5d}",
        f"lm loss: {loss:.6E}",
        "loss scale: 1.0",
        f"grad norm: {grad_norm:.3f}",
        "number of skipped iterations:   0",
        f"number of nan iterations: {lost:3d}",
    )
    rates = (
        f"(after {step} iterations) tokens/s: {_figure(tokens_per_s(work.seqlen, work.gbs, seconds), '.1f')}",
        f"TFLOP/s of a GPU: {_figure(tflops, '.3f')}",
        f"MFU: {_figure(mfu, '.2%')}",
        f"mem-max-allocated-gigabytes: {memory_bytes / 1e9:.3f}",
    )
    lines = [f" {' | '.join(fields)} |" for fields in (iteration, rates)]
    if tflops is not None:
        lines.insert(0, f"Step Time : {seconds:.2f}s GPU utilization: {tflops:.1f}MODEL_TFLOP/s/GPU")
    return "\n".join(lines)


def _figure(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def time_table(spent: Sequence[TimeSpent], source: str) -> str:
    """Where the time of a profiled step went, and by what that was found."""
    rows = [f"{row.kind:<20} {row.seconds_per_step:12.6f} {row.share:7.1%}" for row in spent]
    return "\n".join([f"{'where the time went':<20} {'s per step':>12} {'share':>7}  ({source})", *rows])
