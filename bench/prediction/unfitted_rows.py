"""Published training rows that no constant was fitted to: errors by source, and every row. No GPU."""

import csv
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmb.perfmodel.step_time.predictor import StepPrediction, model_flops, predict
from llmb.perfmodel.step_time.published_rows import parse_row
from llmb.perfmodel.step_time.step_setup import StepSetup

FILE = Path(__file__).with_name("unfitted_training.csv")
HEADER = ("source", "rows", "median %", "p90 %", "mean %", "inside the 80 % interval %")
ROW_HEADER = ("model", "task", "GPUs", "dtype", "engine", "measured s", "predicted s", "error %", "inside")
INTRODUCTION = """Rows that no constant was ever fitted to, nor chosen by, from pages that the rows above are not of
(`bench/prediction/unfitted_training.csv`). A step of Llama 3's paper follows from its printed TFLOP/s. Containers 25.02
to 25.07 are predicted as `megatron`, 24.12 as `megatron-2024`. NeMo AutoModel, of which no generation here is, stands
under `torchtitan`, the other FSDP engine of PyTorch; where a described layout cannot have fit, all layers are taken to
be recomputed. That Megatron reduces gradients in bf16 and gathers weights in fp8 was looked up in the recipes because
of misses here, and kept as these got smaller."""
MISSES = """Misses, and what is known of them:

- NeMo AutoModel's mixtures run up to twice as fast as torchtitan is predicted to: another engine is not predicted by
  the constants of a similar one, and full recompute is a guess. Its LoRA on one GPU is slower, and so is Llama 70B.
- B200 of 25.02 with few micro-batches: Nemotron-4 340b is predicted 16 % too slow, for its collectives between
  nodes, and Nemotron-4 15b 15 % too fast. With gradients in fp32 and weights gathered in bf16, which NVIDIA's
  recipes do not have, 340b and Mixtral 8x7B would be 53 and 37 % off.
- Mixtral 8x7B and Scout on GB200 with micro-batches of one or two sequences: waiting for the host and memory-bound work
  of few large experts are predicted too long.
- Llama 3's own runs on 8,192 and 16,384 GPUs are predicted 7 to 19 % too fast by NVIDIA's rows of the same layouts.
  They ran other code on other clusters, which nothing in the layout tells apart.
- Llama 2 13b on 8 GPUs: its table prints pp 4 without an interleaving."""


@dataclass(frozen=True)
class UnfittedRow:
    """A row with its prediction."""

    source: str
    setup: StepSetup
    seconds: float
    prediction: StepPrediction

    @property
    def error(self) -> float:
        """Log of predicted over measured."""
        return float(np.log(self.prediction.step_time_s / self.seconds))

    @property
    def is_inside(self) -> bool:
        low, high = self.prediction.interval_80
        return low <= self.seconds <= high


def unfitted_rows(path: Path = FILE) -> list[UnfittedRow]:
    """Return every row of the file; one that cannot be described is an error."""
    rows = []
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            row = parse_row(cells)
            assert row.setup is not None, row.reason
            seconds = row.step_time_s or _seconds(row.setup, float(cells["tflops_per_gpu"]))
            rows.append(UnfittedRow(cells["source"], row.setup, seconds, predict(row.setup)))
    return rows


def _seconds(setup: StepSetup, tflops: float) -> float:
    return model_flops(setup) / setup.gpus / tflops / 1e12


def unfitted_section(
    fitted: Collection[StepSetup],
    summary: Callable[[np.ndarray], tuple[str, ...]],
    table: Callable[[Sequence[str], Iterable[Sequence[object]]], str],
) -> str:
    """Return the section of the page; `fitted`: descriptions of fitted rows, which some of these share."""
    rows = unfitted_rows()
    sources = list(dict.fromkeys(row.source for row in rows))
    megatron = [row for row in rows if row.setup.engine.startswith("megatron")]
    groups = [("all", rows), ("all of Megatron", megatron)]
    groups += [(source, [row for row in rows if row.source == source]) for source in sources]
    shared = sum(row.setup in fitted for row in rows)
    return "\n\n".join([
        INTRODUCTION,
        f"{shared} of the {len(rows)} have the description of a fitted row, measured in another release or table.",
        table(HEADER, [(name, *summary(errors_of(members)), _inside(members)) for name, members in groups]),
        table(ROW_HEADER, [_cells(row) for row in rows]),
        MISSES,
    ])  # fmt: skip


def errors_of(rows: Sequence[UnfittedRow]) -> np.ndarray:
    """Return the log errors."""
    return np.array([row.error for row in rows])


def _inside(rows: Sequence[UnfittedRow]) -> str:
    return f"{100 * np.mean([row.is_inside for row in rows]):.0f}"


def _cells(row: UnfittedRow) -> tuple[object, ...]:
    setup = row.setup
    return (
        setup.shape.model.name, setup.task, f"{setup.gpus} {setup.gpu}", setup.dtype, setup.engine,
        f"{row.seconds:.3f}", f"{row.prediction.step_time_s:.3f}", f"{100 * np.expm1(row.error):+.1f}",
        "yes" if row.is_inside else "no",
    )  # fmt: skip
