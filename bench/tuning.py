"""Published layouts against the best predicted ones. No GPU.

    python bench/tuning.py [../shared/data/published_training.csv] [--out docs/tuning.md] [--jobs 2]

For every training row of the recipes and every published configuration: the predicted step time of its own layout over
that of the best layout found by `llmb-run tune`, and the terms that make the difference. A layout of several scales is
compared with layouts that fit all of them. Writes the tables between the marks in docs/tuning.md. Five minutes on one
core.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.config.overrides import Setting
from llmb.config.recipe import expand_gpus, load_all, selector_values, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import MemoryEstimate
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.published_rows import is_possible, read_rows
from llmb.perfmodel.step_time.recipe_settings import as_configured
from llmb.perfmodel.step_time.setup_fields import scaled
from llmb.perfmodel.step_time.step_setup import StepSetup, setup_of
from llmb.perfmodel.tune.layout_search import Candidate, search_layouts
from llmb.perfmodel.tune.memory_savings import MemoryRoom, external_room
from llmb.perfmodel.tune.native_layouts import native_room, runs_natively
from llmb.report.tune.tune_table import describe_settings, describe_terms, layout_text

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT.parent / "shared" / "data" / "published_training.csv"
DOCUMENT = ROOT / "docs" / "tuning.md"
BEGIN, END = "<!-- written by bench/tuning.py -->", "<!-- end -->"
AIM, EXPLAINED = 1.08, 1.05  # own layout over the best: what is aimed at, and above what the reason is given
TUNED = ("rows of the recipes", "Megatron, pre-training")  # layouts that somebody chose for speed
MOST_TERMS = 4  # named for a row
MOST_NAMED = 8  # runs in a sentence
# Why a layout is slower: the terms that shrink most from it to the best one.
CAUSES = {
    "small micro-batches wait for the host": ("host", "launch"),
    "pipeline bubble, imbalance and sends": ("bubble", "pp"),
    "all-to-all of experts": ("ep",),
    "TP collectives": ("tp", "quantization"),
    "a sequence split by cp": ("cp", "memory_bound"),
    "recompute": ("recompute",),
    "DP and FSDP collectives": ("dp", "fsdp"),
}
BF16_STATE = ("master_weights", "gradients", "moments", "reduce_dtype")


@dataclass(frozen=True)
class Case:
    """One published layout."""

    source: str  # recipe or published
    model: str
    setup: StepSetup
    fewest: int  # GPUs that the same layout is published for
    config: RunConfig | None = None  # of rows for the native engine: its own memory counts

    @property
    def kind(self) -> str:
        if self.source == "recipe":
            return "rows of the recipes"
        kind = {"torchtitan": "torchtitan's tables", "jax": "MaxText and PaxML"}.get(self.setup.engine, "Megatron")
        if kind != "Megatron":
            return kind
        if self.setup.task != "pretrain":
            return "Megatron, fine-tuning"
        is_whole = self.setup.layer_count == self.setup.shape.model.layers
        return "Megatron, pre-training" if is_whole else "Megatron, models with fewer layers"


@dataclass(frozen=True)
class Outcome:
    """A case with what the search found."""

    case: Case
    best: Candidate | None  # none: nothing fits by the estimate
    own_memory: float  # estimate of the case's own layout, bytes
    limit: float  # bytes that a layout may take
    seconds: float  # of the search

    @property
    def own_s(self) -> float:
        return predict(self.case.setup).step_time_s

    @property
    def ratio(self) -> float | None:
        """Own layout over the best."""
        return self.own_s / self.best.seconds if self.best else None

    @property
    def cause(self) -> str:
        """Key of CAUSES whose terms shrink most."""
        assert self.best is not None
        slow, fast = predict(self.case.setup).terms, predict(self.best.setup).terms
        return max(CAUSES, key=lambda cause: sum(slow[name] - fast[name] for name in CAUSES[cause]))


def recipe_cases() -> Iterator[Case]:
    """Yield every training row of the recipes as their code configures it, at its smallest and largest scale."""
    external = Setting(field="engine", value="megatron_bridge", source="bench")
    for recipe in load_all([shipped()]).values():
        for row in recipe.rows if recipe.kind == "training" else ():
            for dtype in selector_values(row, "dtype"):
                scales = expand_gpus(row["gpus"])
                for gpus in dict.fromkeys((scales[0], scales[-1])):
                    request = RunRequest(
                        size=row["size"], dtype=dtype, gpus=gpus, gpu=row["gpu"], settings=(external,)
                    )  # fmt: skip
                    config = resolve(recipe, request)
                    assert isinstance(config.workload, Training)
                    native = any(getattr(config.workload, name) == "bf16" for name in BF16_STATE)
                    if native:
                        config = resolve(recipe, replace(request, settings=()))
                    setup = setup_of(as_configured(config))
                    yield Case("recipe", config.model.name, setup, scales[0], config if native else None)


def published_cases(path: Path) -> Iterator[Case]:
    """Yield published configurations: one for each layout, at its smallest and largest scale."""
    series: dict[tuple[object, ...], list[Case]] = {}
    for row in read_rows(path):
        setup = row.setup
        if setup is None or row.step_time_s is None or not is_possible(setup, row.step_time_s):
            continue
        case = Case("published", row.model, setup, setup.gpus)
        key = (
            row.model, setup.gpu, setup.dtype, replace(setup.parallel, dp=1), setup.mbs, setup.seqlen, setup.layers,
            case.kind, setup.gbs / setup.gpus,
        )  # fmt: skip
        series.setdefault(key, []).append(case)
    for cases in series.values():
        cases.sort(key=lambda case: case.setup.gpus)
        for case in dict.fromkeys((cases[0], cases[-1])):
            yield replace(case, fewest=cases[0].setup.gpus)


def tune(case: Case) -> Outcome:
    """Search the layouts of one case."""
    start = time.process_time()
    if case.config is not None:
        search = search_layouts(case.setup, {}, native_room(case.config), runs_natively(case.config))
    else:
        search = search_layouts(case.setup, {}, *_at_fewest_gpus(case))
    best = search.candidates[0] if search.candidates else None
    return Outcome(case, best, search.room.estimate(case.setup).total, search.limit, time.process_time() - start)


def _at_fewest_gpus(case: Case) -> tuple[MemoryRoom, Callable[[StepSetup], bool]]:
    """Return the memory of a layout on the fewest GPUs it is published for, and whether it divides them.

    With fewer replicas a rank holds more of the optimizer state.
    """
    room = external_room(case.setup)

    def estimate(setup: StepSetup) -> MemoryEstimate:
        return room.estimate(scaled(setup, case.fewest))

    def divides(setup: StepSetup) -> bool:
        try:
            scaled(setup, case.fewest)
        except ConfigError:
            return False
        return True

    return MemoryRoom(limit=room.limit, estimate=estimate), divides


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how far published layouts are from the best, by kind."""
    rows = []
    for kind in dict.fromkeys(outcome.case.kind for outcome in outcomes):
        members = [outcome for outcome in outcomes if outcome.case.kind == kind]
        ratios = [ratio for outcome in members if (ratio := outcome.ratio) is not None]
        rows.append(
            (
                kind, len(members), f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}",
                f"{sum(r <= EXPLAINED for r in ratios)}", f"{sum(r <= AIM for r in ratios)}",
                len(members) - len(ratios), f"{max(outcome.seconds for outcome in members):.1f}",
            )
        )  # fmt: skip
    header = (
        "layouts", "count", "median", "largest", "within 5 %", "within 8 %", "none fits", "longest search, s of a core",
    )  # fmt: skip
    return table(header, rows)


