"""Fake device of plain lists, on which a scheduling error changes an output or raises.

The next token is a hash of all tokens of the sequence, read back from the blocks of its block table. The inputs of a
step are copied when it is launched; it is computed only when its tokens, or those of a later step, are read. This
detects a wrong block table, a block freed too early, a stale prefix or an overwritten shared block. With a sliding
window there is a second cache, in which the tokens that the step's own can see must be intact.
"""

from dataclasses import dataclass, field

from llmb.serve.admission import SchedulerLimits
from llmb.serve.kv_cache.window_blocks import WindowBlocks
from llmb.serve.request import Request, RequestOutput, check_stop
from llmb.serve.step_batch import ScheduledChunk, StepBatch

VOCABULARY = 11


def next_token(history) -> int:
    value = 17
    for token in history:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value % VOCABULARY


def expected_output(request: Request) -> RequestOutput:
    """Return the expected output of a request, computed alone."""
    tokens = list(request.prompt)
    finish = None
    while finish is None:
        tokens.append(next_token(tokens))
        finish = check_stop(request, tokens)
    return RequestOutput(
        request_id=request.request_id, token_ids=tuple(tokens[len(request.prompt) :]), finish_reason=finish
    )


@dataclass
class UploadedChunk:
    """A chunk as uploaded to the device; a pending token is None."""

    number: int
    slot: int
    start: int
    tokens: list[int | None]
    table: list[int]
    samples: bool
    window_table: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class Row:
    """State of a slot on the device."""

    number: int | None = None
    table: list[int] = field(default_factory=list)
    end: int = 0  # tokens computed once all launched steps are
    sampled: tuple[int, int, int] | None = None  # request id, position and token


class OracleStep:
    graph_size = None

    def __init__(self, runner: "OracleRunner", batch: StepBatch, uploads: list[UploadedChunk]):
        self.runner = runner
        self.batch = batch
        self.uploads = uploads
        self.result: list[int] | None = None

    def is_done(self) -> bool:
        return True

    def tokens(self) -> list[int]:
        return self.runner.read(self)

    def logprobs(self):
        return {}


