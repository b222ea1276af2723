"""Which requests are sent, and when: all at once, or so many in flight that a new one arrives whenever one ends.

    Load(list(enumerate(prompts)), in_flight).share(index=1, parts=4)

Nothing here asks the clock: ranks that compute the same requests must send them in the same order between the same
steps. Ranks that have requests of their own (attention data parallelism) deal them out in turn.
"""

from dataclasses import dataclass

from llmb.config.spec import Inference
from llmb.serve.benchmark.prompts import Draw, Prompt

SETTLED = 32  # steps of the warm-up in which all of its requests are computed together


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


def warmup_load(work: Inference, load: Load, parts: int, cache_tokens: int, draw: Draw) -> Load:
    """This driver's share of the warm-up: as many requests as are computed at once, unless their number is given.

    They have the lengths of those that will be measured and other tokens. Their answers are cut where all of them have
    been computed together for a while: the steps beyond that are alike.
    """
    if work.warmup_requests is not None:
        count = -(-work.warmup_requests // parts)
    else:
        fitting = cache_tokens * len(load.prompts) // max(1, sum(prompt.total for _, prompt in load.prompts))
        count = min(load.in_flight, work.max_batch_size, max(1, fitting))
    lengths = [(len(prompt.tokens), prompt.output_tokens) for _, prompt in load.prompts]
    chosen = [lengths[i % len(lengths)] for i in range(count)] if lengths else []
    all_begun = -(-sum(inputs for inputs, _ in chosen) // work.max_num_tokens)  # steps until the last has begun
    prompts = draw.prompts((inputs, min(outputs, all_begun + SETTLED)) for inputs, outputs in chosen)
    return load_of(prompts, load.in_flight)


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