def explained(outcomes: Sequence[Outcome]) -> str:
    """Return why the best is faster than tuned layouts that are more than 5 % slower; one for each layout and GPU."""
    worst: dict[tuple[object, ...], Outcome] = {}
    for outcome in outcomes:
        setup = outcome.case.setup
        key = (
            outcome.case.kind,
            outcome.case.model,
            setup.gpu,
            replace(setup.parallel, dp=1),
        )
        if outcome.case.kind in TUNED and (outcome.ratio or 0) > max(EXPLAINED, _ratio(worst.get(key))):
            worst[key] = outcome
    rows = []
    causes = list(CAUSES)
    for outcome in sorted(worst.values(), key=lambda o: (causes.index(o.cause), -_ratio(o))):
        setup, best = outcome.case.setup, outcome.best.setup if outcome.best else outcome.case.setup
        rows.append(
            (
                outcome.cause,
                f"{outcome.case.model} {setup.dtype}, {setup.gpus} {setup.gpu}, {outcome.case.source}",
                f"{layout_text(setup)} mbs{setup.mbs}", _memory(outcome), f"{outcome.ratio:.3f}",
                describe_settings(setup, best), describe_terms(predict(setup), predict(best), MOST_TERMS),
            )
        )  # fmt: skip
    return table(("cause", "run", "its layout", "GiB", "ratio", "change", "largest changes of terms"), rows)


