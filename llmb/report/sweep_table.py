"""Sweeps as text: the table with its Pareto set, knee and SLO tiers, and the same rows as csv.

print(sweep_text(result, width))        # for people
write(sweep_csv(result))                # a line per load, all figures
"""

import csv
import io
from collections.abc import Iterator
from typing import Any

from llmb.report.table import number, render
from llmb.results.sweep.slo import STATISTICS
from llmb.results.sweep.sweep_points import FIGURES, LOAD_UNITS, SUMMARIES, SweepRow
from llmb.results.sweep.sweep_result import SweepResult, TierAnswer

KNEE = "knee"
KNEE_DEFINITION = "knee: the point farthest above the line between the ends of the Pareto set, logarithms of both axes"


def sweep_text(result: SweepResult, width: int | None = None) -> str:
    """Return the table of a sweep, its notes and the answer of each tier."""
    if not result.rows:
        return f"{result.name}: no point was measured"
    parts = [render(_header(result), list(_rows(result)), width, keys=1 + _has_variants(result))]
    parts.append("\n".join(_notes(result)))
    if result.tiers:
        parts.append("\n".join(tier_text(answer, result) for answer in result.tiers))
    return "\n\n".join(part for part in parts if part)


def _has_variants(result: SweepResult) -> bool:
    return any(row.variant for row in result.rows)


def _header(result: SweepResult) -> tuple[str, ...]:
    load_kind = result.rows[0].load_kind
    per_gpu = ("tok/s/GPU",) if result.gpus is not None else ()
    noise = ("+- %",) if any(row.noise for row in result.rows) else ()
    goodput = ("goodput req/s",) if any(row.goodput_requests_per_s is not None for row in result.rows) else ()
    return (
        *(("variant",) if _has_variants(result) else ()), load_kind, "requests", "out tok/s", *noise, *per_gpu,
        "steady tok/s", "tok/s/user", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p99", *goodput, "mark",
    )  # fmt: skip


def _rows(result: SweepResult) -> Iterator[tuple[Any, ...]]:
    header = _header(result)
    for i, row in enumerate(result.rows):
        cells: dict[str, Any] = {
            "variant": row.variant,
            row.load_kind: f"{row.load:g}",
            "requests": row.requests,
            "out tok/s": row.output_tokens_per_s,
            "+- %": None if row.noise is None else f"{100 * row.noise.error:.1f}",
            "tok/s/GPU": row.output_tokens_per_s_per_gpu,
            "steady tok/s": row.steady_output_tokens_per_s,
            "tok/s/user": row.output_tokens_per_s_per_user,
            "TTFT p50": _statistic(row, "ttft_ms", "p50"),
            "TTFT p99": _statistic(row, "ttft_ms", "p99"),
            "TPOT p50": _statistic(row, "tpot_ms", "p50"),
            "TPOT p99": _statistic(row, "tpot_ms", "p99"),
            "E2E p99": _statistic(row, "e2e_ms", "p99"),
            "goodput req/s": row.goodput_requests_per_s,
            "mark": marks(result, i) or None,
        }
        yield tuple(cells[title] for title in header)


def marks(result: SweepResult, index: int) -> str:
    """Return what is special about a row: Pareto, knee, the tiers it answers, or that it is excluded."""
    if result.rows[index].excluded is not None:
        return "excluded"
    words = ["Pareto"] if index in result.pareto else []
    words += [KNEE] if index == result.knee else []
    return " ".join(words + [answer.tier for answer in result.tiers if answer.row == index])


def _statistic(row: SweepRow, name: str, statistic: str) -> float | None:
    return (getattr(row, name) or {}).get(statistic)


def row_doubts(row: SweepRow) -> Iterator[str]:
    """Yield what speaks against the figures of a load: failures, other lengths, cached prompts."""
    if row.requests_failed:
        yield f"{describe_load(row)}: {row.requests_failed} requests failed"
    if row.lengths_wrong:
        yield f"{describe_load(row)}: {row.lengths_wrong} outputs do not have the requested length"
    if row.prefix_cached:
        yield f"{describe_load(row)}: {row.prefix_cached}"


