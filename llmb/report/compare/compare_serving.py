"""Verdict on two serving runs: output tokens/s first, then what a user waits for, each with its interval.

B generates 8.1 % more output tokens/s; TTFT 3.0 % shorter, no difference seen in TPOT, E2E 7.5 % shorter
"""

from collections.abc import Iterator, Sequence

from llmb.config.load_settings import LoadSettings
from llmb.config.spec import Inference, RunConfig
from llmb.results.request_bootstrap import RequestRatio
from llmb.results.result import Result

NAMES = {"output_tokens_per_s": "output tokens/s", "ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
METHOD = (
    "95 % intervals of means by a bootstrap over blocks of requests, as long as their autocorrelation requires; noise "
    "between runs is not in them: repeat each (-r 5)"
)
SAME = 0.1  # relative difference of achieved loads that is no reason for doubt

Run = tuple[RunConfig | None, Result]
Load = Inference | LoadSettings


def serving_verdict(ratios: Sequence[RequestRatio], label: str = "B") -> str:
    """Return the verdict in one sentence."""
    clauses = [_clause(ratio, label) for ratio in ratios]
    return clauses[0] + (f"; {', '.join(clauses[1:])}" if clauses[1:] else "")


def _clause(ratio: RequestRatio, label: str) -> str:
    name, percent = NAMES[ratio.figure], f"{100 * abs(ratio.ratio - 1):.1f} %"
    uncertain = " (too few requests to tell)" if ratio.differs is None else ""
    if ratio.differs is False:
        return f"no difference seen in {name}"
    if ratio.higher_is_better:
        return f"{label} generates {percent} {'more' if ratio.ratio > 1 else 'fewer'} {name}{uncertain}"
    return f"{name} {percent} {'longer' if ratio.ratio > 1 else 'shorter'}{uncertain}"


def load_doubts(a: Run, b: Run, labels: tuple[str, str]) -> Iterator[str]:
    """Yield how the loads differ: lengths, concurrency and rate change every figure, whatever the engine."""
    first, second = labels
    work_a, work_b = (config.workload if config is not None else None for config, _ in (a, b))
    if not isinstance(work_a, Inference | LoadSettings) or not isinstance(work_b, Inference | LoadSettings):
        return
    if _lengths(work_a) != _lengths(work_b):
        yield f"their requests differ: {first} {_describe(work_a)}, {second} {_describe(work_b)}"
    if work_a.rate != work_b.rate:
        rates = f"{first} {_rate(work_a)}, {second} {_rate(work_b)}"
        yield f"their rates differ: {rates}; a higher rate raises tokens/s and latencies"
    elif work_a.rate is not None:
        yield f"both were sent {work_a.rate:g} requests/s: while a server keeps up, only its latencies tell its speed"
    elif work_a.concurrency != work_b.concurrency:
        yield (
            f"their concurrency differs: {first} {_most(work_a)}, {second} {_most(work_b)}; "
            "with more requests at once, tokens/s and latencies rise together"
        )
    elif _differ(*(loads := [result.mean_concurrency for _, result in (a, b)])):
        yield f"the concurrency reached differs: {first} {loads[0]:.4g}, {second} {loads[1]:.4g} on average"


def _lengths(work: Load) -> tuple[object, ...]:
    return work.isl, work.osl, work.lengths, work.isl_spread, work.osl_spread, _source(work), *_shape(work)


def _source(work: Load) -> str | None:
    """Return the file that says which requests are sent; None of synthetic ones."""
    return work.dataset or (work.trace or work.lengths_file if isinstance(work, LoadSettings) else None)


def _shape(work: Load) -> list[str]:
    """Return what else changes the work of a request, as text; nothing of plain completions that ignore EOS."""
    words = [] if work.ignore_eos else ["until EOS"]
    if isinstance(work, LoadSettings):
        words += ["as chats"] if work.endpoint == "chat" else []
        words += [f"with {work.extra_body}"] if work.extra_body else []
        words += [f"in {work.turns} turns"] if work.turns > 1 else []
        if work.prefix_fraction:
            words.append(f"{100 * work.prefix_fraction:g} % of them shared by {work.prefix_groups} groups")
    return words


def _describe(work: Load) -> str:
    spread = "" if work.lengths == "fixed" else f" {work.lengths} +-{work.isl_spread:g}/{work.osl_spread:g}"
    return " ".join([_source(work) or f"{work.isl}/{work.osl} tokens{spread}", *_shape(work)])


def _rate(work: Load) -> str:
    return "no rate" if work.rate is None else f"{work.rate:g} requests/s"


def _most(work: Load) -> str:
    return "all at once" if work.concurrency is None else str(work.concurrency)


def _differ(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(a - b) > SAME * max(a, b)
