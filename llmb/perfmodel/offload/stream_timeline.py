"""Timeline of one GPU, its link and its disk: events on their streams, measured or predicted, in one format.

An engine that moves its state through the GPU writes `profile/lanes.json`; the simulation of its plan returns the same.
Pictures, tables and the Chrome trace are made from it, so that prediction and measurement can be compared.

    write_timeline(path, timeline); read_timeline(path) == timeline

The file is JSON by columns: a run of many rounds has a hundred thousand events, and each would repeat its field names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from llmb.config.serialization import convert, field_types, read_json, to_json, write_atomic
from llmb.errors import ConfigError

StreamName = Literal["compute", "inbound", "outbound", "disk_read", "disk_write"]
DEVICE_STREAMS: tuple[StreamName, ...] = ("compute", "inbound", "outbound")
DISK_STREAMS: tuple[StreamName, ...] = ("disk_read", "disk_write")
STREAMS = DEVICE_STREAMS + DISK_STREAMS
Phase = Literal["embedding", "forward", "head", "backward", "update"]
NAMES_ON_DISK = {"events": "stretches", "stream": "lane"}  # fields that the file calls otherwise


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One task or copy on one stream. Null: not applicable, as the update of a layer has no chunk."""

    stream: StreamName
    name: (
        str  # forward, recompute, backward, head, embedding, update; of a copy its buffer kind (param, grad, rest, ...)
    )
    start: float  # seconds since the first recorded step began
    end: float
    step: int
    phase: Phase  # of the computation that this is, that a copy in is for, or that a copy out comes from
    round: int | None = None  # from 0, as all indices below
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
class StreamTimeline:
    """Some steps of a run, on all streams."""

    source: Literal["measured", "predicted"]
    events: tuple[TimelineEvent, ...]
    memory: tuple[MemoryUse, ...] = ()
    link_gbs: tuple[float, float] | None = None  # what the link sustains, in and out, in 1e9 bytes/s
    peak_tflops: float | None = None  # of the GPU in the run's dtype


RowType = TypeVar("RowType", TimelineEvent, MemoryUse)


def write_timeline(path: Path, timeline: StreamTimeline) -> None:
    """Write the file as a whole or not at all, as every file of a run."""
    columns = {"events": _to_columns(TimelineEvent, timeline.events), "memory": _to_columns(MemoryUse, timeline.memory)}
    plain = {field.name: columns.get(field.name, getattr(timeline, field.name)) for field in fields(StreamTimeline)}
    write_atomic(path, to_json({_on_disk(name): value for name, value in plain.items()}) + "\n")


def read_timeline(path: Path) -> StreamTimeline:
    """Read what `write_timeline` wrote; a damaged file is named in one line, with what is wrong in it."""
    try:
        return _parse(read_json(path))
    except _Damaged as damage:
        raise ConfigError(f"{path} is not a stream timeline: {damage}") from damage


class _Damaged(Exception):
    """Damaged content of a file, named without its path."""


def _parse(plain: Any) -> StreamTimeline:
    names = {_on_disk(field.name) for field in fields(StreamTimeline)}
    if not isinstance(plain, dict) or set(plain) != names:
        raise _Damaged(f"expected the fields {', '.join(sorted(names))}")
    types = field_types(StreamTimeline)
    try:
        scalars = {name: convert(types[name], plain[name], name) for name in ("source", "link_gbs", "peak_tflops")}
    except ConfigError as error:
        raise _Damaged(str(error)) from error
    events = _to_rows(TimelineEvent, plain[_on_disk("events")], _on_disk("events"))
    if backwards := next((event for event in events if event.end < event.start), None):
        raise _Damaged(f"an event ends at {backwards.end} before it starts at {backwards.start}")
    return StreamTimeline(events=events, memory=_to_rows(MemoryUse, plain["memory"], "memory"), **scalars)


def _on_disk(name: str) -> str:
    return NAMES_ON_DISK.get(name, name)


def _to_columns(row_type: type[RowType], rows: Sequence[RowType]) -> dict[str, Any]:
    """Return a list for each field; text, which repeats, as a dictionary of words and indices into it."""
    columns: dict[str, Any] = {}
    for name, field_type in field_types(row_type).items():  # type: ignore[arg-type]
        column = [getattr(row, name) for row in rows]
        columns[_on_disk(name)] = _encode_words(column) if _is_text(field_type) else column
    return columns


def _encode_words(column: list[str]) -> dict[str, Any]:
    index = {word: i for i, word in enumerate(dict.fromkeys(column))}
    return {"words": list(index), "at": [index[word] for word in column]}


def _to_rows(row_type: type[RowType], columns: Any, where: str) -> tuple[RowType, ...]:
    types = field_types(row_type)  # type: ignore[arg-type]
    names = [_on_disk(name) for name in types]
    if not isinstance(columns, dict) or set(columns) != set(names):
        raise _Damaged(f"{where} needs the columns {', '.join(names)}")
    checked = [_column(types[name], columns[_on_disk(name)], f"{where}.{_on_disk(name)}") for name in types]
    if len({len(column) for column in checked}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(names, checked, strict=True))
        raise _Damaged(f"the columns of {where} differ in length ({lengths})")
    return tuple(row_type(**dict(zip(types, values, strict=True))) for values in zip(*checked, strict=True))


def _column(field_type: Any, column: Any, where: str) -> list[Any]:
    """Check a column as a whole: value by value would take seconds for a long run."""
    if _is_text(field_type):
        return _decode_words(field_type, column, where)
    if not isinstance(column, list):
        raise _Damaged(f"{where} is not a list")
    allowed = {field_type, int} if field_type is float else set(get_args(field_type)) or {field_type}
    if not set(map(type, column)) <= allowed:
        raise _Damaged(f"{where} holds a value of the wrong type")
    if not all(math.isfinite(value) for value in column if value is not None):
        raise _Damaged(f"{where} holds a value that is not finite")
    return [float(value) for value in column] if field_type is float else column


def _decode_words(field_type: Any, column: Any, where: str) -> list[str]:
    try:
        words = [convert(field_type, word, where) for word in column["words"]]
        if any(type(i) is not int or i < 0 for i in column["at"]):
            raise _Damaged(f"{where} has an index that is not an integer from 0")
        return [words[i] for i in column["at"]]
    except ConfigError as error:
        raise _Damaged(str(error)) from error
    except (KeyError, IndexError, TypeError) as error:
        raise _Damaged(f"{where} is not a list of words and indices") from error


def _is_text(field_type: Any) -> bool:
    return field_type is str or any(isinstance(choice, str) for choice in get_args(field_type))
