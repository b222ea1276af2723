"""Events of a run, grouped by type: it may have a million requests, and a pass over all of them for the few events of
another type takes as long as a figure.

    events_of(events, RunStarted) -> [RunStarted(...), ...]
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

from llmb.events import Event, RequestDone
from llmb.perfmodel.samples.timed_requests import TimedRequests

E = TypeVar("E", bound=Event)


class RecordedEvents(Sequence[Event]):
    """The events in their order, and those of each type."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = list(events)
        self._by_type: dict[type, list[Any]] = {}
        for event in self._events:
            self._by_type.setdefault(type(event), []).append(event)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "RecordedEvents":
        """Return events grouped by type; those that are grouped are returned as they are."""
        return events if isinstance(events, cls) else cls(events)

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self._events[index]

    def of_type(self, kind: type[E]) -> list[E]:
        """Return the events of a type, in their order."""
        return self._by_type.get(kind, [])

    @cached_property
    def measured_requests(self) -> TimedRequests:
        return TimedRequests([request for request in self.of_type(RequestDone) if not request.warmup])

    @cached_property
    def completed_requests(self) -> TimedRequests:
        completed = [request for request in self.measured_requests if request.error is None]
        return self.measured_requests if len(completed) == len(self.measured_requests) else TimedRequests(completed)


def events_of(events: Iterable[Event], kind: type[E]) -> list[E]:
    """Return the events of a type, in their order."""
    return events.of_type(kind) if isinstance(events, RecordedEvents) else [e for e in events if isinstance(e, kind)]


def measured_requests(events: Iterable[Event]) -> TimedRequests:
    """Return every measured request, failed ones included."""
    return RecordedEvents.of(events).measured_requests


def completed_requests(events: Iterable[Event]) -> TimedRequests:
    """Return every measured request that succeeded."""
    return RecordedEvents.of(events).completed_requests