class OracleRunner:
    """Runner of the fake device; `launches` counts steps, `computed` counts tokens, recomputed ones included."""

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        limits: SchedulerLimits,
        prefix_cache: bool = False,
        async_scheduling: bool = True,
        windows: WindowBlocks | None = None,
    ):
        self.block_tokens = block_tokens
        self.window = None if windows is None else windows.window
        self.window_cells: dict[tuple[int, int], tuple[int, int, int]] = {}  # request id, slot, position
        self.limits = limits
        self.prefix_cache = prefix_cache
        self.async_scheduling = async_scheduling
        self.cells: list[list[tuple[int, int] | None]] = [[None] * block_tokens for _ in range(blocks)]
        self.rows = [Row() for _ in range(limits.max_batch_size)]
        self.unread: list[OracleStep] = []
        self.launches = 0
        self.computed = 0

    def launch(self, batch: StepBatch) -> OracleStep:
        self._check_step(batch)
        step = OracleStep(self, batch, [self._upload(chunk) for chunk in batch.chunks])
        self.unread.append(step)
        self.launches += 1
        self.computed += batch.num_tokens
        return step

    def read(self, step: OracleStep) -> list[int]:
        assert step is self.unread[0], "steps are read in the order in which they were launched"
        for earlier in self.unread:
            # A real device may be ahead of the host: compute all launched steps.
            if earlier.result is None:
                earlier.result = self._compute(earlier.uploads)
        self.unread.pop(0)
        return step.result

    def _check_step(self, batch: StepBatch) -> None:
        limits = self.limits
        assert batch.num_tokens <= limits.max_num_tokens
        assert len(batch.chunks) <= limits.max_batch_size
        slots = [chunk.sequence.slot for chunk in batch.chunks]
        assert len(set(slots)) == len(slots), "a slot occurs twice in a step"
        generates = [
            chunk.samples and chunk.num_tokens == 1 and chunk.sequence.num_synced_blocks > 0 for chunk in batch.chunks
        ]
        assert generates == sorted(generates, reverse=True), "decodes come first"
        if not self.async_scheduling:
            launched = {chunk.sequence for step in self.unread for chunk in step.batch.chunks}
            assert not any(chunk.sequence in launched for chunk in batch.chunks), (
                "a launched sequence must be read first"
            )

    def _upload(self, chunk: ScheduledChunk) -> UploadedChunk:
        """Check a chunk against the state of its slot, and update that state."""
        sequence, number = chunk.sequence, chunk.sequence.request.request_id
        assert sequence.finish_reason is None, "a finished sequence is not computed"
        row = self.rows[sequence.slot]
        if sequence.num_synced_blocks == 0:
            row.number, row.table = number, []
            assert chunk.start % self.block_tokens == 0
            assert chunk.start == 0 or self.prefix_cache
        else:
            assert row.number == number, "the slot belongs to another request"
            assert chunk.start == row.end, "a gap in the computed tokens"
        row.table += sequence.block_ids[sequence.num_synced_blocks :]
        sequence.num_synced_blocks = len(sequence.block_ids)
        row.end = chunk.end
        assert row.table == sequence.block_ids
        assert chunk.num_tokens > 0
        assert len(row.table) * self.block_tokens >= chunk.end
        self._check_chunk(chunk)
        host_tokens = sequence.token_ids[chunk.start : chunk.end]
        pending = [None] * (chunk.num_tokens - len(host_tokens))
        assert len(pending) <= 1, "only the last token can be pending"
        return UploadedChunk(
            number,
            sequence.slot,
            chunk.start,
            [*host_tokens, *pending],
            list(row.table),
            chunk.samples,
            list(sequence.window_block_ids),
        )

    def _check_chunk(self, chunk: ScheduledChunk) -> None:
        sequence = chunk.sequence
        length = sequence.num_tokens - chunk.samples
        assert chunk.samples == (chunk.end == length)
        assert length < len(sequence.request.prompt) + sequence.request.max_tokens, "beyond max_tokens"
        if chunk.end < length and not self.limits.chunked_prefill:
            assert len(sequence.token_ids) > self.limits.max_num_tokens, "a prompt is chunked without chunked prefill"

    def _compute_windows(self, uploads: list[UploadedChunk]) -> None:
        """Write the window cells of a step, then check those that its tokens see."""
        for upload in uploads:
            assert len(upload.window_table) == len(upload.table)
            for position in range(upload.start, upload.end):
                self.window_cells[self._window_cell(upload, position)] = (upload.number, upload.slot, position)
        for upload in uploads:
            for position in range(max(0, upload.start - self.window + 1), upload.end):
                content = self.window_cells[self._window_cell(upload, position)]
                assert content == (upload.number, upload.slot, position), "a window block was freed too early"

    def _window_cell(self, upload: UploadedChunk, position: int) -> tuple[int, int]:
        return upload.window_table[position // self.block_tokens], position % self.block_tokens

    def _compute(self, uploads: list[UploadedChunk]) -> list[int]:
        if self.window is not None:
            self._compute_windows(uploads)
        writers: dict[tuple[int, int], int] = {}
        for upload in uploads:
            for position, token in enumerate(upload.tokens, upload.start):
                if token is None:
                    number, at, token = self.rows[upload.slot].sampled
                    assert (number, at) == (upload.number, position), "the slot's token belongs to another sequence"
                block, offset = upload.table[position // self.block_tokens], position % self.block_tokens
                assert (block, offset) not in writers, "two chunks write the same place"
                writers[block, offset] = upload.number
                self.cells[block][offset] = (token, position)
        sampled = []
        for upload in uploads:
            history = self._history(upload, writers)
            if upload.samples:
                token = next_token(history)
                self.rows[upload.slot].sampled = (upload.number, upload.end, token)
                sampled.append(token)
        return sampled

    def _history(self, upload: UploadedChunk, writers: dict[tuple[int, int], int]) -> list[int]:
        history = []
        for position in range(upload.end):
            block, offset = upload.table[position // self.block_tokens], position % self.block_tokens
            assert writers.get((block, offset), upload.number) == upload.number, (
                "written by another sequence in the same step"
            )
            token, at = self.cells[block][offset]
            assert at == position, "a block has tokens of another position"
            history.append(token)
        return history
