"""A device made of plain lists, on which a scheduling mistake changes an answer or raises.

The next token is a hash of all tokens of the sequence, read back from the blocks that its table names. What a step
needs from the host is copied when it is launched; it is computed only when its tokens, or those of a later step, are
asked for. So a wrong table, a block freed too early, a stale prefix or an overwritten shared block shows.
"""

from dataclasses import dataclass, field

from llmb.serve.request import Answer, Request
from llmb.serve.step_batch import Part, Plan
from llmb.serve.step_limits import Limits
from llmb.serve.stop_criteria import ending

VOCABULARY = 11


def next_token(history) -> int:
    value = 17
    for token in history:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value % VOCABULARY


def plain_answer(request: Request) -> Answer:
    """What a request must be answered, computed with nothing beside it."""
    tokens = list(request.prompt)
    finish = None
    while finish is None:
        tokens.append(next_token(tokens))
        finish = ending(request, tokens)
    return Answer(number=request.number, tokens=tuple(tokens[len(request.prompt) :]), finish=finish)


@dataclass
class Work:
    """A part as the device got it; a token that the host did not know is none."""

    number: int
    slot: int
    start: int
    tokens: list[int | None]
    table: list[int]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class Row:
    """What the device keeps for a slot."""

    number: int | None = None
    table: list[int] = field(default_factory=list)
    end: int = 0  # tokens computed once all launched steps are
    sampled: tuple[int, int, int] | None = None  # number, position and token


class OracleStep:
    def __init__(self, runner: "OracleRunner", plan: Plan, works: list[Work]):
        self.runner = runner
        self.plan = plan
        self.works = works
        self.result: list[int] | None = None

    def tokens(self) -> list[int]:
        return self.runner.read(self)


class OracleRunner:
    """`launches` counts steps; `computed` counts tokens, those of recomputation included."""

    def __init__(self, blocks: int, block_tokens: int, limits: Limits, prefix_cache: bool = False, chain: bool = True):
        self.block_tokens = block_tokens
        self.limits = limits
        self.prefix_cache = prefix_cache
        self.chain = chain
        self.cells: list[list[tuple[int, int] | None]] = [[None] * block_tokens for _ in range(blocks)]
        self.rows = [Row() for _ in range(limits.max_batch_size)]
        self.unread: list[OracleStep] = []
        self.launches = 0
        self.computed = 0

    def launch(self, plan: Plan) -> OracleStep:
        self._check_step(plan)
        step = OracleStep(self, plan, [self._work(part) for part in plan.parts])
        self.unread.append(step)
        self.launches += 1
        self.computed += plan.tokens
        return step

    def read(self, step: OracleStep) -> list[int]:
        assert step is self.unread[0], "steps are read in the order in which they were launched"
        for earlier in self.unread:
            # A real device may be ahead of the host's reading: compute whatever is launched.
            if earlier.result is None:
                earlier.result = self._compute(earlier.works)
        self.unread.pop(0)
        return step.result

    def _check_step(self, plan: Plan) -> None:
        limits = self.limits
        assert plan.tokens <= limits.max_num_tokens
        assert len(plan.parts) <= limits.max_batch_size
        slots = [part.sequence.slot for part in plan.parts]
        assert len(set(slots)) == len(slots), "a slot is twice in a step"
        generates = [part.samples and part.count == 1 and part.sequence.synced > 0 for part in plan.parts]
        assert generates == sorted(generates, reverse=True), "those that generate come first"
        if not self.chain:
            in_flight = {part.sequence for step in self.unread for part in step.plan.parts}
            assert not any(part.sequence in in_flight for part in plan.parts), "to be read first"

    def _work(self, part: Part) -> Work:
        """Check a part against what the device has for its slot, and bring that up to date."""
        sequence, number = part.sequence, part.sequence.request.number
        assert sequence.finish is None, "an ended sequence is not computed"
        row = self.rows[sequence.slot]
        if sequence.synced == 0:
            row.number, row.table = number, []
            assert part.start % self.block_tokens == 0
            assert part.start == 0 or self.prefix_cache
        else:
            assert row.number == number, "the slot is another's"
            assert part.start == row.end, "a gap in what is computed"
        row.table += sequence.blocks[sequence.synced :]
        sequence.synced = len(sequence.blocks)
        row.end = part.end
        assert row.table == sequence.blocks
        assert part.count > 0
        assert len(row.table) * self.block_tokens >= part.end
        self._check_chunk(part)
        known = sequence.tokens[part.start : part.end]
        unread = [None] * (part.count - len(known))
        assert len(unread) <= 1, "only the newest token can be unread"
        return Work(number, sequence.slot, part.start, [*known, *unread], list(row.table), part.samples)

    def _check_chunk(self, part: Part) -> None:
        sequence = part.sequence
        length = sequence.length - part.samples
        assert part.samples == (part.end == length)
        assert length < len(sequence.request.prompt) + sequence.request.max_tokens, "beyond the answer's limit"
        if part.end < length and not self.limits.chunked_prefill:
            assert len(sequence.tokens) > self.limits.max_num_tokens, "a prompt is cut though chunks are off"

    def _compute(self, works: list[Work]) -> list[int]:
        written: dict[tuple[int, int], int] = {}
        for work in works:
            for position, token in enumerate(work.tokens, work.start):
                if token is None:
                    number, at, token = self.rows[work.slot].sampled
                    assert (number, at) == (work.number, position), "the slot's token is another's"
                block, offset = work.table[position // self.block_tokens], position % self.block_tokens
                assert (block, offset) not in written, "two parts write the same place"
                written[block, offset] = work.number
                self.cells[block][offset] = (token, position)
        sampled = []
        for work in works:
            history = self._history(work, written)
            if work.samples:
                token = next_token(history)
                self.rows[work.slot].sampled = (work.number, work.end, token)
                sampled.append(token)
        return sampled

    def _history(self, work: Work, written: dict[tuple[int, int], int]) -> list[int]:
        history = []
        for position in range(work.end):
            block, offset = work.table[position // self.block_tokens], position % self.block_tokens
            assert written.get((block, offset), work.number) == work.number, "written by another in this very step"
            token, at = self.cells[block][offset]
            assert at == position, "a block has another place's tokens"
            history.append(token)
        return history
