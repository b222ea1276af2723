"""Scheduler: chooses the tokens of the next step, decodes first, then prefill chunks within the token budget.

Requests are admitted first come, first served. A sequence gets KV blocks as it needs them; when none is free, the
sequence admitted last is preempted: it frees its blocks and returns to the front of the queue, to be recomputed from
its prompt and the tokens it has generated. So the running sequences are always in order of arrival, and the oldest can
always continue, which is why every request ends.

Steps are scheduled before the tokens of earlier ones are read. Where a sequence's last token is still on the device,
the batch only names its position. Freed blocks and slots can be used in the next batch at once, since the device
computes steps in launch order. Nothing here depends on a clock, so that ranks which schedule the same requests each for
itself decide alike.
"""

from collections import OrderedDict

from llmb.errors import ConfigError
from llmb.serve.admission import AdmissionCheck, SchedulerLimits, check_greedy, check_request
from llmb.serve.kv_cache.block_pool import BlockPool, extend_block_hashes
from llmb.serve.kv_cache.window_blocks import WindowBlocks
from llmb.serve.request import FinishReason, Request, Sequence, check_stop
from llmb.serve.step_batch import REJECTED, ScheduledChunk, StepBatch


class Scheduler:
    """The waiting queue, the running sequences, and the blocks and slots they hold.

    `async_scheduling`: a sequence may be scheduled while its last token is unread. Without (the token has to come back
    to the host first), decodes are spread over `depth` steps, so that as many steps can be launched at once.
    `windows`: blocks of layers with a sliding window; without, those layers have the same blocks as all others.
    `num_drafts`: tokens that a draft model proposes after the newest one of a decoding sequence. Each is a chunk of its
    own, computed in the same step. Rejected ones are rolled back: their keys and values are overwritten by the next
    step, so each step has to be read before the next is scheduled.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        async_scheduling: bool = True,
        depth: int = 1,
        windows: WindowBlocks | None = None,
        num_drafts: int = 0,
    ):
        self.pool = pool
        self.num_drafts = num_drafts
        self.windows = windows
        self.limits = limits
        self.async_scheduling = async_scheduling
        self.depth = depth
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: dict[int, Sequence] = {}  # in order of admission
        self._free_slots = list(range(limits.max_batch_size))[::-1]
        self.num_preemptions = 0
        self.num_prefix_queries = self.num_prefix_hits = 0  # prompt tokens looked up in the prefix cache, and present
        self._prefilled: list[
            Sequence
        ] = []  # by the last step, of whose chunks most window blocks are not needed again
        self._unread: set[Sequence] = set()  # in a launched step that must be read before they are scheduled again

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def submit(self, request: Request) -> None:
        """Queue a request; raise a ConfigError if it could never be served."""
        if request.request_id in self.waiting or request.request_id in self.running:
            raise ConfigError(f"request {request.request_id} is not finished yet: give each request a unique id")
        check_request(request, self.limits, self.pool)
        if self.num_drafts:
            check_greedy(request)
        self.waiting[request.request_id] = Sequence(request=request, token_ids=list(request.prompt))

    def cancel(self, request_id: int) -> Sequence | None:
        """End a request now and free its blocks and slot; None if there is no such request any more."""
        sequence = self.running.get(request_id) or self.waiting.get(request_id)
        if sequence is not None:
            self._finish(sequence, "cancelled")
        return sequence

    def schedule(self) -> StepBatch:
        """Return the next step, which must be launched before the scheduler is called again."""
        chunks: list[ScheduledChunk] = []
        self._trim_windows()
        num_running = len(self.running)
        prefills = self._schedule_decodes(chunks)
        self._schedule_prefills(chunks, prefills)
        if len(self.running) == num_running:  # a sequence that was just preempted would only come back
            self._admit(chunks)
        if not self.async_scheduling:
            self._unread.update(chunk.sequence for chunk in chunks)
        return StepBatch(chunks, repeats_sequences=self.num_drafts > 0)

    def update_from_output(self, batch: StepBatch, tokens: list[int]) -> list[Sequence]:
        """Append the tokens that a step has sampled, call `on_token`, and return the sequences that finish.

        Tokens of sequences that have ended in the meantime are dropped. A chunk whose draft token was rejected has the
        token REJECTED: it is as if it had not been computed.
        """
        finished = []
        sampled = iter(tokens)
        block_tokens = self.pool.block_tokens
        for chunk in batch.chunks:
            sequence = chunk.sequence
            token = next(sampled) if chunk.samples else None
            if not self.async_scheduling:
                self._unread.discard(sequence)
            if sequence.finish_reason is not None:
                continue
            if token is not None:
                sequence.num_pending_tokens -= 1
                if token == REJECTED:
                    sequence.num_computed_tokens -= 1
                    continue
                sequence.token_ids.append(token)
            if self.pool.prefix_cache and chunk.end // block_tokens > chunk.start // block_tokens:
                self._cache_full_blocks(chunk)
            if token is not None and self._process_token(sequence):
                finished.append(sequence)
        return finished

    def _process_token(self, sequence: Sequence) -> bool:
        """Return whether the newest token ends the sequence. It is finished before the callback, which may cancel."""
        request = sequence.request
        finish_reason = check_stop(request, sequence.token_ids)
        if finish_reason is not None:
            self._finish(sequence, finish_reason)
        if request.on_token is not None:
            request.on_token(request.request_id, sequence.token_ids[-1])
        return finish_reason is not None

    # -- decode and prefill

    def _schedule_decodes(self, chunks: list[ScheduledChunk]) -> list[Sequence]:
        """Schedule every sequence with a single token to compute; return those whose prefill is unfinished."""
        max_decodes = self.limits.max_num_tokens
        if not self.async_scheduling and not self.num_drafts:
            max_decodes = min(max_decodes, -(-len(self.running) // self.depth))
        block_tokens = self.pool.block_tokens
        prefills = []
        for sequence in list(self.running.values()):
            request = sequence.request
            num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
            start = sequence.num_computed_tokens
            if num_tokens >= len(request.prompt) + request.max_tokens or sequence in self._unread:
                continue  # all of its output is launched, or it has to be read first
            if start + 1 < num_tokens:
                prefills.append(sequence)
            elif len(chunks) < max_decodes and (
                num_tokens <= len(sequence.block_ids) * block_tokens or self._append_block(sequence)
            ):
                sequence.num_computed_tokens = num_tokens
                sequence.num_pending_tokens += 1
                chunks.append(ScheduledChunk(sequence, start, 1, True))
                if self.num_drafts:
                    self._schedule_drafts(chunks, sequence)
        return prefills

    def _schedule_drafts(self, chunks: list[ScheduledChunk], sequence: Sequence) -> None:
        """Schedule draft tokens after the newest token, as far as the output, the budget and free blocks allow."""
        request, start = sequence.request, sequence.num_computed_tokens
        left = len(request.prompt) + request.max_tokens - sequence.num_tokens
        drafts = min(self.num_drafts, left, self.limits.max_num_tokens - len(chunks))
        for _ in range(min(self.pool.num_blocks_for(start + drafts) - len(sequence.block_ids), self.pool.num_free)):
            sequence.block_ids.append(self.pool.allocate())
        drafts = min(drafts, len(sequence.block_ids) * self.pool.block_tokens - start)
        chunks += [ScheduledChunk(sequence, start + draft, 1, True, draft + 1) for draft in range(drafts)]
        sequence.num_computed_tokens += drafts
        sequence.num_pending_tokens += drafts

    def _append_block(self, sequence: Sequence) -> bool:
        """Give a running sequence one more block, preempting the sequences admitted last, itself included, if needed.

        Sequences are scheduled in order of admission, so that none in the batch is ever preempted.
        """
        while not self.pool.num_free:
            last = next(reversed(self.running.values()))
            self._preempt(last)
            if last is sequence:
                return False
        sequence.block_ids.append(self.pool.allocate())
        if self.windows is not None:
            self.windows.extend(sequence)
        return True

    def _trim_windows(self) -> None:
        """Free the window blocks that the prefill chunks of the last step needed and no later token sees."""
        if self.windows is not None:
            for sequence in self._prefilled:
                self.windows.trim(sequence)
            self._prefilled = []

    def _schedule_prefills(self, chunks: list[ScheduledChunk], prefills: list[Sequence]) -> None:
        """Schedule the next chunk of each unfinished prefill, as far as the budget and the free blocks allow."""
        budget = self.limits.max_num_tokens - sum(chunk.num_tokens for chunk in chunks)
        for sequence in prefills:
            if budget == 0:
                break
            if sequence.slot is None:
                continue  # preempted a moment ago
            # If nothing else is scheduled, this has to be; otherwise it may wait until there is a free block.
            if not chunks and self._token_capacity(sequence) == 0 and not self._append_block(sequence):
                continue
            remaining = len(sequence.token_ids) - sequence.num_computed_tokens
            num_tokens = min(budget, remaining, self._token_capacity(sequence))
            if num_tokens > 0:
                chunks.append(self._schedule_chunk(sequence, num_tokens))
                budget -= num_tokens

    def _token_capacity(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence could compute with its blocks and all free ones."""
        return (len(sequence.block_ids) + self.pool.num_free) * self.pool.block_tokens - sequence.num_computed_tokens

    def _schedule_chunk(self, sequence: Sequence, num_tokens: int) -> ScheduledChunk:
        """Schedule so many tokens of a prefill and allocate their blocks; the last chunk samples a token."""
        start = sequence.num_computed_tokens
        chunk = ScheduledChunk(sequence, start, num_tokens, start + num_tokens == len(sequence.token_ids))
        for _ in range(self.pool.num_blocks_for(chunk.end) - len(sequence.block_ids)):
            sequence.block_ids.append(self.pool.allocate())
        if self.windows is not None:
            self.windows.extend(sequence)
            self._prefilled.append(sequence)
        sequence.num_computed_tokens = chunk.end
        sequence.num_pending_tokens += chunk.samples
        return chunk

    # -- admission and preemption

    def _admit(self, chunks: list[ScheduledChunk]) -> None:
        """Admit waiting sequences in order while their first chunk fits now and their output is predicted to fit."""
        next_budget = self.limits.max_num_tokens - sum(chunk.num_tokens == 1 for chunk in chunks)
        budget = self.limits.max_num_tokens - sum(chunk.num_tokens for chunk in chunks)
        admission: AdmissionCheck | None = None
        while budget > 0 and self.waiting and self._free_slots:
            sequence = next(iter(self.waiting.values()))
            if sequence.num_pending_tokens or sequence in self._unread:
                break  # preempted, and the token it must continue with is not read yet
            prefix = self._find_cached_prefix(sequence)
            sequence.num_cached_blocks = len(prefix)
            start = len(prefix) * self.pool.block_tokens
            num_tokens = self._first_chunk_tokens(len(sequence.token_ids) - start, budget, next_budget)
            needed_blocks = self.pool.num_blocks_for(start + num_tokens) - len(prefix)
            if num_tokens == 0 or needed_blocks > self.pool.num_free - self.pool.count_free(prefix):
                break
            admission = admission or AdmissionCheck(self.running.values(), self.pool.num_blocks, self.pool.block_tokens)
            if not admission.try_admit(sequence):
                break
            self._start_sequence(sequence, prefix)
            chunks.append(self._schedule_chunk(sequence, num_tokens))
            budget -= num_tokens

    def _first_chunk_tokens(self, num_tokens: int, budget: int, next_budget: int) -> int:
        """Return how many of these tokens the first chunk computes; 0 if it has to wait for a later step.

        A prompt that fits whole into the next step beside the decodes (`next_budget`) waits for it: one chunk is faster
        than two. Without chunked prefill it is all or nothing, except if a preempted sequence has outgrown a step.
        """
        waits = num_tokens <= (next_budget if self.limits.chunked_prefill else self.limits.max_num_tokens)
        return 0 if num_tokens > budget and waits else min(num_tokens, budget)

    def _start_sequence(self, sequence: Sequence, prefix: list[int]) -> None:
        """Move a waiting sequence to the running ones, with a slot and its cached prefix blocks."""
        request_id = sequence.request.request_id
        del self.waiting[request_id]
        self.running[request_id] = sequence
        self.pool.add_reference(prefix)
        sequence.block_ids = prefix
        sequence.num_computed_tokens = len(prefix) * self.pool.block_tokens
        sequence.slot = self._free_slots.pop()
        sequence.num_synced_blocks = 0
        if not sequence.started:
            self._count_start(sequence)

    def _count_start(self, sequence: Sequence) -> None:
        """Count the prefix cache's hits of a sequence that starts for the first time, and call `on_start`."""
        sequence.started, request = True, sequence.request
        if self.pool.prefix_cache:
            self.num_prefix_queries += len(request.prompt)
            self.num_prefix_hits += sequence.num_computed_tokens
        if request.on_start is not None:
            request.on_start(request.request_id, sequence.num_computed_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the front of the queue, to be recomputed. Its pending tokens still count."""
        request_id = sequence.request.request_id
        self.num_preemptions += 1
        del self.running[request_id]
        self._release(sequence)
        self.waiting[request_id] = sequence
        self.waiting.move_to_end(request_id, last=False)

    def _finish(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Remove a running or waiting sequence: a preempted one may end in the queue, by a token that was pending."""
        request_id = sequence.request.request_id
        if self.running.pop(request_id, None) is None:
            del self.waiting[request_id]
        self._release(sequence)
        sequence.finish_reason = finish_reason

    def _release(self, sequence: Sequence) -> None:
        """Free the blocks and the slot of a sequence."""
        self.pool.release(sequence.block_ids)
        if self.windows is not None:
            self.windows.release(sequence)
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
        sequence.block_ids = []
        sequence.slot = None
        sequence.num_computed_tokens = 0

    # -- prefix cache

    def _find_cached_prefix(self, sequence: Sequence) -> list[int]:
        """Return cached blocks of the sequence's first tokens; never of all, as the last token has to be computed."""
        if not self.pool.prefix_cache:
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self.pool.block_tokens
        extend_block_hashes(sequence.block_hashes, sequence.token_ids, self.pool.block_tokens, num_blocks)
        return self.pool.find_cached(sequence.block_hashes[:num_blocks])

    def _cache_full_blocks(self, chunk: ScheduledChunk) -> None:
        """Add the blocks that a step has filled to the prefix cache. The sequence may have been preempted since."""
        sequence = chunk.sequence
        first = chunk.start // self.pool.block_tokens
        num_full = min(chunk.end, sequence.num_computed_tokens, len(sequence.token_ids)) // self.pool.block_tokens
        extend_block_hashes(sequence.block_hashes, sequence.token_ids, self.pool.block_tokens, num_full)
        for index in range(first, num_full):
            self.pool.cache_block(sequence.block_ids[index], sequence.block_hashes[index])
