"""TTFT, TPOT and duration of a whole run of the native engine, by the rules of its scheduler.

    run_times(setup, NativeStep.of(...), slots, c)

`concurrency` clients send a request each, and the next one when it is finished, `waves` each. A step computes a token
of every decode and, within the token budget, prompts: whole ones that fit, or the first chunk of one that is longer
than what decodes leave. Requests whose first tokens come out of one step form a cohort and end together, so that time
advances from one cohort, arrival or prefill to the next. The ramp-up and the drain of a finite run are part of it.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from llmb.perfmodel.serving_time.closed_loop import LoopTimes
from llmb.perfmodel.serving_time.native_step import NativeStep
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import ServingRates
from llmb.perfmodel.step_time.fitted_constants import Constants

MOST_WAVES = 3  # of requests per client that are followed one by one; more repeat them
MOST_QUEUED = 6  # the same per slot, where clients wait for one
Lines = dict[tuple[float, ...], tuple[float, float]]  # work of a step -> its seconds after a prompt, per token more


@dataclass(frozen=True)
class _Cohort:
    requests: int
    first_step: int
    last_step: int
    first_token_s: float


class _Requests(NamedTuple):
    """Requests sent together, which arrive one after another."""

    number: int
    sent_s: float
    arrival_s: float = 0.0  # of the first


@dataclass
class _Chunks:
    """Prompt tokens of one step."""

    tokens: int = 0
    pairs: float = 0.0
    window_pairs: float = 0.0
    prompts: int = 0  # whose last chunk it is
    complete: list[_Requests] = field(default_factory=list)


class _Run:
    """One replica with its clients."""

    def __init__(self, steps: NativeStep, slots: int, clients: int, requests: int, c: Constants):
        setup = steps.setup
        self.steps, self.slots, self.unsent = steps, slots, requests - min(clients, requests)
        self.isl = max(1, round(setup.isl * setup.length_ratio))
        self.osl = max(2, round(setup.osl * setup.length_ratio))
        self.stages, self.emitted = setup.pp, setup.emitted
        self.length = max(1, round((self.osl - 1) / self.emitted))  # decode steps of a request
        self.budget, self.window = setup.max_num_tokens, setup.shape.window or 0
        self.isl_pairs = (self.isl**2 / 2, _windowed(self.isl, self.window))
        self.latency, self.spacing = c["first_token_native"], c["arrival_native"]
        self.now, self.step = 0.0, 0
        self.waiting: deque[_Requests] = deque()
        self.cohorts: deque[_Cohort] = deque()
        self.decodes, self.cached = 0, 0.0  # requests that decode, and their cached tokens
        self.partial: tuple[_Requests, int] | None = None  # a prompt of which some chunks are computed
        self.ttft = self.tpot = self.queue = 0.0  # sums over requests
        self.first_ttft = 0.0  # of ttft: of requests that are sent at the start, all together
        self.decode_tokens = 0.0  # of all steps
        unloaded = replace(setup, concurrency=1, max_batch_size=1, max_num_tokens=1, waves=1)
        self.lines = _lines_of(unloaded, steps.rates, tuple(steps.mixed_sizes))
        self._send(min(clients, requests))

    def _send(self, count: int) -> None:
        """Send requests now."""
        if count:
            self.waiting.append(_Requests(count, self.now, self.now + self.latency))

    def run(self) -> None:
        while self.waiting or self.cohorts or self.partial:
            chunks = self._schedule()
            if chunks.tokens:
                self._prefill(chunks)
            elif self.cohorts:
                self._decode()
            else:
                self.now = self.waiting[0].arrival_s

    def _schedule(self) -> _Chunks:
        """Return the prompt chunks of the next step."""
        chunks = _Chunks()
        left = free = max(1, self.budget - round(self.decodes * (1 + self.steps.setup.draft_tokens)))
        if self.partial:
            request, start = self.partial
            self.partial = None
            left -= self._chunk(chunks, request, start, left)
        slots = self.slots - self.decodes - chunks.prompts
        while (
            left > 0 and slots > 0 and self.partial is None and self.waiting and self.waiting[0].arrival_s <= self.now
        ):
            if left < self.isl <= free:
                break  # fits whole into the next step
            requests = self._admit(min(slots, max(1, left // self.isl)))
            slots -= requests.number
            if left < self.isl:
                left -= self._chunk(chunks, requests, 0, left)
                continue
            left -= requests.number * self.isl
            chunks.tokens += requests.number * self.isl
            chunks.pairs += requests.number * self.isl_pairs[0]
            chunks.window_pairs += requests.number * self.isl_pairs[1]
            chunks.prompts += requests.number
            chunks.complete.append(requests)
        return chunks

    def _admit(self, most: int) -> _Requests:
        """Take the first requests that have arrived, of those that were sent together."""
        count, sent, arrival = self.waiting.popleft()
        waited = self.now - arrival
        admitted = min(count, most, 1 + int(waited / self.spacing)) if self.spacing else min(count, most)
        self.queue += admitted * waited - self.spacing * admitted * (admitted - 1) / 2
        if admitted < count:
            self.waiting.appendleft(_Requests(count - admitted, sent, arrival + admitted * self.spacing))
        return _Requests(admitted, sent)

    def _chunk(self, chunks: _Chunks, request: _Requests, start: int, left: int) -> int:
        """Compute as much of one prompt as the budget leaves; return how much."""
        end = min(self.isl, start + left)
        chunks.tokens += end - start
        chunks.pairs += (end * end - start * start) / 2
        chunks.window_pairs += _windowed(end, self.window) - _windowed(start, self.window)
        if end == self.isl:
            chunks.prompts += 1
            chunks.complete.append(request)
        else:
            self.partial = (request, end)
        return end - start

    def _prefill(self, chunks: _Chunks) -> None:
        """Advance by a step with prompt chunks; in a pipeline every stage is busy with it for its part only."""
        context = self._context(0.0)
        mixed = self._seconds(context, chunks.tokens, chunks.prompts, chunks.pairs, chunks.window_pairs)
        alone = self._seconds(context) if self.stages > 1 and self.decodes else 0.0
        seconds = alone + (mixed - alone) / self.stages
        through = mixed - seconds  # until the last stage
        self._advance(1, seconds)
        for requests in chunks.complete:
            self.ttft += requests.number * (self.now + through - requests.sent_s)
            self.first_ttft += requests.number * (self.now + through) if requests.sent_s == 0.0 else 0.0
        if count := chunks.prompts:
            self.decodes += count
            self.cached += count * (self.isl + 1)
            # Decodes follow the last stage; until then those of others go on.
            delay = round(through / self._decode_seconds(1)) if through else 0
            self.cohorts.append(_Cohort(count, self.step, self.step + delay + self.length, self.now + through))

    def _decode(self) -> None:
        """Advance by steps of decodes only, until the oldest cohort ends or a request arrives that can be admitted."""
        count = self.cohorts[0].last_step - self.step
        seconds = self._decode_seconds(count)
        if self.waiting and self.decodes < self.slots:
            wait = max(0.0, self.waiting[0].arrival_s - self.now)
            until = int(wait // seconds) + 1
            if until < count:
                count = until
                seconds = self._decode_seconds(count)
        self._advance(count, count * seconds)

    def _decode_seconds(self, count: int) -> float:
        """Return the mean time of the next steps."""
        return self._seconds(self._context((count - 1) / 2 * self.emitted))

    def _seconds(
        self, context: float, prefill: int = 0, prompts: int = 0, pairs: float = 0.0, window_pairs: float = 0.0
    ) -> float:
        """Return the time of a step, which grows with the context of its decodes along a line."""
        graph = 0 if prefill else self.steps.decode_graph(self.decodes / self.stages)
        key = (self.decodes, graph, prefill, prompts, pairs, window_pairs)
        if key not in self.lines:
            work = {"prefill": prefill, "prompts": prompts, "pairs": pairs, "window_pairs": window_pairs}
            start, end = (
                total(self.steps.terms(decodes=self.decodes / self.stages, context=length, **work))
                for length in (float(self.isl), float(self.isl + self.osl))
            )
            self.lines[key] = (start, (end - start) / self.osl)
        start, per_token = self.lines[key]
        return start + per_token * (context - self.isl) if self.decodes else start

    def _context(self, ahead: float) -> float:
        return self.cached / self.decodes + ahead if self.decodes else 0.0

    def _advance(self, count: int, seconds: float) -> None:
        """Advance time; end cohorts, whose clients send again."""
        self.now += seconds
        self.step += count
        self.cached += self.decodes * count * self.emitted
        self.decode_tokens += self.decodes * count
        while self.cohorts and self.cohorts[0].last_step <= self.step:
            cohort = self.cohorts.popleft()
            steps = cohort.last_step - cohort.first_step
            self.cached -= cohort.requests * (self.isl + 1 + steps * self.emitted)
            self.decodes -= cohort.requests
            self.tpot += cohort.requests * (self.now - cohort.first_token_s) / (self.osl - 1)
            followers = min(cohort.requests, self.unsent)
            self.unsent -= followers
            self._send(followers)


@lru_cache(maxsize=4)
def _lines_of(unloaded: ServingSetup, rates: ServingRates, mixed_sizes: tuple[int, ...]) -> Lines:
    """Return the known steps of a layout, which are the same under any load and token budget."""
    return {}


def run_times(steps: NativeStep, slots: int, c: Constants) -> LoopTimes:
    """Return the means of all requests, and the duration of the run."""
    setup = steps.setup
    replicas = setup.attention_dp
    share, clients = max(1, slots // replicas), -(-setup.concurrency // replicas)
    requests = clients * setup.waves
    count = min(requests, MOST_QUEUED * share if clients > share else MOST_WAVES * clients)
    followed = min(clients, count)
    run = _Run(steps, share, followed, count, c)
    run.run()
    ttft, queue = _mean_ttft(run, followed, count, requests), run.queue / count if clients > share else 0.0
    if clients > share and count < 2 * clients:  # too few were followed: nearly all of the first wave
        alone = (run.ttft - run.queue) / count
        queue = run.now / count * (clients - share) * (1 - 0.5 / setup.waves)  # the first wave waits half as long
        ttft = alone + queue
    context = run.isl + run.osl / 2
    batch = run.decode_tokens / run.step / setup.pp
    return LoopTimes(
        ttft=ttft,
        tpot=run.tpot / count,
        queue=queue,
        decode=steps.terms(decodes=batch, context=context),
        prefill=steps.terms(
            decodes=0.0, context=0.0, prefill=run.isl, prompts=1, pairs=run.isl**2 / 2,
            window_pairs=_windowed(run.isl, run.window),
        ),
        seconds=run.now * requests / count,
    )  # fmt: skip


def _mean_ttft(run: _Run, clients: int, count: int, requests: int) -> float:
    """Return the mean of all requests: the first of every client once, later ones like those that were followed."""
    if count == clients:
        return run.ttft / count
    later = (run.ttft - run.first_ttft) / (count - clients)
    return (run.first_ttft + later * (requests - clients)) / requests


def total(terms: dict[str, float]) -> float:
    """Return the seconds of all terms."""
    return sum(terms.values())


def _windowed(tokens: float, window: float) -> float:
    """Return the (query, key) pairs of a prompt's first tokens in layers with a sliding window."""
    inside = max(0.0, tokens - window)
    return inside * window + (tokens - inside) ** 2 / 2
