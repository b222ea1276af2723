"""Every parallel layout of the recipes trains as one process does: five optimizer steps, loss, norm and weights.

A layout is scaled down to as few ranks as keep every dimension split that the recipe splits, and the model to a few
layers; offloading and recomputation stay where the recipe has them. Layouts of one or two dimensions, which fail more
plainly, are in `test_layout_training.py`. `docs/parallelism.md` holds what was found, written by

    PYTHONPATH=tests python tests/train/test_parallel_layouts.py --write
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from small_models import SMALL_MODELS
from training_ranks import Trained, outcome

from llmb.config.model import Model
from llmb.config.parallel_layout import format_layout
from llmb.config.proxy_layout import shrink_layout
from llmb.config.recipe import Recipe, Row, expand_gpus, load_all, shipped
from llmb.config.spec import Parallel

DOCUMENT = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- proved layouts -->", "<!-- end -->"
# Of a loss, of a gradient norm, of a weight tensor. In fp32 only the order of sums differs. In bf16 and fp8 sums are
# rounded at different points, replicas gather rounded weights, and shards have their own fp8 scales. Adam takes a full
# step even for a gradient that is mostly rounding error: weights differ more than losses.
TOLERANCE = {"fp32": (1e-5, 1e-5, 1e-5), "bf16": (3e-4, 5e-3, 3e-2), "fp8": (2e-3, 5e-2, 6e-2)}
SPLIT = ("tp", "pp", "cp", "dp", "ep", "etp")
MOST_RANKS = 16
Distances = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of one architecture, and the recipe row it represents."""

    architecture: str
    stands_for: str
    parallel: Parallel
    recompute: bool = False
    offload: bool = False
    dtype: str = "fp32"

    @property
    def layout(self) -> str:
        also = [name for name in ("recompute", "offload") if getattr(self, name)]
        return ", ".join([format_layout(self.parallel), *also])

    def __str__(self) -> str:
        return f"{self.architecture} {self.layout} {self.dtype}"

    def outcome(self, run: int = 0) -> Trained:
        """Train; cached, unless `run` differs."""
        return outcome(
            _model(self.architecture), run, parallel=self.parallel, dtype=self.dtype, steps=5, mbs=2, gbs=8, lr=3e-4,
            lr_warmup_steps=0, recompute_layers=int(self.recompute), offload_layers=int(self.offload),
        )  # fmt: skip

    def alone(self) -> "Case":
        """Return the reference: one process that saves all activations."""
        return replace(self, parallel=Parallel(), recompute=False, offload=False)


def _model(architecture: str) -> Model:
    """Return a small model whose sizes fp8 GEMMs support on each of two ranks."""
    model = SMALL_MODELS[architecture]
    return replace(model, experts=replace(model.experts, ffn=64)) if model.experts else model


def recipe_cases() -> Iterator[Case]:
    """Yield one case for each parallel recipe row, in the order of the recipes."""
    for recipe in load_all([shipped()]).values():
        for row in recipe.rows:
            real = _row_layout(row)
            if recipe.kind == "outofcore" or real.world_size == 1:
                continue
            yield Case(
                architecture=recipe.model(recipe.default_size).architecture,
                stands_for=_row_name(recipe, row),
                parallel=_scaled_down(real),
                recompute=row.get("recompute_layers", 0) > 0,
                offload=row.get("offload_layers", 0) > 0,
            )


