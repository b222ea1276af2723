"""Rules by which published rows are left out of fits and errors: what no column describes, or no GPU can do.

    for reason, rows in left_out_rows(read_serving_rows(path)).items(): ...

A row is left out when it is above the limit of its GPUs, and with it the series it belongs to (prefix caching); when
its requests waited although the KV cache holds them all (a limit of the batch that no column tells); and when the same
engine, GPUs, lengths and load were published much slower (speculative decoding, which no column tells).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from llmb.errors import ConfigError
from llmb.perfmodel.serving_time.cache_slots import cache_slots
from llmb.perfmodel.serving_time.serving_bounds import ServedFigures, serving_limits
from llmb.perfmodel.serving_time.serving_rows import ServingRow
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_work import serving_work

SPECULATIVE = 0.8  # TPOT against the slowest row of the same description: no release alone gained so much
WAITING = 0.5  # of the end-to-end time

IMPOSSIBLE = "above the limit of the GPUs"
SERIES = "same series as rows above the limit (prefix caching)"
WAITED = "requests waited although the KV cache holds them all (unknown batch limit)"
FASTER = "much faster than the same configuration in another row (speculative decoding)"
FASTER_SERIES = "series of which most rows are much faster than their like (speculative decoding)"
REPEATED = "the same measurement as an earlier row"


def left_out_rows(rows: Iterable[ServingRow]) -> dict[str, list[ServingRow]]:
    """Return the rows that are left out, by reason."""
    left_out: dict[str, list[ServingRow]] = defaultdict(list)
    usable = []
    seen = set()
    for row in rows:
        if (reason := _alone(row)) is not None:
            left_out[reason].append(row)
        elif (row.setup, row.ttft_ms, row.tpot_ms) in seen:
            left_out[REPEATED].append(row)
        else:
            usable.append(row)
        seen.add((row.setup, row.ttft_ms, row.tpot_ms))
    tainted = {_series(row) for row in left_out.get(IMPOSSIBLE, ())}
    left_out[SERIES] = [row for row in usable if _series(row) in tainted]
    faster, series = _speculative([row for row in usable if _series(row) not in tainted])
    left_out[FASTER], left_out[FASTER_SERIES] = faster, series
    return {reason: members for reason, members in left_out.items() if members}


def _alone(row: ServingRow) -> str | None:
    """Return why a row is left out whatever the others are."""
    if row.setup is None:
        return row.reason or "not described"
    if row.ttft_ms is None or row.tpot_ms is None:
        return "no measured time"
    if _is_impossible(row.setup, row.ttft_ms, row.tpot_ms):
        return IMPOSSIBLE
    try:
        slots = cache_slots(row.setup, serving_work(row.setup))
    except ConfigError as error:
        return str(error)
    e2e = row.ttft_ms + (row.setup.osl - 1) * row.tpot_ms
    if row.ttft_ms > WAITING * e2e and slots >= row.setup.concurrency and row.setup.osl > row.setup.isl / 16:
        return WAITED
    return None


def _is_impossible(setup: ServingSetup, ttft_ms: float, tpot_ms: float) -> bool:
    e2e_s = (ttft_ms + (setup.osl - 1) * tpot_ms) / 1e3
    rate = setup.concurrency * setup.osl * setup.length_ratio / e2e_s
    limits = serving_limits(setup, ServedFigures(output_tokens_per_s=rate, latency_ms=(ttft_ms, tpot_ms)))
    return any(limit.fraction > 1 for limit in limits)


def _series(row: ServingRow) -> tuple[str, ...]:
    return tuple(row.cells.get(name, "") for name in ("model", "backend", "backend_version", "system", "precision"))


def _speculative(rows: Sequence[ServingRow]) -> tuple[list[ServingRow], list[ServingRow]]:
    """Return rows much faster than their like, and the rest of the series that consist mostly of such rows."""
    slowest: dict[tuple[object, ...], float] = defaultdict(float)
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    by_series = defaultdict(list)
    for row in rows:
        key = _description(row)
        slowest[key], counts[key] = max(slowest[key], row.tpot_ms or 0.0), counts[key] + 1
        by_series[_series(row)].append(row)
    faster, series_rows = [], []
    for members in by_series.values():
        with_like = [row for row in members if counts[_description(row)] > 1]
        fast = [row for row in with_like if (row.tpot_ms or 0.0) < SPECULATIVE * slowest[_description(row)]]
        faster += fast
        if 2 * len(fast) > len(with_like):
            series_rows += [row for row in members if row not in with_like]
    return faster, series_rows


def _description(row: ServingRow) -> tuple[object, ...]:
    """Return what two rows must share to be comparable; layouts of one number of GPUs differ by less than the rule."""
    setup = row.setup
    assert setup is not None
    return (
        setup.shape, setup.generation, setup.gpu, setup.dtype, setup.isl, setup.osl, setup.concurrency, setup.gpus,
        setup.draft_tokens,
    )  # fmt: skip
