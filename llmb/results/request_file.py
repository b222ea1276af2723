"""Times of requests from event files, without those of their tokens: what a comparison of a million requests needs.

    read_request_times(run.all_events()) -> [RequestTimes(arrival=0.0, first_token=0.2, end=1.1, ...), ...]

The times of tokens are most of a line and are cut out before it is parsed; lines of other events are not parsed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import ClassVar

from llmb.config.serialization import parse_json_line
from llmb.events import MAX_LINE_BYTES, RequestDone
from llmb.formats.dense_reader import read_lines

KIND = b'"RequestDone"'
TOKEN_TIMES = b'"token_times": ['
NUMBERS = itemgetter("arrival", "end", "input_tokens", "output_tokens")


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """A measured and successful request. Not frozen: one that is takes five times as long to build."""

    token_times: ClassVar[tuple[float, ...]] = ()  # not read

    arrival: float
    first_token: float | None
    end: float
    input_tokens: int
    output_tokens: int


def read_request_times(paths: Iterable[Path]) -> list[RequestTimes]:
    """Return the measured and successful requests of several files."""
    return [times for path in paths for times in _read(path)]


def _read(path: Path) -> Iterator[RequestTimes]:
    for line in read_lines(path, MAX_LINE_BYTES):
        times = _parse(_without_token_times(line)) if KIND in line else None
        if times is not None:
            yield times


def _parse(line: bytes) -> RequestTimes | None:
    """Parse one line; None for warm-up, a failed request, another event, or a damaged line.

    `events.parse` would build all 22 fields of the event, for several times as long.
    """
    try:
        data = parse_json_line(line)
        if data["event"] != RequestDone.__name__ or data.get("warmup") or data.get("error") is not None:
            return None
        first_token = data.get("first_token")
        arrival, end, input_tokens, output_tokens = NUMBERS(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    types = {type(arrival), type(end), type(input_tokens), type(output_tokens)}
    if not types <= {int, float} or type(first_token) not in (int, float, NoneType):
        return None
    return RequestTimes(
        arrival=arrival, first_token=first_token, end=end, input_tokens=input_tokens, output_tokens=output_tokens
    )


def _without_token_times(line: bytes) -> bytes:
    start = line.find(TOKEN_TIMES)
    end = line.find(b"]", start)
    return line if start < 0 or end < 0 else line[: start + len(TOKEN_TIMES)] + line[end:]
