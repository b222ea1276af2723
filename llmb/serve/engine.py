"""The serving engine: requests in, outputs out, one step at a time.

    engine = Engine(Scheduler(pool, limits), runner)
    engine.submit(Request(request_id=0, prompt=[1, 2, 3], max_tokens=8, on_end=print))
    engine.drain()

The next step is scheduled and launched before the tokens of the previous one are read, so that the device never waits
for the host. Everything happens in the caller's thread; callbacks may submit and cancel.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmb.serve.launch_slack import LaunchSlack
from llmb.serve.request import Request, RequestOutput, Sequence, TokenLogprobs
from llmb.serve.scheduler import Scheduler
from llmb.serve.step_batch import ModelRunner, StepBatch, StepHandle


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Requests and cache usage of the moment."""

    waiting: int
    running: int
    blocks_used: int
    blocks: int


class Engine:
    """Continuous batching of a scheduler's batches on a model runner.

    `depth`: steps that stay launched while an earlier one is read.
    `lockstep`: for ranks that must launch together though each has its own requests. It is called each step with
    whether this rank has work and returns whether any has; then a rank without work launches an empty batch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        depth: int = 1,
        lockstep: Callable[[bool], bool] | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.lockstep = lockstep
        self._unread: deque[tuple[StepBatch, StepHandle]] = deque()
        self._slack = LaunchSlack()

    @property
    def slack_s(self) -> float:
        """Seconds that the next call of `step` can be put off, to wait for requests, without the device running dry."""
        return self._slack.seconds() if self._unread else 0.0

    @property
    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            blocks_used=scheduler.pool.num_used,
            blocks=scheduler.pool.num_blocks,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; raise a ConfigError if it could never be served."""
        self.scheduler.submit(request)

    def cancel(self, request_id: int) -> bool:
        """End a request with the tokens it has so far and free its blocks. False if it has ended already."""
        sequence = self.scheduler.cancel(request_id)
        if sequence is not None:
            _notify(sequence)
        return sequence is not None

    def step(self) -> bool:
        """Launch the next step, then read an earlier one. False when there was nothing left to do."""
        busy = self.scheduler.has_unfinished_requests
        if self.lockstep is not None:
            busy = self.lockstep(busy)
        if not busy:
            self._read_all()
            return False
        started = time.monotonic()
        batch = self.scheduler.schedule()
        launches = bool(batch.chunks) or self.lockstep is not None
        if launches:
            self._unread.append((batch, self.runner.launch(batch)))
            self._slack.on_launch(started)
        if len(self._unread) > self.depth or not launches:
            self._read()
        return True

    def drain(self) -> None:
        """Step until every request has ended."""
        while self.step():
            pass

    def _read(self) -> None:
        """Wait for the oldest launched step and hand out its tokens."""
        batch, handle = self._unread.popleft()
        is_late = handle.is_done()
        tokens = handle.tokens()
        running = self._unread[0][1].graph_size if self._unread else None
        self._slack.on_read(handle.graph_size, not is_late, running)
        if logprobs := handle.logprobs():
            _notify_logprobs(batch, logprobs)
        for sequence in self.scheduler.update_from_output(batch, tokens):
            _notify(sequence)

    def _read_all(self) -> None:
        """Read the steps left over when all requests have ended: they computed tokens beyond an early stop."""
        while self._unread:
            self._read()


def _notify_logprobs(batch: StepBatch, logprobs: Mapping[int, TokenLogprobs]) -> None:
    """Call `on_logprobs` of requests that have not ended in the meantime."""
    chunks = batch.sampling_chunks
    for index, token_logprobs in logprobs.items():
        sequence = chunks[index].sequence
        if sequence.finish_reason is None and sequence.request.on_logprobs is not None:
            sequence.request.on_logprobs(sequence.request.request_id, token_logprobs)


def _notify(sequence: Sequence) -> None:
    """Call `on_end` of a finished request."""
    request, finish_reason = sequence.request, sequence.finish_reason
    if request.on_end is not None and finish_reason is not None:
        token_ids = tuple(sequence.token_ids[len(request.prompt) :])
        request.on_end(RequestOutput(request_id=request.request_id, token_ids=token_ids, finish_reason=finish_reason))
