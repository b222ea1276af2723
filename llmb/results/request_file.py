"""Times of requests from event files, without those of their tokens: what a comparison of a million requests needs.

    read_request_times(run.all_events()) -> [RequestTimes(arrival=0.0, first_token=0.2, end=1.1, ...), ...]

The times of tokens are most of a line and are cut out before it is parsed; lines of other events are not parsed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from llmb.events import RequestDone, parse

KIND = b'"RequestDone"'
TOKEN_TIMES = b'"token_times": ['


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """A measured and successful request."""

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
    with path.open("rb") as lines:
        for line in lines:
            event = parse(_without_token_times(line)) if KIND in line else None
            if isinstance(event, RequestDone) and not event.warmup and event.error is None:
                yield RequestTimes(
                    arrival=event.arrival, first_token=event.first_token, end=event.end,
                    input_tokens=event.input_tokens, output_tokens=event.output_tokens,
                )  # fmt: skip


def _without_token_times(line: bytes) -> bytes:
    start = line.find(TOKEN_TIMES)
    end = line.find(b"]", start)
    return line if start < 0 or end < 0 else line[: start + len(TOKEN_TIMES)] + line[end:]
