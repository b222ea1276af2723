"""Text and data of a layout search: the Pareto set beside the recipe's row, and why the fastest layout wins."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from llmb.perfmodel.expert_capacity import CAPACITY_FACTOR
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.step_time.measured_device import ceilings_source
from llmb.perfmodel.step_time.predictor import StepPrediction, predict
from llmb.perfmodel.step_time.run_description import NATIVE
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.tune.layout_reasons import layout_fields, setting_changes, term_changes
from llmb.perfmodel.tune.layout_search import Candidate, LayoutSearch
from llmb.report.predictions.prediction_text import TITLES
from llmb.report.table import render

SMALLER = 0.9  # a point of the Pareto set is listed if it takes at most this much of the memory of the one before
HEADER = (
    "", "layout", "mbs", "recompute", "offload", "step s", "80 % interval", "tokens/s/GPU", "MFU %", "GiB", "slower",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TunedRun:
    """A search, the recipe's own row where there is one, and how much to print."""

    search: LayoutSearch
    recipe: StepSetup | None
    top: int
    seconds: float  # of the search

    @property
    def best(self) -> Candidate:
        return self.search.candidates[0]

    @property
    def recipe_candidate(self) -> Candidate | None:
        """The recipe's row with its time and memory, whether it is estimated to fit or not."""
        if self.recipe is None:
            return None
        estimate = self.search.room.estimate(self.recipe)
        return Candidate(self.recipe, predict(self.recipe).step_time_s, estimate.total)

    @property
    def recipe_rank(self) -> int | None:
        """Place of the recipe's row among all layouts that fit, from 1."""
        recipe = self.recipe_candidate
        if recipe is None:
            return None
        return 1 + sum(candidate.seconds < recipe.seconds * (1 - 1e-9) for candidate in self.search.candidates)


def tuned_data(tuned: TunedRun) -> dict[str, Any]:
    """Return the outcome as plain data."""
    search, recipe = tuned.search, tuned.recipe_candidate
    setup = tuned.best.setup
    return {
        "model": setup.shape.model.name, "gpu": setup.gpu, "gpus": setup.gpus, "dtype": setup.dtype,
        "seqlen": setup.seqlen, "gbs": setup.gbs, "engine": setup.engine,
        "considered": search.considered, "fitting": len(search.candidates), "limit_gib": search.limit / GIB,
        "search_s": tuned.seconds,
        "ceilings": ceilings_source(setup.gpu, setup.rates),
        "best": _row_data(tuned.best),
        "pareto": [_row_data(candidate) for candidate in search.pareto],
        "fastest": [_row_data(candidate) for candidate in search.candidates[: tuned.top]],
        "recipe": None if recipe is None else {
            **_row_data(recipe), "rank": tuned.recipe_rank, "ratio": recipe.seconds / tuned.best.seconds,
        },
        "why": None if recipe is None else _why_data(recipe.setup, setup),
    }  # fmt: skip


def _row_data(candidate: Candidate) -> dict[str, Any]:
    setup = candidate.setup
    figures = asdict(predict(setup)) | {"memory_gib": candidate.memory / GIB}
    return {**layout_fields(setup), "dp": setup.dp, "ga": setup.ga, **figures}


def _why_data(before: StepSetup, after: StepSetup) -> dict[str, Any]:
    return {
        "settings": setting_changes(before, after),
        "terms": term_changes(predict(before).terms, predict(after).terms),
    }


def tuned_text(tuned: TunedRun) -> str:
    """Return table and reasons for people."""
    search, setup = tuned.search, tuned.best.setup
    title = (
        f"{setup.shape.model.name}, {setup.dtype}, {setup.gpus} x {setup.gpu}, seqlen {setup.seqlen}, gbs {setup.gbs}, "
        f"engine {setup.engine}"
    )
    memory = setup.gpu_memory_bytes
    room = f"fit in {search.limit / GIB:.0f} of {memory / GIB:.0f} GiB" if memory else "whose memory has no known limit"
    counts = (
        f"{search.considered:,} layouts; {len(search.candidates):,} with their recompute or offload {room}; "
        f"{tuned.seconds:.1f} s"
    )
    ceilings = f"ceilings: {ceilings_source(setup.gpu, setup.rates)}"
    full = f"GiB: of a rank whose experts get {CAPACITY_FACTOR} times the tokens of even routing, which predict assumes"
    uneven = [full] if setup.shape.model.experts and setup.engine != NATIVE else []
    parts = [title, counts, *uneven, ceilings, "", render(HEADER, list(_table_rows(tuned))), "", *_reasons(tuned)]
    return "\n".join(parts)


