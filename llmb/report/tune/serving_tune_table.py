"""Text and data of a search of serving settings: the Pareto set beside the recipe's row, and why the best one wins."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.step_time.measured_device import ceilings_source
from llmb.perfmodel.tune.serving_candidate import ServingCandidate
from llmb.perfmodel.tune.serving_reasons import serving_changes, token_changes
from llmb.perfmodel.tune.serving_search import ServingSearch
from llmb.report.predictions.serving_text import TITLES
from llmb.report.table import render

FASTER = 1.1  # a point of the Pareto set is listed if it has this many times the tokens/s/user of the one before it
HEADER = (
    "", "engine", "engines", "clients", "batch", "token budget", "tokens/s/GPU", "80 % interval", "tokens/s/user",
    "TTFT ms", "TPOT ms", "GiB", "less",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TunedServing:
    """A search, the recipe's own row where there is one, and how much to print."""

    search: ServingSearch
    recipe: ServingCandidate | None
    top: int
    seconds: float  # of the search

    @property
    def best(self) -> ServingCandidate:
        return self.search.candidates[0]


def serving_tune_data(tuned: TunedServing) -> dict[str, Any]:
    """Return the outcome as plain data."""
    search, recipe, setup = tuned.search, tuned.recipe, tuned.best.setup
    return {
        "model": setup.shape.model.name, "gpu": setup.gpu, "gpus": search.gpus, "dtype": setup.dtype,
        "kv_dtype": setup.kv_dtype, "engine": setup.engine, "isl": setup.isl, "osl": setup.osl,
        "slo": dict(search.limits), "considered": search.considered, "predicted": search.predicted,
        "search_s": tuned.seconds, "ceilings": ceilings_source(setup.gpu, setup.rates),
        "best": _row_data(tuned.best, search),
        "pareto": [_row_data(candidate, search) for candidate in search.pareto],
        "fastest": [_row_data(candidate, search) for candidate in search.candidates[: tuned.top]],
        "recipe": None if recipe is None else {
            **_row_data(recipe, search), "ratio": tuned.best.tokens_per_s_per_gpu / recipe.tokens_per_s_per_gpu,
            "within_slo": recipe.keeps(search.limits),
        },
        "why": None if recipe is None else {
            "settings": serving_changes(recipe.setup, setup), "ms_per_token": token_changes(recipe, tuned.best),
        },
    }  # fmt: skip


def _row_data(candidate: ServingCandidate, search: ServingSearch) -> dict[str, Any]:
    setup = candidate.setup
    names = ("tp", "pp", "attention_dp", "ep", "moe_tp", "max_num_tokens", "max_batch_size", "concurrency")
    return {
        **{name: getattr(setup, name) for name in names},
        "engines": max(1, search.gpus // setup.gpus),
        **asdict(candidate.prediction),
    }


def serving_tune_text(tuned: TunedServing) -> str:
    """Return table and reasons for people."""
    search, setup = tuned.search, tuned.best.setup
    limits = ", ".join(f"{name.removesuffix('_ms')} <= {limit:g} ms" for name, limit in search.limits.items())
    title = (
        f"{setup.shape.model.name}, {setup.dtype}, KV cache {setup.kv_dtype}, {search.gpus} x {setup.gpu}, "
        f"{setup.isl}/{setup.osl}, engine {setup.engine}, {f'SLO of means: {limits}' if limits else 'no SLO'}"
    )
    within = f", {len(search.candidates):,} within the SLO" if limits else ""
    counts = (
        f"{search.considered:,} layouts with token budgets at {search.predicted:,} loads{within}; {tuned.seconds:.1f} s"
    )
    ceilings = f"ceilings: {ceilings_source(setup.gpu, setup.rates)}"
    return "\n".join([title, counts, ceilings, "", render(HEADER, list(_table_rows(tuned))), "", *_reasons(tuned)])


def _table_rows(tuned: TunedServing) -> Iterator[tuple[str, ...]]:
    marks: dict[int, list[str]] = {}
    candidates = list(tuned.search.candidates)
    places = {id(candidate): place for place, candidate in enumerate(candidates)}
    for candidate in _spread(tuned.search.pareto):
        marks[places[id(candidate)]] = ["pareto"]
    for place in range(min(tuned.top, len(candidates))):
        marks.setdefault(place, []).insert(0, f"{place + 1}.")
    for place in sorted(marks):
        yield _table_row(" ".join(marks[place]), candidates[place], tuned)
    if tuned.recipe is not None:
        over = "" if tuned.recipe.keeps(tuned.search.limits) else ", outside the SLO"
        yield _table_row(f"recipe{over}", tuned.recipe, tuned)


def _spread(pareto: list[ServingCandidate]) -> list[ServingCandidate]:
    """Return the points of a Pareto set that differ enough in speed to be worth a line."""
    points: list[ServingCandidate] = []
    for candidate in pareto:
        if not points or candidate.tokens_per_s_per_user >= FASTER * points[-1].tokens_per_s_per_user:
            points.append(candidate)
    return points


def _table_row(mark: str, candidate: ServingCandidate, tuned: TunedServing) -> tuple[str, ...]:
    setup, p = candidate.setup, candidate.prediction
    interval = p.interval_80["output_tokens_per_s_per_gpu"]
    assert interval is not None
    low, high = interval
    return (
        mark, engine_text(setup), f"{max(1, tuned.search.gpus // setup.gpus)}", f"{setup.concurrency}",
        f"{p.batch:.0f}", f"{setup.max_num_tokens}", f"{p.output_tokens_per_s_per_gpu:,.0f}", f"{low:,.0f}-{high:,.0f}",
        f"{candidate.tokens_per_s_per_user:.0f}", f"{p.ttft_ms:,.0f}",
        "-" if p.tpot_ms is None else f"{p.tpot_ms:.1f}", f"{p.memory_gib:.0f}",
        f"{100 * (1 - candidate.tokens_per_s_per_gpu / tuned.best.tokens_per_s_per_gpu):.1f} %",
    )  # fmt: skip


def engine_text(setup: ServingSetup) -> str:
    """Return the layout of one engine: the dimensions that are split."""
    degrees = {"tp": setup.tp, "pp": setup.pp, "dp": setup.attention_dp, "ep": setup.ep}
    return " ".join(f"{name}{ranks}" for name, ranks in degrees.items() if ranks > 1) or "one GPU"


def _reasons(tuned: TunedServing) -> Iterator[str]:
    best, recipe = tuned.best, tuned.recipe
    if recipe is not None:
        ratio = best.tokens_per_s_per_gpu / recipe.tokens_per_s_per_gpu
        yield f"best: {ratio:.3f} times the throughput of the recipe's row; {_explain(recipe, best)}"
    following = next((c for c in tuned.search.candidates if engine_text(c.setup) != engine_text(best.setup)), None)
    if following is not None:
        yield f"against {engine_text(following.setup)}, the next: {_explain(following, best)}"


def _explain(before: ServingCandidate, after: ServingCandidate) -> str:
    """Return what changes for an output token, in milliseconds of a GPU, and the settings behind it."""
    words = [
        f"{_title(name)} {abs(ms):.3f} ms {'less' if ms < 0 else 'more'}"
        for name, ms in token_changes(before, after).items()
    ]
    settings = ", ".join(
        f"{name} {old} -> {new}" for name, (old, new) in serving_changes(before.setup, after.setup).items()
    )
    return f"per output token {', '.join(words) or 'no part changes much'} ({settings or 'same settings'})"


def _title(name: str) -> str:
    part, _, kind = name.partition(" ")
    return f"{part} {TITLES[kind]}" if part == "decode" else name
