"""Log on stdout: three lines per step, the first two in the format that parsers of Megatron-Bridge logs read.

Results come from the events; the log is for people, and for tools that know only this format. The third line is ours,
except for the peak memory, which those parsers know by its name.
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
    """Values printed for one step."""

    step: int
    steps: int  # of the whole run
    gbs: int
    seqlen: int
    seconds: float
    lr: float
    loss: float
    grad_norm: float
    memory_bytes: int


def format_step(config: RunConfig, logged: LoggedStep) -> str:
    """Return TFLOP/s per GPU, the iteration, then total rates; parsers pair a rate with the iteration after it."""
    flops = logged.gbs * train_flops_per_sequence(config.model, logged.seqlen, config.flops_convention)
    tflops = tflops_per_gpu(flops, logged.seconds, config.parallel.world_size)
    utilization = mfu(tflops, peak_flops(config.machine.gpu, config.precision.dtype))
    is_nan = not (math.isfinite(logged.loss) and math.isfinite(logged.grad_norm))
    iteration = (
        f"[{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {logged.step:8d}/{logged.steps:8d}",
        f"consumed samples: {logged.step * logged.gbs:12d}",
        f"elapsed time per iteration (ms): {logged.seconds * 1e3:.1f}",
        f"learning rate: {logged.lr:.6E}",
        f"global batch size: {logged.gbs:5d}",
        f"lm loss: {logged.loss:.6E}",
        "loss scale: 1.0",
        f"grad norm: {logged.grad_norm:.3f}",
        "number of skipped iterations:   0",
        f"number of nan iterations: {is_nan:3d}",
    )
    rate = tokens_per_s(logged.seqlen, logged.gbs, logged.seconds)
    rates = (
        f"(after {logged.step} iterations) tokens/s: {_format(rate, '.1f')}",
        f"TFLOP/s of a GPU: {_format(tflops, '.3f')}",
        f"MFU: {_format(utilization, '.2%')}",
        f"mem-max-allocated-gigabytes: {logged.memory_bytes / 1e9:.3f}",
    )
    lines = [f" {' | '.join(fields)} |" for fields in (iteration, rates)]
    if tflops is not None:
        lines.insert(0, f"Step Time : {logged.seconds:.2f}s GPU utilization: {tflops:.1f}MODEL_TFLOP/s/GPU")
    return "\n".join(lines)


def _format(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)