def _row_layout(row: Row) -> Parallel:
    """Return the layout of a row on its largest number of GPUs."""
    degrees = {name: row[name] for name in ("fsdp", "tp", "pp", "cp", "ep", "etp", "vp") if name in row}
    split = Parallel(**degrees)
    return replace(split, dp=max(expand_gpus(row["gpus"])) // split.world_size)


def _row_name(recipe: Recipe, row: Row) -> str:
    mode = f" {row['mode']}" if "mode" in row else ""
    return f"{recipe.workload} {row['size']} {row['gpu']}{mode}: {format_layout(_row_layout(row))}"


def _scaled_down(real: Parallel) -> Parallel:
    """Return the layout on as few ranks as keep every dimension split, including expert replicas."""
    ranks = 2
    while ranks <= MOST_RANKS:
        small = shrink_layout(real, ranks)
        unsplit = [name for name in SPLIT if getattr(real, name) > 1 and getattr(small, name) == 1]
        if not unsplit and (not _shares_experts(real) or _shares_experts(small)):
            return small
        ranks *= 2
    raise AssertionError(f"{real} does not fit {MOST_RANKS} ranks")


def _shares_experts(parallel: Parallel) -> bool:
    return parallel.ep * parallel.etp > 1 and parallel.expert_dp_size > 1


def _distinct(cases: Iterator[Case]) -> list[Case]:
    """Return the first case of each scaled-down layout, with the number of rows it represents."""
    results: dict[str, list[Case]] = {}
    for case in cases:
        results.setdefault(str(case), []).append(case)
    return [_with_count(same) for same in results.values()]


def _with_count(same: list[Case]) -> Case:
    count = len(same) - 1
    rows = f" and {count} more row{'s' * (count > 1)}" if count else ""
    return replace(same[0], stands_for=same[0].stands_for + rows)


RECIPES = _distinct(recipe_cases())
CASES = [replace(case, dtype=dtype) for dtype in TOLERANCE for case in RECIPES]
# One of each kind, on few ranks.
QUICK = {
    "llama fsdp tp2 dp2, offload fp32",
    "llama tp2 pp2 vp2 dp2, recompute fp32",
    "nemotron_h tp2 dp2 fp32",
    "llama fsdp dp2, recompute fp8",
}


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    return [] if str(case) in QUICK else [pytest.mark.nightly]


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=_marks(case)) for case in CASES])
def test_layout_trains_as_one_process(case: Case) -> None:
    losses, norms, weights = distances(case)
    assert losses < TOLERANCE[case.dtype][0]
    assert norms < TOLERANCE[case.dtype][1]
    assert weights < TOLERANCE[case.dtype][2]


def test_quick_cases_split_every_dimension() -> None:
    quick = [case for case in CASES if str(case) in QUICK]
    assert {str(case) for case in quick} == QUICK
    # Others take 8 ranks here, and 2 or 4 in test_layout_training.py.
    by_day = [name for name in SPLIT if name not in ("cp", "ep", "etp")]
    assert all(any(getattr(case.parallel, name) > 1 for case in quick) for name in by_day)


def test_recipe_layouts_keep_their_dimensions() -> None:
    rows = {case.architecture for case in RECIPES}
    assert rows == set(SMALL_MODELS) - {"mixtral", "qwen3_moe", "gpt_oss", "glm4_moe"}  # which no recipe trains
    assert len(CASES) >= 25


def test_documentation_lists_the_tested_layouts() -> None:
    inside = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    rows = [line.strip("| ").split(" | ") for line in inside.splitlines() if line.startswith("|")]
    assert rows[0][4:] == [*TOLERANCE]
    assert [row[:4] for row in rows[2:]] == [_cells(case) for case in RECIPES]


def distances(case: Case) -> Distances:
    """Return the largest relative differences of a loss, a norm and a weight from one process."""
    return case.outcome().distances(case.alone().outcome())


def _cells(case: Case) -> list[str]:
    ranks = str(case.parallel.world_size)
    return [case.architecture, case.stands_for, case.layout, ranks]


def _numbers(values: Distances) -> str:
    return " ".join(f"{value:.0e}" for value in values)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def section(results: dict[Case, Distances]) -> str:
    """Return the results as a section of the documentation."""
    heading = ["architecture", "the layout of", "scaled down to", "ranks", *TOLERANCE]
    bounds = "; ".join(f"{dtype} {_numbers(each)}" for dtype, each in TOLERANCE.items())
    return "\n".join(
        [
            "Under each dtype: the largest relative differences of a loss, of a gradient norm and of a weight tensor;",
            f"they must be less than {bounds}.",
            "`PYTHONPATH=tests python tests/train/test_parallel_layouts.py --write` writes this section.",
            "",
            _line(heading),
            _line(["---"] * len(heading)),
            *(
                _line([*_cells(case), *(_numbers(results[replace(case, dtype=dtype)]) for dtype in TOLERANCE)])
                for case in RECIPES
            ),
        ]
    )


def write() -> None:
    """Test all layouts and write the results into the documentation."""
    import llmb.train.activation_offload as offloading

    offloading.MIN_BYTES = 1
    results: dict[Case, Distances] = {}
    for case in CASES:
        start = time.monotonic()
        results[case] = distances(case)
        print(f"{case}: {_numbers(results[case])}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if any(value >= bound for value, bound in zip(results[case], TOLERANCE[case.dtype], strict=True)):
            raise SystemExit("nothing is written: this is too far from one process")
    before, tail = DOCUMENT.read_text().split(BEGIN)
    _, after = tail.split(END, 1)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{section(results)}\n{END}{after}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(f"usage: python {sys.argv[0]} --write")
    write()