def _notes(result: SweepResult) -> Iterator[str]:
    unit = LOAD_UNITS[result.rows[0].load_kind]
    yield f"{result.rows[0].load_kind}: {unit}; latencies in ms; tok/s/user: output tokens / E2E, waiting included"
    y = "output tokens/s per GPU" if result.gpus is not None else "output tokens/s of the server (GPUs unknown: --gpus)"
    yield f"Pareto: no other point has both more {y} and more tokens/s/user"
    if result.knee is not None:
        yield KNEE_DEFINITION
    noises = [row.noise for row in result.rows if row.noise is not None]
    if noises:
        repeats = max(row.repeats for row in result.rows)
        yield f"+-: half the 95 % confidence interval of output tokens/s over {repeats} repeats; figures are medians"
    for row in result.rows:
        if row.excluded is not None:
            yield f"excluded: {describe_load(row)}: {row.excluded}"
        yield from row_doubts(row)
    client = result.client
    if client is not None and client.cpu_fraction is not None and client.loop_lag_p99_ms is not None:
        busy = f"the busiest of {client.processes} processes used {100 * client.cpu_fraction:.0f} % of a core"
        yield f"client: {busy}, its clock was at most {number(client.loop_lag_p99_ms)} ms late (p99)"
    if not result.finished:
        yield "not finished: more points were planned"


def describe_load(row: SweepRow) -> str:
    """Return a load in words: concurrency 64, or rate 2.5 with its variant."""
    return f"{row.load_kind} {row.load:g}" + (f" ({row.variant})" if row.variant else "")


def tier_text(answer: TierAnswer, result: SweepResult) -> str:
    """Return the answer of a tier in one line."""
    limits = ", ".join(map(str, answer.limits))
    variant = f", {answer.variant}" if answer.variant else ""
    head = f"{answer.tier} ({limits}{variant})"
    broken = f"; {answer.load_kind} {answer.fails_at:g} does not: {'; '.join(answer.broken)}" if answer.broken else ""
    if answer.row is None:
        return f"{head}: no measured load holds{broken}"
    row = result.rows[answer.row]
    y = row.output_tokens_per_s_per_gpu if result.gpus is not None else row.output_tokens_per_s
    speed = "" if y is None else f", {number(y)} output tokens/s{' per GPU' if result.gpus is not None else ''}"
    noise = ""
    if answer.contradicted:
        noise = f"; noise: {', '.join(f'{load:g}' for load in answer.contradicted)} held although lower loads did not"
    end = broken or "; no measured load fails"
    return f"{head}: {answer.load_kind} {answer.load:g}{speed}{end}{noise}"


def sweep_csv(result: SweepResult) -> str:
    """Return a line per load with all figures; an unknown one is empty."""
    columns = ("variant", "load_kind", "load", "repeats", "requests", "requests_failed", *FIGURES)
    statistics = [(name, statistic) for name in SUMMARIES for statistic in STATISTICS]
    output = io.StringIO()
    lines = csv.writer(output, lineterminator="\n")
    names = [f"{statistic}_{name}" for name, statistic in statistics]
    lines.writerow([*columns, *names, "noise_low", "noise_high", "pareto", "knee", "tiers", "excluded", "wall_s"])
    for i, row in enumerate(result.rows):
        values = [getattr(row, column) for column in columns]
        values += [_statistic(row, *pair) for pair in statistics]
        values += [row.noise.low, row.noise.high] if row.noise else [None, None]
        tiers = " ".join(answer.tier for answer in result.tiers if answer.row == i)
        lines.writerow([*values, int(i in result.pareto), int(i == result.knee), tiers, row.excluded, row.wall_s])
    return output.getvalue()
