"""Megatron-Bridge logs (Megatron-LM's too): steps count from 1, and TFLOP/s may stand on a line before the step's own.

    Step Time : 5.74s GPU utilization: 1636.8MODEL_TFLOP/s/GPU
     [2025-12-19 10:49:15] iteration        1/      50 | ... | elapsed time per iteration (ms): 5741.2 | ...
    [Rank 0] (after 1 iterations) memory (GB) | ... | mem-max-allocated-gigabytes: 194.41 | ...

A TFLOP/s line belongs to the next step line of its rank and to no other, so one too few or too many shifts nothing. A
memory line belongs to the step before it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from llmb.events import Event, StepDone
from llmb.results.readers.log_ending import LogOutcome
from llmb.results.readers.log_fields import NUMBER, field, measure, number
from llmb.results.readers.log_lines import Line

SIGNATURE = rb"elapsed time per iteration \(ms\)"

_WORDS = (b"elapsed time per iteration", b"TFLOP/s/GPU", b"mem-max-allocated", b"max allocated")
_ITERATION = re.compile(r"iteration\s+(\d{1,9})\s*/\s*(\d{1,9})")
_MILLISECONDS = field(r"elapsed time per iteration \(ms\)")
_LOSS = field(r"lm loss")
_GRAD_NORM = field(r"grad[ _]norm")
_INLINE_TFLOPS = field(r"throughput per GPU \(TFLOP/s/GPU\)")
_TFLOPS = re.compile(NUMBER + r"\s*(?:MODEL_)?TFLOP/s/GPU")
_MEMORY = (  # the unit in the header of each form: 10^9 bytes, 2^20 bytes
    (field(r"mem-max-allocated-gigabytes"), 1e9),
    (field(r"memory \(MB\).{0,200}?\bmax allocated"), float(1 << 20)),
)


def read(lines: Iterable[bytes | str]) -> Iterator[Event]:
    """Yield the steps of a Megatron-Bridge log, then the outcome."""
    outcome = LogOutcome()
    tflops: dict[int, float | None] = {}  # rank -> from its latest TFLOP/s line, until a step takes it
    pending: StepDone | None = None  # the latest step waits for the memory line that may follow it
    for line in outcome.scanned(lines, _WORDS):
        if "elapsed time per iteration" in line.text:
            step = _step(line, tflops.pop(line.rank, None))
            if step is None:
                outcome.unreadable += 1
            elif outcome.accept(step):
                if pending is not None:
                    yield pending
                pending = step
        elif "TFLOP/s/GPU" in line.text:
            tflops[line.rank] = _tflops(line.text)
        elif pending is not None and pending.memory_bytes is None and (memory := _memory(line.text)) is not None:
            pending = replace(pending, memory_bytes=memory)
    if pending is not None:
        yield pending
    yield from outcome.events()


def _step(line: Line, tflops: float | None) -> StepDone | None:
    match, milliseconds = _ITERATION.search(line.text), measure(_MILLISECONDS, line.text)
    if match is None or milliseconds is None or not int(match[1]):
        return None
    return StepDone(
        rank=line.rank,
        step=int(match[1]),
        steps=int(match[2]),
        seconds=milliseconds / 1000,
        loss=number(_LOSS, line.text),
        grad_norm=number(_GRAD_NORM, line.text),
        memory_bytes=_memory(line.text),  # glued to the step's own line when ranks write at once
        reported_tflops_per_gpu=_tflops(line.text) or tflops,
    )


def _tflops(text: str) -> float | None:
    """Read TFLOP/s: behind its unit within a step's line, before it on a line of its own."""
    return measure(_INLINE_TFLOPS, text) or measure(_TFLOPS, text) if "TFLOP/s/GPU" in text else None


def _memory(text: str) -> int | None:
    for pattern, unit in _MEMORY:
        value = measure(pattern, text)
        if value is not None:
            return round(value * unit)
    return None
