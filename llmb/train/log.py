"""The log on stdout: two lines a step, in the form that readers of Megatron-Bridge logs understand.

The events are the record; the log is for people who watch, and for tools that know only this form.
"""

import math
from datetime import datetime

from llmb.spec import Training


def step_lines(
    work: Training, step: int, seconds: float, tflops: float | None, lr: float, loss: float, grad_norm: float
) -> str:
    """The rate per GPU, then the iteration: readers pair a rate with the iteration line after it."""
    lost = not (math.isfinite(loss) and math.isfinite(grad_norm))
    fields = (
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
    iteration = f" {' | '.join(fields)} |"
    if tflops is None:
        return iteration
    return f"Step Time : {seconds:.2f}s GPU utilization: {tflops:.1f}MODEL_TFLOP/s/GPU\n{iteration}"
