"""Which requests are sent, and when: all at once, or so many in flight that a new one arrives whenever one ends.

    Load(list(enumerate(prompts)), in_flight).share(index=1, parts=4)

Nothing here asks the clock: ranks that compute the same requests must send them in the same order between the same
steps. Ranks that have requests of their own (attention data parallelism) deal them out in turn.
"""

from dataclasses import dataclass

from llmb.infer.prompts import Prompt


@dataclass(frozen=True)
class Load:
    """Prompts and their numbers in the whole run, in the order in which they are sent; how many may be in flight."""

    prompts: list[tuple[int, Prompt]]
    in_flight: int

    @property
    def at_once(self) -> bool:
        """Whether all are sent at the beginning."""
        return self.in_flight >= len(self.prompts)

    def share(self, index: int, parts: int) -> "Load":
        """What one of several drivers sends, so that all of them together keep to the limit.

        Where fewer may be in flight than there are drivers, some have nothing to send.
        """
        senders = min(parts, self.in_flight)
        if index >= senders:
            return Load([], 0)
        return Load(self.prompts[index::senders], self.in_flight // senders + (index < self.in_flight % senders))


def load_of(prompts: list[Prompt], concurrency: int) -> Load:
    """All at once where concurrency is not limited (below 1), or not less than there are."""
    limit = len(prompts) if concurrency < 1 else min(concurrency, len(prompts))
    return Load(list(enumerate(prompts)), limit)


@dataclass(frozen=True)
class Seat:
    """This rank among those that drive the engine: which share of the requests is its own, and whether it records.

    Ranks count along tensor, then pipeline parallelism. Those that compute the same requests all drive them alike, and
    the first of them records.
    """

    index: int
    parts: int
    records: bool


def seat_of(rank: int, tp: int, attention_dp: bool) -> Seat:
    """Where this rank sits."""
    if attention_dp:
        return Seat(rank % tp, tp, records=rank < tp)
    return Seat(0, 1, records=rank == 0)
