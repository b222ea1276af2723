"""Admission of requests: refusal of those that could never be served, and prediction of KV cache usage for the others.

Admitting more than the cache will hold, only to preempt it later, means computing it twice. Each sequence grows by a
token a step until it ends and frees its blocks. With sequences sorted by remaining steps, most first, exactly the first
i + 1 still run when the i-th ends; the largest of these sums is the peak. Last blocks are half empty on average; where
that says too much, as for sequences whose ends fill their blocks, those of the peak are counted. A sequence that a
token may stop early reserves only one more block. A wrong prediction costs time only: a sequence that gets no block is
preempted.

Shapes: S running sequences, most remaining steps first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from llmb.errors import ConfigError
from llmb.serve.kv_cache.block_pool import BlockPool
from llmb.serve.request import Request, Sequence, has_fixed_length

MOST_COUNTED = 16  # ends of sequences at which blocks are counted


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Limits of the engine, independent of the workload."""

    max_batch_size: int  # running sequences, each of which has a slot
    max_num_tokens: int  # computed in one step
    max_seq_len: int  # tokens of a sequence, prompt and output
    chunked_prefill: bool = True  # off: a prompt is computed in one step


def check_request(request: Request, limits: SchedulerLimits, pool: BlockPool) -> None:
    """Raise a ConfigError, with the numbers that say why, if the request does not fit even into an idle engine."""
    name = f"request {request.request_id}"
    if len(request.prompt) == 0:
        raise ConfigError(f"{name} has an empty prompt: give it at least one token")
    if request.max_tokens < 1:
        raise ConfigError(f"{name} asks for {request.max_tokens} tokens: max_tokens must be at least 1")
    if () in request.stop:
        raise ConfigError(f"{name} has an empty stop sequence: give it at least one token")
    _check_lengths(name, len(request.prompt), request.max_tokens, limits, pool)


def check_greedy(request: Request) -> None:
    """Raise a ConfigError if speculative decoding, which verifies drafts by greedy equality, cannot serve a request."""
    params = request.sampling_params
    if params.temperature > 0 or params.logprobs is not None:
        feature = f"temperature {params.temperature:g}" if params.temperature > 0 else "log probabilities"
        raise ConfigError(
            f"request {request.request_id} asks for {feature}: speculative decoding is greedy, without them"
        )


def _check_lengths(name: str, input_len: int, output_len: int, limits: SchedulerLimits, pool: BlockPool) -> None:
    lengths = f"{name} has {input_len} input and {output_len} output tokens"
    if input_len + output_len > limits.max_seq_len:
        raise ConfigError(f"{lengths}, {input_len + output_len} together: the maximum is {limits.max_seq_len}")
    if input_len > limits.max_num_tokens and not limits.chunked_prefill:
        raise ConfigError(
            f"{name} has a prompt of {input_len} tokens and a step computes {limits.max_num_tokens}: "
            f"raise MAX_NUM_TOKENS to {input_len} or turn chunked prefill on (ENABLE_CHUNKED_PREFILL=true)"
        )
    needed_blocks = pool.num_blocks_for(input_len + output_len - 1)  # the last token is never cached
    if needed_blocks > pool.num_blocks:
        raise ConfigError(
            f"{lengths}, which need {needed_blocks} blocks of {pool.block_tokens} tokens in the KV cache, and it has "
            f"{pool.num_blocks}: shorten it or raise KV_CACHE_FRACTION"
        )


class AdmissionCheck:
    """Predicted cache usage of the running sequences, asked about one candidate after another."""

    def __init__(self, sequences: Iterable[Sequence], num_blocks: int, block_tokens: int):
        self._num_blocks, self._block_tokens = num_blocks, block_tokens
        usage = sorted((self._usage(sequence) for sequence in sequences), reverse=True)
        self._remaining_S = np.array([remaining for remaining, _ in usage], dtype=np.int64)
        self._tokens_S = np.array([tokens for _, tokens in usage], dtype=np.int64)

    def try_admit(self, sequence: Sequence) -> bool:
        """Return whether the sequence fits as well, and count it from now on if so. A single one is always admitted."""
        remaining, tokens = self._usage(sequence)
        index = int(np.searchsorted(-self._remaining_S, -remaining))
        remaining_S = np.insert(self._remaining_S, index, remaining)
        tokens_S = np.insert(self._tokens_S, index, tokens)
        usage_S = np.cumsum(tokens_S) + remaining_S * np.arange(1, len(remaining_S) + 1)
        if len(remaining_S) > 1 and not self._fits(remaining_S, tokens_S, usage_S):
            return False
        self._remaining_S, self._tokens_S = remaining_S, tokens_S
        return True

    def _fits(self, remaining_S: np.ndarray, tokens_S: np.ndarray, usage_S: np.ndarray) -> bool:
        """Return whether the cache holds them until they end: by their blocks where the estimate exceeds it."""
        exceeding = np.flatnonzero(usage_S > self._num_blocks * self._block_tokens)
        if len(exceeding) > MOST_COUNTED:  # some of them, the peak included: each takes a pass over all sequences
            some = exceeding[np.linspace(0, len(exceeding) - 1, MOST_COUNTED).astype(np.int64)]
            exceeding = np.append(np.argmax(usage_S), some)
        own_S = tokens_S - self._block_tokens // 2
        return all(
            self._count_blocks(own_S[: end + 1], remaining_S[: end + 1]) <= self._num_blocks for end in exceeding
        )

    def _count_blocks(self, own_S: np.ndarray, remaining_S: np.ndarray) -> int:
        """Return the blocks of these sequences when the last ends, which is known, and frees them, a step later."""
        tokens_S = own_S + np.minimum(remaining_S, remaining_S[-1] + 1)
        return int(np.sum(-(-tokens_S // self._block_tokens)))

    def _usage(self, sequence: Sequence) -> tuple[int, int]:
        """Return its remaining steps and the tokens it occupies: its last block is half empty on average."""
        request = sequence.request
        remaining = request.max_tokens - sequence.num_output_tokens
        if not has_fixed_length(request):
            remaining = min(remaining, self._block_tokens)
        own_tokens = sequence.num_tokens - sequence.num_cached_blocks * self._block_tokens
        return remaining, own_tokens + self._block_tokens // 2
