"""Requests of a load, by index: any process can make its own without making those of the others.

    source = RequestSource(settings)
    source.session(17) -> Session(turns=(LoadRequest(...),))

Synthetic prompts begin with their index (in the shared prefix's case, after it), so that no two are alike and a prefix
cache finds only what is meant to be shared.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from llmb.config.load_settings import LoadSettings
from llmb.config.native.request_lengths import sample_length
from llmb.errors import ConfigError
from llmb.loadgen.dataset_file import DatasetRequest, Messages, read_dataset_file
from llmb.loadgen.lengths import read_length_pairs
from llmb.loadgen.prompt_sampler import random_tokens
from llmb.loadgen.prompt_text import TextWriter, load_tokenizer
from llmb.loadgen.traces import HASH_BLOCK_TOKENS, TraceRequest, read_trace

WARMUP_INDEX = 1 << 40  # index of the first warm-up request: its prompts are none of the measured ones
SERIAL_IDS = 2  # tokens at least that a prompt's index takes
RESERVED_IDS = 3  # lowest token ids, which are special tokens in most vocabularies


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: its prompt and the lengths that are expected of it."""

    prompt: str | Sequence[int] | Messages
    input_tokens: int | None  # None: only the server can tell
    output_tokens: int
    cacheable_tokens: int | None = None  # of the input, that an unlimited prefix cache would hold


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one user, each sent after the previous one has ended; `due_s`: when the first is due, of a trace."""

    turns: tuple[LoadRequest, ...]
    due_s: float | None = None


class RequestSource:
    """Makes the requests of a load; everything that can be wrong with its files is found at construction."""

    def __init__(self, settings: LoadSettings):
        self._settings = settings
        self.tokenizer: Any = load_tokenizer(Path(settings.tokenizer)) if settings.tokenizer else None
        self._writer = TextWriter(self.tokenizer)
        self._vocab = settings.vocab_size or (self.tokenizer.get_vocab_size() if self.tokenizer else None)
        self._pairs = read_length_pairs(Path(settings.lengths_file)) if settings.lengths_file else []
        self._trace = read_trace(Path(settings.trace), settings.trace_speedup) if settings.trace else []
        self._dataset: list[DatasetRequest] = []
        if settings.dataset:
            self._dataset = read_dataset_file(Path(settings.dataset), self._writer, settings.osl)
            if settings.endpoint == "chat" and any(request.is_ids for request in self._dataset):
                raise ConfigError(f"{settings.dataset} holds token ids, which chat does not take; use completions")
            if settings.endpoint == "completions" and any(isinstance(r.prompt, tuple) for r in self._dataset):
                raise ConfigError(f"{settings.dataset} holds messages; use the chat endpoint")
        self._prefixes: dict[tuple[int, int], str | Sequence[int]] = {}

    @property
    def count(self) -> int | None:
        """Sessions of the load; None: as many as its duration takes."""
        sessions = self._settings.num_requests
        if sessions is not None:
            sessions = -(-sessions // self._settings.turns)
        if self._trace:
            return len(self._trace) if sessions is None else min(sessions, len(self._trace))
        return len(self._dataset) if self._dataset and sessions is None else sessions  # a dataset repeats if too short

    @property
    def planned_s(self) -> float:
        """Time from the first to the last arrival, as far as the settings tell: 0 of a closed loop of a count."""
        settings = self._settings
        seconds = 0.0
        if settings.arrivals == "trace":
            seconds = max(row.time_s for row in self._trace[: self.count])
        elif settings.rate is not None and self.count is not None:
            seconds = self.count / settings.rate + settings.ramp_s
        if settings.duration_s is None:
            return seconds
        return min(seconds, settings.duration_s) if seconds else settings.duration_s

    def session(self, index: int) -> Session:
        """Return the session of an index."""
        if self._trace:
            row = self._trace[index % len(self._trace)]
            return Session((self._traced(index, row),), row.time_s)
        if self._dataset:
            return Session((self._from_dataset(index),))
        random = Random(f"request {self._settings.seed} {index}")
        return Session(tuple(self._turn(index, number, random) for number in range(self._settings.turns)))

    def warmup(self, index: int) -> Session:
        """Return a session of the same kind with another prompt."""
        if self._trace:
            row = self._trace[index % len(self._trace)]
            plain = TraceRequest(0.0, row.input_tokens, row.output_tokens)
            return Session((self._traced(WARMUP_INDEX + index, plain),))
        if self._dataset:
            return Session((self._from_dataset(index),))
        return Session(self.session(WARMUP_INDEX + index).turns[:1])

    def _from_dataset(self, index: int) -> LoadRequest:
        request = self._dataset[index % len(self._dataset)]
        if request.is_ids:
            tokens: int | None = len(request.prompt)
        elif isinstance(request.prompt, str):
            tokens = self._writer.count(request.prompt) if self.tokenizer is not None else None
        else:
            tokens = None  # the chat template of the server adds tokens of its own
        return LoadRequest(request.prompt, tokens, request.output_tokens)

    def _turn(self, index: int, number: int, random: Random) -> LoadRequest:
        settings = self._settings
        if self._pairs:
            isl, osl = random.choice(self._pairs)
        else:
            isl = sample_length(random, settings.isl, settings.isl_spread, settings.lengths)
            osl = sample_length(random, settings.osl, settings.osl_spread, settings.lengths)
        shared = round(isl * settings.prefix_fraction) if number == 0 else 0
        serial = index * settings.turns + number
        if not shared:
            prompt, cacheable = self._content(random, isl, serial), 0
        else:
            group = index % settings.prefix_groups
            unique = self._content(random, isl - shared, serial, continued=True) if shared < isl else None
            prompt = _joined(self._prefix(group, shared), unique)
            cacheable = shared if settings.prefix_groups <= index < WARMUP_INDEX else 0
        return LoadRequest(prompt, isl, osl, cacheable)

    def _prefix(self, group: int, tokens: int) -> str | Sequence[int]:
        key = (group, tokens)
        if key not in self._prefixes:
            random = Random(f"prefix {self._settings.seed} {group}")  # a shorter prefix begins a longer one
            self._prefixes[key] = self._content(random, tokens, None)
        return self._prefixes[key]

    def _traced(self, index: int, row: TraceRequest) -> LoadRequest:
        """Return a request of the trace's lengths, made of the blocks that its hash ids name."""
        if not row.hash_ids:
            random = Random(f"request {self._settings.seed} {index}")
            prompt = self._content(random, row.input_tokens, index)
            return LoadRequest(prompt, row.input_tokens, row.output_tokens, row.cacheable_tokens)
        content: str | Sequence[int] | None = None
        missing = row.input_tokens
        for hash_id in row.hash_ids:
            tokens = min(missing, HASH_BLOCK_TOKENS)
            if tokens < 1:
                break
            random = Random(f"block {self._settings.seed} {hash_id}")
            content = _joined(content, self._content(random, tokens, hash_id, continued=content is not None))
            missing -= tokens
        if missing > 0:
            random = Random(f"request {self._settings.seed} {index}")
            content = _joined(content, self._content(random, missing, index, continued=True))
        assert content is not None
        return LoadRequest(content, row.input_tokens, row.output_tokens, row.cacheable_tokens)

    def _content(self, random: Random, tokens: int, serial: int | None, continued: bool = False) -> str | Sequence[int]:
        if self._settings.prompt_format == "text":
            return self._writer.text(random, tokens, serial, continued)
        assert self._vocab is not None
        choices = max(1, self._vocab - RESERVED_IDS)
        ids = array("i", [RESERVED_IDS + token for token in random_tokens(random, tokens, choices)])
        position = 0
        while serial is not None and position < tokens and (serial or position < SERIAL_IDS):
            serial, digit = divmod(serial, choices)
            ids[position] = RESERVED_IDS + digit
            position += 1
        return ids


def _joined(first: str | Sequence[int] | None, second: str | Sequence[int] | None) -> str | Sequence[int]:
    if first is None or second is None:
        content = first if second is None else second
        assert content is not None
        return content
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}"
    return array("i", [*first, *second])