def _table_rows(tuned: TunedRun) -> Iterator[tuple[str, ...]]:
    """Yield the fastest layouts, the Pareto set and the recipe's row, by time."""
    search, recipe = tuned.search, tuned.recipe_candidate
    marks: dict[Candidate, list[str]] = {}
    for candidate in _spread(search.pareto):
        marks[candidate] = ["pareto"]
    for place, candidate in enumerate(search.candidates[: tuned.top], 1):
        marks.setdefault(candidate, []).insert(0, f"{place}.")
    if recipe is not None:
        marks.setdefault(recipe, []).append("recipe")
    for candidate in sorted(marks, key=lambda c: (c.seconds, c.memory)):
        yield _table_row(" ".join(marks[candidate]), candidate, tuned)


def _spread(pareto: list[Candidate]) -> list[Candidate]:
    """Return the points of a Pareto set that differ enough in memory to be worth a line."""
    points: list[Candidate] = []
    for candidate in pareto:
        if not points or candidate.memory <= SMALLER * points[-1].memory:
            points.append(candidate)
    return points


def _table_row(mark: str, candidate: Candidate, tuned: TunedRun) -> tuple[str, ...]:
    setup, p, fields = candidate.setup, predict(candidate.setup), layout_fields(candidate.setup)
    low, high = p.interval_80
    over = "*" if candidate.memory > tuned.search.limit else ""
    return (
        mark, layout_text(setup), f"{setup.mbs}", f"{fields['recompute_layers']}", f"{setup.offload_layers}",
        f"{p.step_time_s:.3f}", f"{low:.3f}-{high:.3f}", f"{p.tokens_per_s_per_gpu:,.0f}",
        "" if p.mfu is None else f"{100 * p.mfu:.1f}",
        f"{candidate.memory / GIB:.0f}{over}", f"{100 * (candidate.seconds / tuned.best.seconds - 1):.1f} %",
    )  # fmt: skip


def layout_text(setup: StepSetup) -> str:
    """Return the parallel layout: the dimensions that are split, and dp."""
    fields = layout_fields(setup)
    words = [f"{name}{fields[name]}" for name in ("tp", "pp", "vp", "cp", "ep", "etp") if fields[name] > 1]
    return " ".join([*words, f"{'fsdp' if setup.parallel.fsdp else 'dp'}{setup.dp}"])


def _reasons(tuned: TunedRun) -> Iterator[str]:
    """Yield why the fastest layout wins, against the recipe's row and against the next one."""
    recipe, best = tuned.recipe_candidate, tuned.best
    if recipe is not None:
        ratio, rank = recipe.seconds / best.seconds, tuned.recipe_rank
        over = (
            f"; it is estimated at {recipe.memory / GIB:.0f} GiB, above the limit (*)"
            if recipe.memory > tuned.search.limit
            else ""
        )
        yield f"recipe: {ratio:.3f} times the best, number {rank} of {len(tuned.search.candidates):,}{over}"
        if setting_changes(recipe.setup, best.setup) and ratio > 1:
            yield f"why {layout_text(best.setup)} wins: {explain_change(recipe.setup, best.setup)}"
    following = next((c for c in tuned.search.candidates if c.setup.parallel != best.setup.parallel), None)
    if following is not None and term_changes(predict(following.setup).terms, predict(best.setup).terms):
        yield f"against {layout_text(following.setup)}, the next: {explain_change(following.setup, best.setup)}"


def explain_change(before: StepSetup, after: StepSetup) -> str:
    """Return what a layout saves and costs against another: `dp 0.85 s less, bubble 0.15 s more (pp 8 -> 16)`."""
    return describe_terms(predict(before), predict(after)) + f" ({describe_settings(before, after)})"


def describe_terms(before: StepPrediction, after: StepPrediction, most: int | None = None) -> str:
    """Return the terms that change, in seconds, or the largest of them."""
    changes = term_changes(before.terms, after.terms)
    words = [f"{TITLES[name]} {abs(s):.2f} s {'less' if s < 0 else 'more'}" for name, s in changes.items()]
    return ", ".join(words[:most]) or "no term differs much"


def describe_settings(before: StepSetup, after: StepSetup) -> str:
    """Return the settings that differ."""
    changes = setting_changes(before, after)
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items()).lower() or "same settings"
