"""TTFT, TPOT and duration of a whole run of the native engine, by the rules of its scheduler.

    run_times(setup, NativeStep.of(...), slots, c)

`concurrency` clients send a request each, and the next one when it is finished, `waves` each. A step computes a token
of every decode and, within the token budget, prompts: whole ones that fit, or the first chunk of one that is longer
than what decodes leave. Requests of one length whose first tokens come out of one step form a cohort and end together,
so that time advances from one cohort, arrival or prefill to the next. The ramp-up and the drain of a finite run are
part of it. Where lengths vary, every request has its own, in the order in which they are sent.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import cycle, groupby, islice
from statistics import fmean
from typing import NamedTuple

from llmb.config.native.request_lengths import Lengths
from llmb.perfmodel.serving_time.closed_loop import LoopTimes
from llmb.perfmodel.serving_time.native_step import NativeStep
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import ServingRates
from llmb.perfmodel.step_time.fitted_constants import Constants

MOST_WAVES = 3  # of requests per client that are followed one by one; more repeat them
MOST_QUEUED = 6  # the same per slot, where clients wait for one
Lines = dict[tuple[float, ...], tuple[float, float]]  # work of a step -> its seconds after a prompt, per token more


class _Cohort(NamedTuple):
    last_step: int
    first_step: int
    requests: int
    isl: int
    osl: int
    first_token_s: float


class _Requests(NamedTuple):
    """Requests of one length sent together, which arrive one after another."""

    number: int
    sent_s: float
    arrival_s: float  # of the first
    isl: int
    osl: int


@dataclass
class _Chunks:
    """Prompt tokens of one step."""

    tokens: int = 0
    pairs: float = 0.0
    window_pairs: float = 0.0
    complete: list[_Requests] = field(default_factory=list)  # whose last chunk it is

    @property
    def prompts(self) -> int:
        return sum(requests.number for requests in self.complete)


class _Run:
    """One replica with its clients, and requests whose lengths are given in the order in which they are sent."""

    def __init__(self, steps: NativeStep, slots: int, clients: int, lengths: Lengths, c: Constants):
        setup = steps.setup
        self.steps, self.slots, self.lengths = steps, slots, iter(lengths)
        self.isl, self.osl = _nominal_lengths(setup)
        self.stages, self.emitted = setup.pp, setup.emitted
        self.budget, self.window = setup.max_num_tokens, setup.shape.window or 0
        self.latency, self.spacing = c["first_token_native"], c["arrival_native"]
        self.now, self.step, self.last_out = 0.0, 0, 0.0  # seconds, steps, and when the last stage ended its last step
        self.waiting: deque[_Requests] = deque()
        self.cohorts: list[_Cohort] = []  # a heap: the first ends first
        self.in_pipeline: deque[tuple[float, _Requests]] = deque()  # prefilled, by the time of their first token
        self.decodes, self.cached = 0, 0.0  # requests that decode, and their cached tokens
        self.partial: tuple[_Requests, int] | None = None  # a prompt of which some chunks are computed
        self.ttft = self.tpot = self.queue = 0.0  # sums over requests
        self.first_ttft = self.first_queue = 0.0  # of these: of requests that are sent at the start, all together
        self.decode_tokens = 0.0  # of all steps
        unloaded = replace(setup, concurrency=1, max_batch_size=1, max_num_tokens=1, waves=1, lengths=())
        self.lines = _lines_of(unloaded, steps.rates, tuple(steps.mixed_sizes))
        self._send(clients)

    def _send(self, count: int) -> None:
        """Send requests now, as far as there are any."""
        sent = 0
        for (isl, osl), group in groupby(islice(self.lengths, count)):
            number = len(list(group))
            self.waiting.append(_Requests(number, self.now, self.now + self.latency + sent * self.spacing, isl, osl))
            sent += number

    def run(self) -> None:
        while self.waiting or self.cohorts or self.partial or self.in_pipeline:
            chunks = self._schedule()
            if chunks.tokens:
                self._prefill(chunks)
            elif self.cohorts:
                self._decode()
            else:
                self._advance(0, self._until_next() - self.now)

    def _until_next(self) -> float:
        """Return when a prompt arrives or leaves the pipeline next, in a future in which nothing is computed."""
        times = [requests.arrival_s for requests in islice(self.waiting, 1)]
        times += [first_token for first_token, _ in islice(self.in_pipeline, 1)]
        return min(time for time in times if time > self.now)

    def _schedule(self) -> _Chunks:
        """Return the prompt chunks of the next step."""
        chunks = _Chunks()
        left = free = max(1, self.budget - round(self.decodes * (1 + self.steps.setup.draft_tokens)))
        if self.partial:
            request, start = self.partial
            self.partial = None
            left -= self._chunk(chunks, request, start, left)
        slots = self._free_slots() - chunks.prompts
        while (
            left > 0 and slots > 0 and self.partial is None and self.waiting and self.waiting[0].arrival_s <= self.now
        ):
            isl = self.waiting[0].isl
            if left < isl <= free:
                break  # fits whole into the next step
            requests = self._admit(min(slots, max(1, left // isl)))
            slots -= requests.number
            if left < isl:
                left -= self._chunk(chunks, requests, 0, left)
                continue
            left -= requests.number * isl
            chunks.tokens += requests.number * isl
            chunks.pairs += requests.number * isl**2 / 2
            chunks.window_pairs += requests.number * _windowed(isl, self.window)
            chunks.complete.append(requests)
        return chunks

    def _admit(self, most: int) -> _Requests:
        """Take the first requests that have arrived, of those that were sent together."""
        first = self.waiting.popleft()
        count, waited = first.number, self.now - first.arrival_s
        admitted = min(count, most, 1 + int(waited / self.spacing)) if self.spacing else min(count, most)
        queue = admitted * waited - self.spacing * admitted * (admitted - 1) / 2
        self.queue += queue
        self.first_queue += queue if first.sent_s == 0.0 else 0.0
        if admitted < count:
            arrival = first.arrival_s + admitted * self.spacing
            self.waiting.appendleft(first._replace(number=count - admitted, arrival_s=arrival))
        return first._replace(number=admitted)

    def _chunk(self, chunks: _Chunks, request: _Requests, start: int, left: int) -> int:
        """Add the next chunk of one prompt; return its tokens."""
        end = min(request.isl, start + left)
        chunks.tokens += end - start
        chunks.pairs += (end * end - start * start) / 2
        chunks.window_pairs += _windowed(end, self.window) - _windowed(start, self.window)
        if end == request.isl:
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
        # The last stage ends it after all stages, and after the step before, which may be longer.
        self.last_out = max(self.now + mixed, self.last_out + seconds)
        for requests in chunks.complete:
            self.ttft += requests.number * (self.last_out - requests.sent_s)
            self.first_ttft += requests.number * self.last_out if requests.sent_s == 0.0 else 0.0
            self.in_pipeline.append((self.last_out, requests))
        self._advance(1, seconds)

    def _leave_pipeline(self) -> None:
        """Begin to decode requests whose first token has come out of the last stage."""
        while self.in_pipeline and self.in_pipeline[0][0] <= self.now:
            first_token, requests = self.in_pipeline.popleft()
            count, isl, osl = requests.number, requests.isl, requests.osl
            if osl == 1:
                self._send(count)
                continue
            self.decodes += count
            self.cached += count * (isl + 1)
            last_step = self.step + max(1, round((osl - 1) / self.emitted))
            heappush(self.cohorts, _Cohort(last_step, self.step, count, isl, osl, first_token))

    def _decode(self) -> None:
        """Advance by decodes only, until the first cohort ends, or a request can be admitted or leaves the pipeline."""
        count = self.cohorts[0].last_step - self.step
        seconds = self._decode_seconds(count)
        waits = [first_token - self.now for first_token, _ in islice(self.in_pipeline, 1)]
        if self.waiting and self._free_slots():
            waits.append(self.waiting[0].arrival_s - self.now)
        if waits:
            until = int(max(0.0, min(waits)) // seconds) + 1
            if until < count:
                count = until
                seconds = self._decode_seconds(count)
        self._advance(count, count * seconds)

    def _free_slots(self) -> int:
        return self.slots - self.decodes - sum(requests.number for _, requests in self.in_pipeline)

    def _decode_seconds(self, count: int) -> float:
        """Return the mean time of the next steps."""
        return self._seconds(self._context((count - 1) / 2 * self.emitted))

    def _seconds(
        self, context: float, prefill: int = 0, prompts: int = 0, pairs: float = 0.0, window_pairs: float = 0.0
    ) -> float:
        """Return the time of a step, which grows with the context of its decodes along a line."""
        decodes = self.steps.stage_decodes(self.decodes)
        graph = 0 if prefill else self.steps.decode_graph(decodes)
        key = (self.decodes, graph, prefill, prompts, pairs, window_pairs)
        if key not in self.lines:
            work = {"prefill": prefill, "prompts": prompts, "pairs": pairs, "window_pairs": window_pairs}
            start, end = (
                total(self.steps.terms(decodes=decodes, context=length, **work))
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
        ended = 0
        while self.cohorts and self.cohorts[0].last_step <= self.step:
            cohort = heappop(self.cohorts)
            steps = cohort.last_step - cohort.first_step
            self.cached -= cohort.requests * (cohort.isl + 1 + steps * self.emitted)
            self.decodes -= cohort.requests
            self.tpot += cohort.requests * (self.now - cohort.first_token_s) / (cohort.osl - 1)
            ended += cohort.requests
        self._send(ended)
        self._leave_pipeline()


@lru_cache(maxsize=4)
def _lines_of(unloaded: ServingSetup, rates: ServingRates, mixed_sizes: tuple[int, ...]) -> Lines:
    """Return the known steps of a layout, which are the same under any load and token budget."""
    return {}


def run_times(steps: NativeStep, slots: int, c: Constants) -> LoopTimes:
    """Return the means of all requests, and the duration of the run."""
    setup = steps.setup
    replicas = setup.attention_dp
    share, clients = -(-slots // replicas), -(-setup.concurrency // replicas)
    requests = clients * setup.waves
    count = min(requests, MOST_QUEUED * share if clients > share else MOST_WAVES * clients)
    lengths = tuple(islice(cycle(setup.lengths[::replicas] or [_nominal_lengths(setup)]), count))
    followed = min(clients, count)
    run = _Run(steps, share, followed, lengths, c)
    run.run()
    ttft = _mean(run.ttft, run.first_ttft, followed, count, requests)
    queue = _mean(run.queue, run.first_queue, followed, count, requests) if clients > share else 0.0
    longer = max(1, sum(osl > 1 for _, osl in lengths))  # than one token, which the prefill computes
    tpot = run.tpot / longer
    if clients > share and count < 2 * clients:  # too few were followed: nearly all of the first wave
        alone = (run.ttft - run.queue) / count
        in_engine = alone + (run.osl - 1) * tpot
        queue = max(0.0, run.now / count * clients - in_engine) * (1 - 0.5 / setup.waves)  # the first wave: half of it
        ttft = alone + queue
    context = run.isl + run.osl / 2
    batch = steps.stage_decodes(run.decode_tokens / run.step)
    prefill = _alone(run, steps)
    return LoopTimes(
        ttft=ttft,
        tpot=tpot,
        queue=queue,
        decode=steps.terms(decodes=batch, context=context) if batch else dict.fromkeys(prefill, 0.0),
        prefill=prefill,
        seconds=run.now * requests / count,
        mean_osl=fmean(osl for _, osl in lengths),
    )


def _alone(run: _Run, steps: NativeStep) -> dict[str, float]:
    """Return the prefill of one prompt by kind, whose chunks follow one another through the stages of a pipeline."""
    terms = steps.terms(
        decodes=0.0, context=0.0, prefill=run.isl, prompts=1, pairs=run.isl**2 / 2,
        window_pairs=_windowed(run.isl, run.window),
    )  # fmt: skip
    chunks = -(-run.isl // run.budget)
    return {name: seconds * (chunks + run.stages - 1) / (chunks * run.stages) for name, seconds in terms.items()}


def _nominal_lengths(setup: ServingSetup) -> tuple[int, int]:
    """Return input and output tokens of a request; of varied ones, their means."""
    if setup.lengths:
        isl, osl = (max(1, round(fmean(tokens))) for tokens in zip(*setup.lengths, strict=True))
        return isl, osl
    osl = 1 if setup.osl == 1 else max(2, round(setup.osl * setup.length_ratio))
    return max(1, round(setup.isl * setup.length_ratio)), osl


def _mean(total_s: float, first_s: float, clients: int, count: int, requests: int) -> float:
    """Return the mean of all requests: the first of every client once, later ones like those that were followed."""
    if count == clients:
        return total_s / count
    later = (total_s - first_s) / (count - clients)
    return (first_s + later * (requests - clients)) / requests


def total(terms: dict[str, float]) -> float:
    """Return the seconds of all terms."""
    return sum(terms.values())


def _windowed(tokens: float, window: float) -> float:
    """Return the (query, key) pairs of a prompt's first tokens in layers with a sliding window."""
    inside = max(0.0, tokens - window)
    return inside * window + (tokens - inside) ** 2 / 2