def _memory(outcome: Outcome) -> str:
    """Return the estimates of the own layout and of the best one, and the limit that the search has."""
    best = outcome.best.memory if outcome.best else outcome.own_memory
    return f"{outcome.own_memory / GIB:.0f} -> {best / GIB:.0f} of {outcome.limit / GIB:.0f}"


def missed(outcomes: Sequence[Outcome]) -> str:
    """Return how many tuned layouts are further from the best than the aim."""
    parts = []
    for kind in TUNED:
        members = [outcome for outcome in outcomes if outcome.case.kind == kind]
        above = [outcome for outcome in members if _ratio(outcome) > AIM]
        names = dict.fromkeys(
            f"{o.case.model} {o.case.setup.dtype} on {o.case.setup.gpus} {o.case.setup.gpu}" for o in above
        )
        listed = f" ({', '.join(names)})" if 0 < len(names) <= MOST_NAMED else ""
        parts.append(f"{len(above)} of {len(members)} {kind}{listed}")
    return f"More than {100 * (AIM - 1):.0f} % slower than the best: {'; '.join(parts)}."


def by_cause(outcomes: Sequence[Outcome]) -> str:
    """Return how many tuned layouts are more than 5 % slower than the best, and more than the aim, by cause."""
    slower = [outcome for outcome in outcomes if outcome.case.kind in TUNED and _ratio(outcome) > EXPLAINED]
    rows: list[Sequence[object]] = []
    for cause in CAUSES:
        members = [outcome for outcome in slower if outcome.cause == cause]
        counts = [sum(outcome.case.kind == kind for outcome in members) for kind in TUNED]
        if members:
            missed = sum(_ratio(outcome) > AIM for outcome in members)
            rows.append((cause, *counts, missed, f"{statistics.median(map(_ratio, members)):.3f}"))
    return table(("cause", *TUNED, "of these more than 8 %", "median ratio"), rows)


def _ratio(outcome: Outcome | None) -> float:
    return 0.0 if outcome is None or outcome.ratio is None else outcome.ratio


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the tables of the document."""
    title = "### More than 5 % slower than the best"
    return "\n\n".join((summary(outcomes), missed(outcomes), title, by_cause(outcomes), explained(outcomes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=PUBLISHED)
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.add_argument("--jobs", type=int, default=1, help="searches at once, each in a process of its own")
    options = parser.parse_args()
    cases = (*recipe_cases(), *published_cases(options.csv))
    with ProcessPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(tune, cases))
    text = report(outcomes)
    document = options.out.read_text()
    if BEGIN not in document:
        raise SystemExit(f"{options.out} has no line {BEGIN}")
    options.out.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", document, flags=re.S))
    print(text)


if __name__ == "__main__":
    main()
