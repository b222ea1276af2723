"""Traces: requests with the times at which a real service received them.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}      Mooncake, ms
    TIMESTAMP,ContextTokens,GeneratedTokens                                                          Azure
    2023-11-16 18:17:03.9799600,374,44

Times count from the first request of the file. `hash_ids` name the blocks of 512 tokens of a prompt: requests with a
common beginning share prefixes.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmb.config.serialization import parse_json
from llmb.errors import ConfigError
from llmb.loadgen.lengths import LONGEST, read_text

HASH_BLOCK_TOKENS = 512  # of Mooncake's hash_ids
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    time_s: float  # since the first
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    cacheable_tokens: int | None = None  # of its input, that earlier requests of the trace have in common with it


def read_trace(path: Path, speedup: float = 1.0) -> list[TraceRequest]:
    """Read a trace of either format in order of time; `speedup` 2 sends it in half the time."""
    text = read_text(path, "the trace ")
    first_line = text.lstrip().partition("\n")[0]
    rows = _azure_rows(path, text) if first_line.startswith(AZURE_COLUMNS[0]) else _mooncake_rows(path, text)
    if not rows:
        raise ConfigError(f"the trace {path} holds no requests")
    rows.sort(key=lambda row: row.time_s)
    start = rows[0].time_s
    cacheable = cacheable_tokens(rows) if any(row.hash_ids for row in rows) else [None] * len(rows)
    return [
        TraceRequest((row.time_s - start) / speedup, row.input_tokens, row.output_tokens, row.hash_ids, tokens)
        for row, tokens in zip(rows, cacheable, strict=True)
    ]


def cacheable_tokens(rows: Sequence[TraceRequest]) -> list[int | None]:
    """Return for each request how many of its input tokens an unlimited prefix cache would hold when it arrives."""
    seen: set[int] = set()
    tokens: list[int | None] = []
    for row in rows:
        blocks = 0
        while blocks < len(row.hash_ids) and row.hash_ids[blocks] in seen:
            blocks += 1
        tokens.append(min(blocks * HASH_BLOCK_TOKENS, row.input_tokens))
        seen.update(row.hash_ids)
    return tokens


def _mooncake_rows(path: Path, text: str) -> list[TraceRequest]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            ids = entry.get("hash_ids") or ()
            rows.append(
                TraceRequest(
                    float(entry["timestamp"]) / 1000,
                    _length(entry["input_length"]),
                    _length(entry["output_length"]),
                    tuple(int(value) for value in ids),
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{path} line {number}: expected timestamp (ms), input_length, output_length and maybe hash_ids, or "
                f"columns {','.join(AZURE_COLUMNS)}"
            ) from error
    return rows


def _azure_rows(path: Path, text: str) -> list[TraceRequest]:
    rows = []
    for number, row in enumerate(csv.DictReader(text.splitlines()), start=2):
        try:
            time_s = _timestamp(row["TIMESTAMP"])
            rows.append(TraceRequest(time_s, _length(row["ContextTokens"]), _length(row["GeneratedTokens"])))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ConfigError(f"{path} line {number}: expected {', '.join(AZURE_COLUMNS)}") from error
    return rows


def _length(value: Any) -> int:
    length = int(value)
    if not 0 <= length <= LONGEST:
        raise ValueError(length)
    return max(1, length)  # services also log requests that ended without a token


def _timestamp(text: str) -> float:
    """Return seconds since 1970 of a time with up to seven digits of a second; a zone is ignored, as all are alike."""
    whole, _, fraction = text.strip().partition(".")
    digits = "".join(char for char in fraction.partition("+")[0] if char.isdigit())
    seconds = datetime.fromisoformat(whole.replace("Z", "")).replace(tzinfo=UTC).timestamp()
    return seconds + (float(f"0.{digits}") if digits else 0.0)
