"""Comparisons as text: differing fields first, then figures, then verdicts and what speaks against them."""

from collections.abc import Sequence
from typing import Any

from llmb.config.overrides import typed_value
from llmb.report.compare.compare_serving import METHOD
from llmb.report.compare.run_pair import same_size
from llmb.report.table import number, render
from llmb.results.compare.median_interval import FEWEST_BLOCKS

REPEATED = "95 % intervals by Student's distribution over repeats, of a single run by a block bootstrap"


def text(compared: dict[str, Any]) -> str:
    """Format the comparison of two runs."""
    from_where = [_origin(*pair) for pair in zip(compared["clusters"], compared["runs"], strict=True)]
    parts = [f"A: {compared['a']}{from_where[0]}\nB: {compared['b']}{from_where[1]}"]
    parts.append(_differing(compared["differing"], ("A", "B")))
    rows = [(f["figure"], f["a"], f["b"], f["ratio"]) for f in compared["figures"]]
    parts.append(render(("figure", "A", "B", "B/A"), rows))
    speed = compared["speed"]
    if compared["requests"]:
        rows = [(r["figure"], r["ratio"], r["low"], r["high"]) for r in compared["requests"]]
        parts.append(f"{_request_method([compared])}\n{render(('B/A of', 'ratio', 'from', 'to'), rows)}")
    elif speed and speed["low"] is not None:
        interval = f"{number(speed['low'])} to {number(speed['high'])}"
        larger = _step_size(*compared["step_tokens"])
        ratio = f"{speed['unit']} of B over A: {number(speed['ratio'])} (95 % interval {interval}){larger}"
        parts.append(f"{ratio}\n{step_method([compared])}")
    parts.append(f"verdict: {compared['verdict']}{_doubts(compared['doubts'])}")
    return "\n\n".join(parts)


def set_text(compared: dict[str, Any]) -> str:
    """Format the comparison of several runs with the first; two runs are printed as a pair."""
    comparisons = compared["comparisons"]
    if len(comparisons) == 1:
        return text(comparisons[0])
    labels = [run["label"] for run in compared["runs"]]
    first = labels[0]
    parts = [
        "\n".join(f"{run['label']}: {run['name']}{_origin(run['cluster'], run['runs'])}" for run in compared["runs"])
    ]
    parts.append(_differing(compared["differing"], labels))
    rows = [(f["figure"], *f["values"], *f["ratios"]) for f in compared["figures"]]
    parts.append(render(("figure", *labels, *(f"{label}/{first}" for label in labels[1:])), rows))
    parts.append(render((f"over {first}", "figure", "ratio", "from", "to"), ratio_rows(comparisons)))
    parts += filter(None, [_request_method(comparisons)])
    parts += filter(None, [step_method(comparisons)])
    shared = [d for d in comparisons[0]["doubts"] if all(d in c["doubts"] for c in comparisons)]
    parts.append(
        "\n".join(
            f"verdict on {c['labels'][1]}: {c['verdict']}{_doubts([d for d in c['doubts'] if d not in shared])}"
            for c in comparisons
        )
    )
    if shared:
        parts.append("against all of them speaks that\n" + "\n".join(f"- {doubt}" for doubt in shared))
    return "\n\n".join(parts)


def ratio_rows(comparisons: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return label, figure, ratio and interval of every ratio with which runs are judged."""
    rows: list[tuple[Any, ...]] = []
    for compared in comparisons:
        label, speed = compared["labels"][1], compared["speed"]
        if compared["requests"]:
            rows += [(label, r["figure"], r["ratio"], r["low"], r["high"]) for r in compared["requests"]]
        elif speed:
            rows.append((label, speed["unit"], speed["ratio"], speed["low"], speed["high"]))
    return rows


def _request_method(comparisons: Sequence[dict[str, Any]]) -> str:
    """Return how intervals over requests were made; empty without any."""
    if not any(compared["requests"] for compared in comparisons):
        return ""
    return REPEATED if any(runs > 1 for compared in comparisons for runs in compared["runs"]) else METHOD


def step_method(comparisons: Sequence[dict[str, Any]]) -> str:
    """Return how intervals of ratios of steps were made, with the length of each run's blocks; empty without any."""
    blocks: dict[str, str] = {}
    for compared in comparisons:
        speed = compared["speed"]
        if speed and speed["times"] and speed["low"] is not None:
            blocks |= dict(zip(compared["labels"], map(_blocks, speed["times"]), strict=True))
    if not blocks:
        return ""
    if any(runs > 1 for compared in comparisons for runs in compared["runs"]):
        return REPEATED
    runs = ", ".join(f"{label} has {text}" for label, text in blocks.items())
    return (
        f"95 % intervals by a bootstrap over blocks of steps, as long as their autocorrelation requires: {runs}; "
        "they leave out noise between runs, which `llmb-run ab` measures"
    )


def _blocks(time: dict[str, Any]) -> str:
    if time["blocks"] < FEWEST_BLOCKS:
        return f"the range of its {time['n']} steps, which depend on one another too much"
    return f"{time['blocks']} blocks of {time['block']} step{'s' if time['block'] > 1 else ''}"


def _differing(differing: dict[str, list[Any]], labels: Sequence[str]) -> str:
    if not differing:
        return "same configuration"
    rows = [(name, *(_typed(value, name) for value in row)) for name, row in differing.items()]
    return "differing fields\n" + render(("field", *labels), rows)


def _typed(value: Any, dotted_name: str) -> Any:
    """Return a list as it is typed for its field: a window as 35-44."""
    return typed_value(value, dotted_name.rpartition(".")[2]) if isinstance(value, list | tuple) else value


def _doubts(doubts: Sequence[str]) -> str:
    return "; but\n" + "\n".join(f"- {doubt}" for doubt in doubts) if doubts else ""


def _origin(cluster: str | None, runs: int) -> str:
    details = ([f"mean of {runs} runs"] if runs > 1 else []) + ([f"imported from {cluster}"] if cluster else [])
    return f" ({', '.join(details)})" if details else ""


def _step_size(tokens_a: float | None, tokens_b: float | None) -> str:
    """Return the clause that explains why the ratio of step times is another one."""
    if tokens_a is None or tokens_b is None or same_size(tokens_a, tokens_b):
        return ""
    return f"; step times have no ratio: a step of B has {number(tokens_b / tokens_a)} x the tokens of A's"
