"""Ranking of layouts: published pairs of one training in two layouts, and whether the prediction orders them.

    pairs = layout_pairs(samples)
    ranking_rows(pairs, errors, left_out_errors)      # of the table with RANKING_HEADER

What `llmb-run tune` needs is the ratio of two step times: an error that all layouts of a model share does not count.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any, Protocol

import numpy as np

from llmb.perfmodel.step_time.predictor import interval_class
from llmb.perfmodel.step_time.published_rows import PublishedRow
from llmb.perfmodel.step_time.step_setup import StepSetup

RESOLUTION = 0.03  # least ratio of two layouts whose order counts: what the same layout differs by between releases
FURTHEST_SCALE = 2.0  # times as many GPUs at most
RANKING_HEADER = (
    "pairs", "count", "median %", "p90 %", "right order",
    "median %, model left out", "p90 %, model left out", "right order, model left out",
)  # fmt: skip
RANKING_MISSES = """The largest errors are pairs of four tables of Qwen3 30B on H100 (lines 524 to 527), in which steps
of like layouts take two times as long as in others; nothing in their layouts explains it."""


class MeasuredRun(Protocol):
    """A published row with its step time."""

    @property
    def row(self) -> PublishedRow: ...
    @property
    def setup(self) -> StepSetup: ...
    @property
    def seconds(self) -> float: ...
    @property
    def model(self) -> str: ...


@dataclass(frozen=True)
class LayoutPair:
    """Two layouts of the same training, with the rows of both that have about as many GPUs."""

    changed: frozenset[str]  # keys of layout_of
    rows: tuple[tuple[int, int], ...]  # indices of samples: first layout, second layout
    samples: Sequence[MeasuredRun]

    @cached_property
    def measured(self) -> float:
        """Log of the second layout's tokens/s/GPU over the first's; positive: it is faster."""
        return float(np.mean([_log_speed(self.samples[j]) - _log_speed(self.samples[i]) for i, j in self.rows]))

    @property
    def one_engine(self) -> bool:
        """Return whether both ran in one generation of an engine."""
        return len({sample.setup.engine for sample in self._firsts}) == 1

    @property
    def kind(self) -> str:
        return interval_class(self._firsts[0].setup)

    @property
    def _firsts(self) -> tuple[MeasuredRun, MeasuredRun]:
        i, j = self.rows[0]
        return self.samples[i], self.samples[j]

    def error(self, errors: np.ndarray) -> float:
        """Return log(predicted / measured) of the ratio of speeds, from log(predicted / measured) step times."""
        return float(np.mean([errors[i] - errors[j] for i, j in self.rows]))

    def is_ordered(self, errors: np.ndarray) -> bool:
        """Return whether the faster layout is predicted to be faster."""
        return self.measured * (self.measured + self.error(errors)) > 0


def layout_of(setup: StepSetup) -> dict[str, Any]:
    """Return what a layout is, by name."""
    split = setup.parallel
    return {
        "mbs": setup.mbs,
        "tp": split.tp,
        "pp": split.pp,
        "vp": split.vp or 1,
        "cp": split.cp,
        "ep": split.ep,
        "etp": split.etp if setup.shape.model.experts else 1,
        "fsdp": (split.fsdp, setup.fsdp_ranks),
        "CUDA graphs": (setup.graphs, setup.graph_parts),
        "recompute or offload": (
            setup.recompute, setup.recompute_layers, setup.recompute_modules, setup.offload_layers,
        ),
        "dispatch of experts": (setup.dispatcher, setup.overlap_experts, setup.fused_experts),
    }  # fmt: skip


def layout_pairs(samples: Sequence[MeasuredRun]) -> list[LayoutPair]:
    """Return every two layouts of a model, GPU, dtype, sequence length and engine; each pair counts once."""
    trainings: dict[tuple[object, ...], dict[tuple[object, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, sample in enumerate(samples):
        setup = sample.setup
        training = (
            sample.model, setup.gpu, setup.dtype, setup.task, setup.layer_count, setup.seqlen, setup.watts,
            setup.engine.partition("-")[0],
        )  # fmt: skip
        trainings[training][(setup.engine, *layout_of(setup).values())].append(index)
    pairs = []
    for layouts in trainings.values():
        for first, second in combinations(layouts.values(), 2):
            changed = _changed(samples[first[0]], samples[second[0]])
            rows = tuple((i, j) for i, j in product(first, second) if _is_comparable(samples[i], samples[j]))
            if changed and rows:
                pairs.append(LayoutPair(changed, rows, samples))
    return pairs


def ranking_introduction(samples: Sequence[MeasuredRun]) -> str:
    """Return what the table shows, with the difference that no layout explains."""
    noise = 100 * np.abs(np.expm1(release_noise(samples)))
    return (
        "How far to trust `llmb-run tune`: published pairs of one model, GPU, dtype, sequence length and engine that "
        "differ in layout, on at most twice as many GPUs. Errors are those of the ratio of tokens/s/GPU; a pair counts "
        "once, however many rows it has. Right order: of pairs whose measured speeds differ by more than "
        f"{100 * RESOLUTION:.0f} %. Layouts mostly change with the release, and the same description differs between "
        f"tables by {np.median(noise):.1f} % (p90 {np.percentile(noise, 90):.1f} %)."
    )


def ranking_rows(pairs: Sequence[LayoutPair], *errors: np.ndarray) -> list[tuple[object, ...]]:
    """Return a row of the table for each group of pairs: count, then median, p90 and right order with each fit."""
    groups: dict[str, Callable[[LayoutPair], bool]] = {
        "all": lambda pair: True,
        "in one generation of an engine": lambda pair: pair.one_engine,
        "in two generations": lambda pair: not pair.one_engine,
        "dense, of Megatron": lambda pair: pair.kind == "dense",
        "experts or Mamba, of Megatron": lambda pair: pair.kind == "experts_or_mamba",
        **{f"{name} differs": lambda pair, name=name: name in pair.changed for name in sorted(_names(pairs))},
    }
    rows = []
    for title, belongs in groups.items():
        members = [pair for pair in pairs if belongs(pair)]
        if members:
            rows.append((title, len(members), *(cell for e in errors for cell in _summary(members, e))))
    return rows


def release_noise(samples: Sequence[MeasuredRun]) -> np.ndarray:
    """Return the log ratios of step times of the same description in one generation of an engine."""
    same: dict[StepSetup, list[float]] = defaultdict(list)
    for sample in samples:
        same[sample.setup].append(float(np.log(sample.seconds)))
    return np.array([b - a for times in same.values() for a, b in combinations(times, 2)])


def _summary(pairs: Sequence[LayoutPair], errors: np.ndarray) -> tuple[str, str, str]:
    ratios = 100 * np.abs(np.expm1([pair.error(errors) for pair in pairs]))
    clear = [pair for pair in pairs if abs(pair.measured) > np.log1p(RESOLUTION)]
    ordered = sum(pair.is_ordered(errors) for pair in clear)
    return f"{np.median(ratios):.1f}", f"{np.percentile(ratios, 90):.1f}", f"{ordered} of {len(clear)}"


def _names(pairs: Sequence[LayoutPair]) -> set[str]:
    return {name for pair in pairs for name in pair.changed}


def _changed(first: MeasuredRun, second: MeasuredRun) -> frozenset[str]:
    """Return the names in which two layouts differ, apart from those that the sources themselves contradict."""
    before, after = layout_of(first.setup), layout_of(second.setup)
    notes = first.row.cells.get("notes", "") + second.row.cells.get("notes", "")
    doubtful = re.findall(r"config conflict (\w+)", notes)
    return frozenset(name for name in before if before[name] != after[name] and name not in doubtful)


def _is_comparable(first: MeasuredRun, second: MeasuredRun) -> bool:
    gpus = sorted((first.setup.gpus, second.setup.gpus))
    return gpus[1] <= FURTHEST_SCALE * gpus[0]


def _log_speed(sample: MeasuredRun) -> float:
    setup = sample.setup
    return float(np.log(setup.gbs * setup.seqlen / setup.gpus / sample.seconds))
