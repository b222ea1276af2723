"""Finished requests with their times and token counts as columns: a pass over a million objects takes longer than its
arithmetic, so they are passed over once.

    requests = TimedRequests.of(completed)
    requests.e2e_ms -> array("d", [812.4, ...])
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress, repeat
from math import isfinite
from operator import mul, sub, truediv
from typing import Any, Protocol, overload

AT_ONCE = 1000  # requests that are read at once, to stay in the processor's cache
Column = Sequence[float | None]  # an array where every request has the value, else a list


class TimedRequest(Protocol):
    """Timestamps and token counts of a finished request; times in seconds on one clock."""

    @property
    def arrival(self) -> float: ...
    @property
    def first_token(self) -> float | None: ...
    @property
    def token_times(self) -> Sequence[float]: ...
    @property
    def end(self) -> float: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


class TimedRequests(Sequence[Any]):
    """A sequence of requests (`TimedRequest`) and its columns."""

    def __init__(self, requests: Sequence[Any]) -> None:
        self._requests = requests

    @classmethod
    def of(cls, requests: Sequence[Any]) -> "TimedRequests":
        """Return requests with columns; those that have them are returned as they are, and share them."""
        return requests if isinstance(requests, cls) else cls(requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._requests[index]

    @cached_property
    def _times(self) -> tuple["array[float]", "array[float]", Column]:
        arrivals, ends = array("d"), array("d")
        firsts: list[float | None] = []
        for start in range(0, len(self._requests), AT_ONCE):
            some = self._requests[start : start + AT_ONCE]
            arrivals.extend([request.arrival for request in some])
            ends.extend([request.end for request in some])
            firsts += [request.first_token for request in some]
        return arrivals, ends, firsts if None in firsts else array("d", firsts)  # type: ignore[type-var]

    @property
    def arrivals(self) -> "array[float]":
        return self._times[0]

    @property
    def ends(self) -> "array[float]":
        return self._times[1]

    @property
    def first_tokens(self) -> Column:
        return self._times[2]

    @cached_property
    def input_tokens(self) -> "array[int]":
        return array("q", [request.input_tokens for request in self._requests])

    @cached_property
    def output_tokens(self) -> "array[int]":
        return array("q", [request.output_tokens for request in self._requests])

    @cached_property
    def gaps_ms(self) -> "array[float]":
        """Gaps between successive chunks of each request, negative ones included."""
        gaps = array("d")
        for start in range(0, len(self._requests), AT_ONCE):
            times, is_gap = array("d"), bytearray()
            for request in self._requests[start : start + AT_ONCE]:
                before = len(times)
                times.extend(output_times(request))
                is_gap += b"\1" * (len(times) - before)
                if is_gap:
                    is_gap[-1] = 0  # from its last time to the first one of the next request
            gaps.extend(array("d", compress(map(mul, map(sub, times[1:], times), repeat(1000.0)), is_gap)))
        return gaps

    @cached_property
    def has_ordered_token_times(self) -> bool:
        """Whether no token of a request arrived before the one before it, and all times are finite."""
        return is_plain(self.gaps_ms)

    @cached_property
    def ttft_ms(self) -> Column:
        return _elapsed_ms(self.arrivals, self.first_tokens)

    @cached_property
    def e2e_ms(self) -> Column:
        return _elapsed_ms(self.arrivals, self.ends)

    @cached_property
    def tpot_ms(self) -> Column:
        totals, firsts, tokens = self.e2e_ms, self.ttft_ms, self.output_tokens
        if isinstance(totals, array) and isinstance(firsts, array) and min(tokens, default=0) > 1:
            decodes = array("d", map(sub, totals, firsts))
            if min(decodes) >= 0:
                return array("d", map(truediv, decodes, map(sub, tokens, repeat(1))))
        return list(map(time_per_token, totals, firsts, tokens))


def without_nulls(values: Column) -> Sequence[float]:
    """Return the values of a column that are not null."""
    return values if isinstance(values, array) else array("d", (value for value in values if value is not None))


def output_times(request: TimedRequest) -> Sequence[float]:
    """Return the arrival times of output chunks, with the first token once."""
    times = request.token_times
    if request.first_token is not None and times and request.first_token < times[0]:
        return [request.first_token, *times]
    return times


def elapsed_ms(start: float, end: float | None) -> float | None:
    """Return the milliseconds between two times in seconds; None where they are none."""
    if end is None:
        return None
    elapsed = (end - start) * 1000.0
    return elapsed if isfinite(elapsed) and elapsed >= 0 else None


def time_per_token(total_ms: float | None, first_ms: float | None, tokens: int) -> float | None:
    """Return the time of each token after the first; None for fewer than two."""
    if total_ms is None or first_ms is None or tokens < 2 or total_ms < first_ms:
        return None
    return (total_ms - first_ms) / (tokens - 1)


def is_plain(values: Sequence[float]) -> bool:
    """Return whether all are finite and none is negative; false as well where only their sum is not finite."""
    return isfinite(sum(values)) and min(values, default=0.0) >= 0


def _elapsed_ms(starts: Sequence[float], ends: Column) -> Column:
    if isinstance(ends, array):
        elapsed = array("d", map(mul, map(sub, ends, starts), repeat(1000.0)))
        if is_plain(elapsed):
            return elapsed
    return list(map(elapsed_ms, starts, ends))
