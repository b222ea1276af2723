"""The engine: requests in, answers out, one step at a time.

    engine = Engine(Scheduler(pool, limits), runner)
    engine.submit(Request(number=0, prompt=[1, 2, 3], max_tokens=8, on_end=print))
    engine.drain()

The next step is planned and launched before the tokens of the one before are read, so that the device never waits for
the host. Everything happens in the caller's thread; callbacks may submit and cancel.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llmb.serve.request import Answer, Request, Sequence
from llmb.serve.scheduler import Scheduler
from llmb.serve.step_batch import Launched, Plan, Runner


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much there is to do."""

    waiting: int
    running: int
    blocks_used: int
    blocks: int


class Engine:
    """`depth`: steps that stay launched while an earlier one is read.

    `lockstep`: for ranks that must launch together though each has requests of its own. It is asked each step, with
    whether this rank has work, and says whether any has; then a rank with nothing to compute launches an empty plan.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        depth: int = 1,
        lockstep: Callable[[bool], bool] | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.lockstep = lockstep
        self._unread: deque[tuple[Plan, Launched]] = deque()

    @property
    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            blocks_used=scheduler.pool.used,
            blocks=scheduler.pool.blocks,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; ConfigError if it could never be answered."""
        self.scheduler.submit(request)

    def cancel(self, number: int) -> bool:
        """End a request with what it has so far; its blocks are free at once. False if it has ended already."""
        sequence = self.scheduler.cancel(number)
        if sequence is not None:
            _tell(sequence)
        return sequence is not None

    def step(self) -> bool:
        """Launch the next step, then read an earlier one. False when there was nothing left to do."""
        busy = self.scheduler.busy
        if self.lockstep is not None:
            busy = self.lockstep(busy)
        if not busy:
            self._read_all()
            return False
        plan = self.scheduler.plan()
        launches = bool(plan.parts) or self.lockstep is not None
        if launches:
            self._unread.append((plan, self.runner.launch(plan)))
        if len(self._unread) > self.depth or not launches:
            self._read()
        return True

    def drain(self) -> None:
        """Go on until every request has ended."""
        while self.step():
            pass

    def _read(self) -> None:
        """Wait for the oldest launched step and hand out its tokens."""
        plan, launched = self._unread.popleft()
        for sequence in self.scheduler.took(plan, launched.tokens()):
            _tell(sequence)

    def _read_all(self) -> None:
        """Steps may be left when all has ended: what they computed belonged to answers that stopped early."""
        while self._unread:
            self._read()


def _tell(sequence: Sequence) -> None:
    """A request has ended: say so to whoever asked."""
    request, finish = sequence.request, sequence.finish
    if request.on_end is not None and finish is not None:
        answer = tuple(sequence.tokens[len(request.prompt) :])
        request.on_end(Answer(number=request.number, tokens=answer, finish=finish))
