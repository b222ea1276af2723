"""torchtitan logs: `[titan] ... step: 10  loss: 7.1053  grad_norm: 1.2  memory: 33.70GiB(42.61%)  tps: 7,450  ...`

It prints tokens per second for each GPU instead of seconds. Seconds follow from it only where the log also says how
many tokens make a step and how many GPUs share them; they are then a mean over the steps since the line before.
"""

import math
import re
from collections.abc import Iterable, Iterator

from llmb.events import Event, StepDone
from llmb.results.readers.log_ending import LogOutcome
from llmb.results.readers.log_fields import field, measure, number
from llmb.results.readers.log_lines import Line

SIGNATURE = rb"step:[^\n]{1,30}loss:[^\n]{1,160}tps:"  # colours may stand between

GIB = 1 << 30

_WORDS = (b"tps:", b"Training completed", b"total steps", b"global batch size", b"sequence length", b"device mesh")
_STEP = re.compile(r"\bstep:\s*(\d{1,9})\b")
_LOSS = field(r"\bloss")
_GRAD_NORM = field(r"\bgrad_norm")
_MEMORY = re.compile(r"\bmemory:\s*(\d{1,6}(?:\.\d{1,6})?)\s*GiB")
_TPS = field(r"\btps")
_TFLOPS = field(r"\btflops")
_FACTS = {
    "steps": re.compile(r"total steps (\d{1,9})\b"),
    "batch": re.compile(r"global batch size (\d{1,9})\b"),
    "seqlen": re.compile(r"sequence length (\d{1,9})\b"),
}
_MESH = re.compile(r"device mesh with \[[^\]]*\], \[((?:\d{1,6}(?:, )?){1,9})\]")


def read(lines: Iterable[bytes | str]) -> Iterator[Event]:
    """Yield the logged steps, then the outcome."""
    outcome, facts, completed = LogOutcome(), dict[str, int](), False
    for line in outcome.scanned(lines, _WORDS):
        if "tps:" in line.text:
            step = _step(line, facts)
            if step is None:
                outcome.unreadable += 1
            elif outcome.accept(step):
                yield step
            continue
        completed = completed or "Training completed" in line.text
        facts |= {name: int(match[1]) for name, pattern in _FACTS.items() if (match := pattern.search(line.text))}
        if match := _MESH.search(line.text):
            facts["gpus"] = math.prod(map(int, match[1].split(",")))
    yield from outcome.events(finished=True if completed and outcome.last else None)


def _step(line: Line, facts: dict[str, int]) -> StepDone | None:
    match, rate = _STEP.search(line.text), measure(_TPS, line.text)
    if match is None or rate is None or not int(match[1]):
        return None
    tokens, gpus = facts.get("batch", 0) * facts.get("seqlen", 0) or None, facts.get("gpus")
    memory = _MEMORY.search(line.text)
    return StepDone(
        rank=line.rank,
        step=int(match[1]),
        steps=facts.get("steps"),
        seconds=tokens / (rate * gpus) if tokens and gpus else None,
        tokens=tokens,
        loss=number(_LOSS, line.text),
        grad_norm=number(_GRAD_NORM, line.text),
        memory_bytes=round(float(memory[1]) * GIB) if memory else None,
        reported_tflops_per_gpu=measure(_TFLOPS, line.text),
        reported_tokens_per_s_per_gpu=rate,
    )
