"""Requests and their outputs: SamplingParams, Request, RequestOutput, and Sequence, the state of an unfinished request.

An output ends by the token limit, an end-of-sequence token or a stop sequence, all but the first before the limit. The
tokens that end an output are part of it. A stop sequence must lie within the output and never reaches into the prompt.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["length", "stop", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Choice of the next token. Equal seeds give equal outputs, whatever else is in the batch."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # sample among the k most likely tokens; 0: all
    top_p: float = 1.0  # sample among the most likely tokens whose probabilities sum to p
    seed: int = 0
    logprobs: int | None = None  # alternatives whose log probabilities come with each token; None: not even its own


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a sampled token, and the most likely tokens, before temperature, top-k and top-p."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log probability), most likely first


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request and the tokens generated for it."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, its stop criteria and callbacks, which are called in the engine's thread between steps."""

    request_id: int  # unique among the engine's unfinished requests
    prompt: Tokens[int]
    max_tokens: int
    sampling_params: SamplingParams = SamplingParams()
    eos: frozenset[int] = frozenset()  # end-of-sequence tokens, included in the output
    ignore_eos: bool = False
    stop: tuple[tuple[int, ...], ...] = ()  # stop sequences of tokens, included in the output
    on_start: Callable[[int, int], None] | None = (
        None  # (request_id, prompt tokens from the prefix cache), when admitted
    )
    on_token: Callable[[int, int], None] | None = None  # (request_id, token), as soon as the host has the token
    on_logprobs: Callable[[int, TokenLogprobs], None] | None = None  # of the token that `on_token` gets next
    on_end: Callable[[RequestOutput], None] | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """State of an unfinished request. `token_ids` holds the prompt and the generated tokens that the host has read.

    The device may be ahead of the host: `num_pending_tokens` counts tokens sampled by launched steps but not read yet.
    `num_computed_tokens` counts tokens whose KV is in the cache once all launched steps are done.
    """

    request: Request
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    slot: int | None = None  # its row in the per-sequence state on the device; None while it waits
    block_ids: list[int] = field(default_factory=list)  # of the KV cache, in token order
    num_synced_blocks: int = 0  # blocks already in the device's block table; reset when it gets a slot
    num_cached_blocks: int = 0  # leading blocks that came from the prefix cache
    window_block_ids: list[int] = field(default_factory=list)  # of layers with a sliding window, where they have a pool
    num_expired_blocks: int = 0  # leading window blocks that are free again: no later token sees them
    started: bool = False  # it was admitted once; it may have been preempted since
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, pending ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, pending ones included."""
        return self.num_tokens - len(self.request.prompt)


def check_stop(request: Request, token_ids: Tokens[int]) -> FinishReason | None:
    """Return why the output ends with the last of `token_ids` (prompt and output); None if it continues."""
    if not request.ignore_eos and token_ids[-1] in request.eos:
        return "stop"
    num_output_tokens = len(token_ids) - len(request.prompt)
    for stop in request.stop:
        if len(stop) <= num_output_tokens and tuple(token_ids[-len(stop) :]) == stop:
            return "stop"
    return "length" if num_output_tokens >= request.max_tokens else None


def has_fixed_length(request: Request) -> bool:
    """Return whether only the token limit can end the output, so that its length is known in advance."""
    return (request.ignore_eos or not request.eos) and not request.stop
