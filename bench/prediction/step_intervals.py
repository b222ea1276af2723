"""Half widths of the training predictor's 80 % interval, and the rows that it holds. No GPU."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmb.perfmodel.step_time.predictor import interval_class, scarcity

LEVEL = 80.0  # percent of rows inside the interval
FEW_ROWS = 10  # a percentage of fewer says nothing
KINDS: dict[str, Callable[[Any], str]] = {
    "": lambda s: s.scale,
    "dtype": lambda s: s.setup.dtype,
    "engine": lambda s: s.setup.engine,
    "task": lambda s: s.setup.task,
    "GPU": lambda s: s.setup.gpu,
    "model": lambda s: s.model,
}
INSIDE_HEADER = ("kind of run", "rows", "model left out %", "GPU left out %")
INSIDE = """Widths from the other models or GPUs only, as above; kinds of at least 10 rows. The width shipped is the
larger of both, and holds 84 % of the rows of left-out models. It is 1.5 times that of its kind where few models were
published of: fine-tuning, Megatron Bridge of 2026, and fp8 or fp4 in engines other than Megatron. One factor for all
three, chosen by the interval score of left-out models and GPUs (the mean of the width plus ten times what a row is
outside: 0.303 to 0.296, and 0.332 to 0.323 without the factor and with it); LoRA had 50 and 67 % inside without it,
Megatron Bridge of 2026 59 and 56, torchtitan 67 and 56, JAX 100 and 55. A width that grows with the part of
communication, or of all but GEMMs and attention, another one for Blackwell, for low precision or for rare dtypes
lowered the score of left-out models or that of left-out GPUs, not both, or by less. Kinds far from 80 %:

- LoRA: 12 rows of two models, each of which is off as a whole (70b 5 to 14 % too fast, 8b 6 to 14 % too slow).
- JAX, torchtitan and nvfp4 with a GPU left out: two thirds of all rows are of H100, and without them few rows of these
  remain to fit them and their width to.
- torchtitan in fp8 with tp 8 is predicted 14 to 28 % too slow with Llama 70b and 3 to 34 % too fast with 8b.
- Llama 3 405b: GB200 with NeMo of 25.05 and a table in MXFP8 (6 to 23 % too fast), and the fp8 tables of H100 up to
  25.03, whose 7 to 126 layers are predicted 4 to 11 % too slow, but for one row of 2,304 GPUs.
- Lightning and Qwen3 30b: of one description, times were published that differ up to twofold (likely causes below).

What a step consists of hardly tells how far its prediction is off: the part of no term has a correlation beyond 0.41
with the error. So the width has no more kinds than dense models, experts or Mamba, other engines, and these three."""


def half_widths(samples: Sequence[Any], errors: np.ndarray) -> dict[str, float]:
    """Return half the width of the interval by kind of run, from left-out errors."""
    kinds, sizes = np.array([interval_class(s.setup) for s in samples]), relative_errors(samples, errors)
    return {kind: float(np.percentile(sizes[kinds == kind], LEVEL)) for kind in sorted(set(kinds))}


def relative_errors(samples: Sequence[Any], errors: np.ndarray) -> np.ndarray:
    """Return absolute errors over how many times as wide the interval of each row is as those of its kind."""
    return np.abs(errors) / np.array([scarcity(s.setup) for s in samples])


def rows_inside(samples: Sequence[Any], key: Callable[[Any], str], errors: np.ndarray) -> np.ndarray:
    """Return which left-out rows are inside an interval whose width comes from other groups only."""
    inside, sizes = np.zeros(len(samples), dtype=bool), relative_errors(samples, errors)
    for group in {key(s) for s in samples}:
        others = [i for i, s in enumerate(samples) if key(s) != group]
        widths = half_widths([samples[i] for i in others], errors[others])
        everything = float(np.percentile(sizes[others], LEVEL))
        for i in (i for i, s in enumerate(samples) if key(s) == group):
            inside[i] = sizes[i] <= widths.get(interval_class(samples[i].setup), everything)
    return inside


def coverage_rows(samples: Sequence[Any], *inside: np.ndarray) -> list[tuple[object, ...]]:
    """Return the percentage inside by kind of run, a column for each of `inside`; not of kinds with few rows."""
    rows: list[tuple[object, ...]] = []
    for title, key in KINDS.items():
        groups: dict[str, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            groups[key(sample)].append(index)
        rows += [
            (f"{title} {name}".strip(), len(members), *(f"{100 * np.mean(held[members]):.0f}" for held in inside))
            for name, members in sorted(groups.items())
            if len(members) >= FEW_ROWS
        ]
    return rows
