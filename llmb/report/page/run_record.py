"""One finished run as a page needs it: configuration, result, events, explanation, and files beside the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmb.config.spec import RunConfig
from llmb.events import Event
from llmb.perfmodel.explain.explanation import Explanation
from llmb.perfmodel.probe.node_collectives import NodeCollectives
from llmb.perfmodel.probe.probe_record import ProbeRecord
from llmb.results.recorded_events import events_of
from llmb.results.result import Result

T = TypeVar("T", bound=Event)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything known of a run. Null: not recorded, or not applicable."""

    label: str  # a job id, or the name of the folder
    config: RunConfig
    result: Result
    events: Sequence[Event]
    explanation: Explanation | None = None
    command: str | None = None  # as it was typed, secrets masked
    files: Sequence[tuple[str, str]] = ()  # what it is, path relative to the page
    probe: ProbeRecord | None = None  # measured on the machine of the run, or on another with the same GPU
    node_collectives: NodeCollectives | None = None  # measured among its host and other nodes
    timelines: str = ""  # HTML: pictures of an out-of-core profile

    def of_type(self, kind: type[T]) -> list[T]:
        """Return the events of one type."""
        return events_of(self.events, kind)
