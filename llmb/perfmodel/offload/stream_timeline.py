"""What one GPU and its link did, and when: stretches of work on three lanes, measured or predicted, in one form.

An engine that moves its state through the GPU writes `profile/lanes.json`; the simulation of its plan gives the same.
Pictures, tables and the Chrome trace are made of these, so that prediction and measurement can be laid side by side.

    write_lanes(path, lanes); read_lanes(path) == lanes

The file is JSON by columns: a run of many rounds has a hundred thousand stretches, and each would spell its own fields.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from llmb.config.serialization import convert, hints, read_json, to_json, write_whole
from llmb.errors import ConfigError

Lane = Literal["compute", "inbound", "outbound"]
LANES: tuple[Lane, ...] = ("compute", "inbound", "outbound")
Phase = Literal["embedding", "forward", "head", "backward", "update"]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """One piece of work on one lane. Null: it has none of these, as the update of a layer has no chunk."""

    lane: Lane
    name: (
        str  # forward, recompute, backward, head, embedding, update; of a copy: what is copied (param, grad, rest, ...)
    )
    start: float  # seconds since the first step shown began
    end: float
    step: int
    phase: Phase  # of the computation that this is, that a copy in is for, or that a copy out comes from
    round: int | None = None  # from 0, as all numbers below
    layer: int | None = None
    group: int | None = None
    chunk: int | None = None
    flops: float = 0.0
    bytes: int = 0  # copied


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes in use at a moment; host and device budgets are in the plan."""

    time: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Some steps of a run, on all lanes."""

    source: Literal["measured", "predicted"]
    stretches: tuple[Stretch, ...]
    memory: tuple[MemoryUse, ...] = ()
    link_gbs: tuple[float, float] | None = None  # what the link can do, in and out, in 1e9 bytes a second
    peak_tflops: float | None = None  # of the GPU in the run's number format


Row = TypeVar("Row", Stretch, MemoryUse)


def write_lanes(path: Path, lanes: Lanes) -> None:
    """Whole or not at all, as every file of a run."""
    plain = {field.name: getattr(lanes, field.name) for field in fields(Lanes)}
    plain["stretches"] = _columns(Stretch, lanes.stretches)
    plain["memory"] = _columns(MemoryUse, lanes.memory)
    write_whole(path, to_json(plain) + "\n")


def read_lanes(path: Path) -> Lanes:
    """What `write_lanes` wrote; a damaged file is named in one line, with what is wrong in it."""
    try:
        return _lanes(read_json(path))
    except _Damaged as damage:
        raise ConfigError(f"{path} is not a record of lanes: {damage}") from damage


class _Damaged(Exception):
    """What is wrong with a file's content, before its name is put in front."""


def _lanes(plain: Any) -> Lanes:
    names = {field.name for field in fields(Lanes)}
    if not isinstance(plain, dict) or set(plain) != names:
        raise _Damaged(f"expected the fields {', '.join(sorted(names))}")
    known = hints(Lanes)
    try:
        rest = {name: convert(known[name], plain[name], name) for name in ("source", "link_gbs", "peak_tflops")}
    except ConfigError as error:
        raise _Damaged(str(error)) from error
    stretches = _rows(Stretch, plain["stretches"], "stretches")
    if backwards := next((s for s in stretches if s.end < s.start), None):
        raise _Damaged(f"a stretch ends at {backwards.end} before it starts at {backwards.start}")
    return Lanes(stretches=stretches, memory=_rows(MemoryUse, plain["memory"], "memory"), **rest)


def _columns(kind: type[Row], rows: Sequence[Row]) -> dict[str, Any]:
    """A list for each field; of text, which repeats, the words once and their places."""
    found: dict[str, Any] = {}
    for name, field_kind in hints(kind).items():  # type: ignore[arg-type]
        column = [getattr(row, name) for row in rows]
        found[name] = _spelt_once(column) if _is_text(field_kind) else column
    return found


def _spelt_once(column: list[str]) -> dict[str, Any]:
    place = {word: i for i, word in enumerate(dict.fromkeys(column))}
    return {"words": list(place), "at": [place[word] for word in column]}


def _rows(kind: type[Row], columns: Any, where: str) -> tuple[Row, ...]:
    known = hints(kind)  # type: ignore[arg-type]
    if not isinstance(columns, dict) or set(columns) != set(known):
        raise _Damaged(f"{where} needs the columns {', '.join(known)}")
    checked = [_column(field_kind, columns[name], f"{where}.{name}") for name, field_kind in known.items()]
    if len({len(column) for column in checked}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(known, checked, strict=True))
        raise _Damaged(f"the columns of {where} differ in length ({lengths})")
    return tuple(kind(**dict(zip(known, values, strict=True))) for values in zip(*checked, strict=True))


def _column(kind: Any, column: Any, where: str) -> list[Any]:
    """Checked as a whole: one value after the other would take seconds on a long run."""
    if _is_text(kind):
        return _spelt_out(kind, column, where)
    if not isinstance(column, list):
        raise _Damaged(f"{where} is not a list")
    allowed = {kind, int} if kind is float else set(get_args(kind)) or {kind}
    if not set(map(type, column)) <= allowed:
        raise _Damaged(f"{where} holds a value of the wrong type")
    if not all(math.isfinite(value) for value in column if value is not None):
        raise _Damaged(f"{where} holds a value that is not finite")
    return [float(value) for value in column] if kind is float else column


def _spelt_out(kind: Any, column: Any, where: str) -> list[str]:
    try:
        words = [convert(kind, word, where) for word in column["words"]]
        if any(type(i) is not int or i < 0 for i in column["at"]):
            raise _Damaged(f"{where} has a place that is no whole number from 0")
        return [words[i] for i in column["at"]]
    except ConfigError as error:
        raise _Damaged(str(error)) from error
    except (KeyError, IndexError, TypeError) as error:
        raise _Damaged(f"{where} is not a list of words and their places") from error


def _is_text(kind: Any) -> bool:
    return kind is str or any(isinstance(choice, str) for choice in get_args(kind))
