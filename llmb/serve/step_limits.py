"""What a step and a sequence may be, and which requests are refused because they could never be answered."""

from dataclasses import dataclass

from llmb.errors import ConfigError
from llmb.serve.block_pool import BlockPool
from llmb.serve.request import Request


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of the engine, whatever it serves."""

    max_batch_size: int  # sequences at once, each of which has a slot
    max_num_tokens: int  # computed in one step
    max_length: int  # tokens of a sequence, prompt and answer
    chunked_prefill: bool = True  # off: a prompt is computed in one step


def refuse(request: Request, limits: Limits, pool: BlockPool) -> None:
    """ConfigError, with the numbers that say why, for a request that does not fit even into an idle engine."""
    name = f"request {request.number}"
    if len(request.prompt) == 0:
        raise ConfigError(f"{name} has an empty prompt: give it at least one token")
    if request.max_tokens < 1:
        raise ConfigError(f"{name} asks for {request.max_tokens} tokens: max_tokens must be at least 1")
    if () in request.stop:
        raise ConfigError(f"{name} has an empty stop sequence: give it at least one token")
    _refuse_long(name, len(request.prompt), request.max_tokens, limits, pool)


def _refuse_long(name: str, prompt: int, answer: int, limits: Limits, pool: BlockPool) -> None:
    lengths = f"{name} has a prompt of {prompt} and an answer of {answer} tokens"
    if prompt + answer > limits.max_length:
        raise ConfigError(f"{lengths}, {prompt + answer} together: a sequence may have {limits.max_length}")
    if prompt > limits.max_num_tokens and not limits.chunked_prefill:
        raise ConfigError(
            f"{name} has a prompt of {prompt} tokens and a step computes {limits.max_num_tokens}: "
            f"raise MAX_NUM_TOKENS to {prompt} or turn chunked prefill on (ENABLE_CHUNKED_PREFILL=true)"
        )
    need = pool.blocks_for(prompt + answer - 1)  # the last token is never put in
    if need > pool.blocks:
        raise ConfigError(
            f"{lengths}, which need {need} blocks of {pool.block_tokens} tokens in the KV cache, and it has "
            f"{pool.blocks}: shorten it or raise KV_CACHE_FRACTION"
        )
