"""Which tokens the next step computes: sequences that generate first, then chunks of prompts within the token budget.

Requests are admitted in the order in which they came. A sequence gets blocks of the cache as it needs them; when none
is free, the one admitted last gives back all of its own and returns to the front of the queue, to be computed again
from its prompt and what it has generated. So the order of those that run is always the order in which they came, and
the oldest can always go on: that is why every request ends.

Steps are planned before the tokens of earlier ones are read. Where a sequence's newest token is still on the device
the plan only says its position. Blocks and slots that are given back can be used in the next plan at once, since the
device computes steps in the order in which they are launched. Nothing here depends on a clock, so that ranks which
schedule the same requests each for itself decide alike.
"""

from collections import OrderedDict

from llmb.errors import ConfigError
from llmb.serve.admission import Outlook
from llmb.serve.block_pool import BlockPool, name_blocks
from llmb.serve.request import Finish, Request, Sequence
from llmb.serve.step_batch import Part, Plan
from llmb.serve.step_limits import Limits, refuse
from llmb.serve.stop_criteria import ending


class Scheduler:
    """The queue, the sequences that run, and the blocks and slots they hold.

    `chain`: a sequence may be planned while its newest token is unread. Without (the token has to come back to the
    host first), those that generate are spread over `depth` steps, so that as many can be in flight.
    """

    def __init__(self, pool: BlockPool, limits: Limits, chain: bool = True, depth: int = 1):
        self.pool = pool
        self.limits = limits
        self.chain = chain
        self.depth = depth
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: dict[int, Sequence] = {}  # in the order in which they were admitted
        self._slots = list(range(limits.max_batch_size))[::-1]
        self._unread: set[Sequence] = set()  # in a launched step, where they may not be planned again before it is read

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request; ConfigError if it could never be answered."""
        if request.number in self.waiting or request.number in self.running:
            raise ConfigError(f"request {request.number} is already under way: give each request a number of its own")
        refuse(request, self.limits, self.pool)
        self.waiting[request.number] = Sequence(request=request, tokens=list(request.prompt))

    def cancel(self, number: int) -> Sequence | None:
        """End a request now and give its blocks and slot back; none if there is no such request any more."""
        sequence = self.running.get(number) or self.waiting.get(number)
        if sequence is not None:
            self._end(sequence, "cancelled")
        return sequence

    def plan(self) -> Plan:
        """The next step, as if it were launched: it must be, before anything else is asked of the scheduler."""
        parts: list[Part] = []
        running = len(self.running)
        prompts = self._plan_decodes(parts)
        self._plan_chunks(parts, prompts)
        if len(self.running) == running:  # what was just preempted would only come back
            self._admit(parts)
        if not self.chain:
            self._unread.update(part.sequence for part in parts)
        return Plan(parts)

    def took(self, plan: Plan, tokens: list[int]) -> list[Sequence]:
        """Take what a step has sampled, and tell whom it concerns; gives the sequences that end with it.

        What was computed for a sequence that has ended meanwhile is dropped.
        """
        ended = []
        sampled = iter(tokens)
        block_tokens = self.pool.block_tokens
        for part in plan.parts:
            sequence = part.sequence
            token = next(sampled) if part.samples else None
            if not self.chain:
                self._unread.discard(sequence)
            if sequence.finish is not None:
                continue
            if token is not None:
                sequence.pending -= 1
                sequence.tokens.append(token)
            if self.pool.prefix_cache and part.end // block_tokens > part.start // block_tokens:
                self._remember(part)
            if token is not None and self._complete(sequence):
                ended.append(sequence)
        return ended

    def _complete(self, sequence: Sequence) -> bool:
        """Tell of a sequence's newest token; whether it is the last. Ended first, as the callback may cancel it."""
        request = sequence.request
        finish = ending(request, sequence.tokens)
        if finish is not None:
            self._end(sequence, finish)
        if request.on_token is not None:
            request.on_token(request.number, sequence.tokens[-1])
        return finish is not None

    # -- planning

    def _plan_decodes(self, parts: list[Part]) -> list[Sequence]:
        """A part for each sequence that has but one token to compute; gives those whose prompt is unfinished."""
        most = self.limits.max_num_tokens
        if not self.chain:
            most = min(most, -(-len(self.running) // self.depth))
        block_tokens = self.pool.block_tokens
        prompts = []
        for sequence in list(self.running.values()):
            request = sequence.request
            length = len(sequence.tokens) + sequence.pending
            start = sequence.computed
            if length >= len(request.prompt) + request.max_tokens or sequence in self._unread:
                continue  # all of its answer is under way, or it has to be read first
            if start + 1 < length:
                prompts.append(sequence)
            elif len(parts) < most and (length <= len(sequence.blocks) * block_tokens or self._grow(sequence)):
                sequence.computed = length
                sequence.pending += 1
                parts.append(Part(sequence, start, 1, True))
        return prompts

    def _grow(self, sequence: Sequence) -> bool:
        """Give a running sequence one more block, at the expense of those admitted last, itself included.

        Sequences are planned in the order of their admission, so that none in the plan is ever preempted.
        """
        while not self.pool.free:
            last = next(reversed(self.running.values()))
            self._preempt(last)
            if last is sequence:
                return False
        sequence.blocks.append(self.pool.take())
        return True

    def _plan_chunks(self, parts: list[Part], prompts: list[Sequence]) -> None:
        """The next chunk of each prompt that is under way, as long as the budget and the free blocks allow."""
        budget = self.limits.max_num_tokens - sum(part.count for part in parts)
        for sequence in prompts:
            if budget == 0:
                break
            if sequence.slot is None:
                continue  # preempted a moment ago
            # If nothing else can go on, this has to; otherwise it may wait until there is a free block.
            if not parts and self._room(sequence) == 0 and not self._grow(sequence):
                continue
            count = min(budget, len(sequence.tokens) - sequence.computed, self._room(sequence))
            if count > 0:
                parts.append(self._chunk(sequence, count))
                budget -= count

    def _room(self, sequence: Sequence) -> int:
        """Tokens that a sequence could compute with its blocks and all free ones."""
        return (len(sequence.blocks) + self.pool.free) * self.pool.block_tokens - sequence.computed

    def _chunk(self, sequence: Sequence, count: int) -> Part:
        """So many tokens more of a prompt, with blocks for them; the last of all gives a token."""
        part = Part(sequence, sequence.computed, count, sequence.computed + count == len(sequence.tokens))
        for _ in range(self.pool.blocks_for(part.end) - len(sequence.blocks)):
            sequence.blocks.append(self.pool.take())
        sequence.computed = part.end
        sequence.pending += part.samples
        return part

    # -- admission and its contrary

    def _admit(self, parts: list[Part]) -> None:
        """Begin with those that have waited longest, if their first chunk fits now and their answer probably will."""
        whole = self.limits.max_num_tokens - sum(part.count == 1 for part in parts)
        budget = self.limits.max_num_tokens - sum(part.count for part in parts)
        outlook: Outlook | None = None
        while budget > 0 and self.waiting and self._slots:
            sequence = next(iter(self.waiting.values()))
            if sequence.pending or sequence in self._unread:
                break  # preempted, and the token with which it must go on is not there yet
            found = self._find_prefix(sequence)
            sequence.shared = len(found)
            start = len(found) * self.pool.block_tokens
            count = self._first_chunk(len(sequence.tokens) - start, budget, whole)
            need = self.pool.blocks_for(start + count) - len(found)
            if count == 0 or need > self.pool.free - self.pool.revived(found):
                break
            outlook = outlook or Outlook(self.running.values(), self.pool.blocks, self.pool.block_tokens)
            if not outlook.admits(sequence):
                break
            self._start(sequence, found)
            parts.append(self._chunk(sequence, count))
            budget -= count

    def _first_chunk(self, tokens: int, budget: int, whole: int) -> int:
        """How much of so many tokens is computed in the first step: 0 if it has to be later.

        What fits whole into the next step, beside those that generate (`whole`), waits for it: a prompt in one piece
        is faster than in two. With chunks off it is all or nothing, except where a preempted sequence has outgrown
        even a step of its own.
        """
        later = tokens <= (whole if self.limits.chunked_prefill else self.limits.max_num_tokens)
        return 0 if tokens > budget and later else min(tokens, budget)

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        """From the queue to those that run, with a slot and what the prefix cache has of it."""
        number = sequence.request.number
        del self.waiting[number]
        self.running[number] = sequence
        self.pool.share(found)
        sequence.blocks = found
        sequence.computed = len(found) * self.pool.block_tokens
        sequence.slot = self._slots.pop()
        sequence.synced = 0

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue with nothing computed. Its unread tokens still count when they are read."""
        number = sequence.request.number
        del self.running[number]
        self._give_back(sequence)
        self.waiting[number] = sequence
        self.waiting.move_to_end(number, last=False)

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        """Wherever it is: preempted sequences may end in the queue, by a token that was under way."""
        number = sequence.request.number
        if self.running.pop(number, None) is None:
            del self.waiting[number]
        self._give_back(sequence)
        sequence.finish = finish

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        if sequence.slot is not None:
            self._slots.append(sequence.slot)
        sequence.blocks = []
        sequence.slot = None
        sequence.computed = 0

    # -- prefix cache

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that have the sequence's first tokens; never all tokens, as the last has to be computed to go on."""
        if not self.pool.prefix_cache:
            return []
        count = (len(sequence.tokens) - 1) // self.pool.block_tokens
        name_blocks(sequence.digests, sequence.tokens, self.pool.block_tokens, count)
        return self.pool.find(sequence.digests[:count])

    def _remember(self, part: Part) -> None:
        """Let the blocks that a step has filled be found. Its sequence may have been preempted since."""
        sequence = part.sequence
        first = part.start // self.pool.block_tokens
        full = min(part.end, sequence.computed, len(sequence.tokens)) // self.pool.block_tokens
        name_blocks(sequence.digests, sequence.tokens, self.pool.block_tokens, full)
        for index in range(first, full):
            self.pool.remember(sequence.blocks[index], sequence.digests[index])
