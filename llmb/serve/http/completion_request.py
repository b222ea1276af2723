"""Bodies of /v1/completions and /v1/chat/completions, checked: every field has a meaning here or is refused by name.

request = parse_completion(body_bytes)      # CompletionRequest, or ApiError 400 with the field in `param`
"""

import json
from dataclasses import dataclass
from typing import Any

from llmb.serve.http.field_checks import (
    MAX_CHOICES,
    check_fields,
    check_min_tokens,
    read_bool,
    read_int,
    read_number,
    read_stop,
    read_stream_options,
    refuse,
)
from llmb.serve.http.openai_error import ApiError

MAX_TEMPERATURE = 2.0
MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's; a chat goes on to the end of the context
SEED_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request for outputs of one or more prompts."""

    is_chat: bool
    model: str | None
    prompts: list[str | list[int]]  # of a completion
    messages: list[dict[str, Any]]  # of a chat
    n: int  # outputs of each prompt
    max_tokens: int | None  # None: as many as the context holds
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: list[str]
    logprobs: int | None  # alternatives; None: no log probabilities
    ignore_eos: bool
    stream: bool
    include_usage: bool  # in a last chunk
    continuous_usage: bool  # in every chunk


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse the body of /v1/completions."""
    fields = _read_object(body)
    check_fields(fields, chat=False)
    if "prompt" not in fields:
        raise refuse("prompt", "is missing")
    logprobs = read_int(fields, "logprobs", 0, MAX_LOGPROBS)
    max_tokens = read_int(fields, "max_tokens", 1)
    request = CompletionRequest(
        is_chat=False,
        prompts=_read_prompts(fields["prompt"]),
        messages=[],
        max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs,
        **_common(fields),
    )
    if len(request.prompts) * request.n > MAX_CHOICES:
        raise refuse("prompt", f"asks for more than {MAX_CHOICES} outputs with n={request.n}; send several requests")
    return request


def parse_chat(body: bytes) -> CompletionRequest:
    """Parse the body of /v1/chat/completions."""
    fields = _read_object(body)
    check_fields(fields, chat=True)
    if "messages" not in fields:
        raise refuse("messages", "is missing")
    limits = {read_int(fields, name, 1) for name in ("max_tokens", "max_completion_tokens")} - {None}
    if len(limits) > 1:
        raise refuse("max_tokens", "and max_completion_tokens disagree; give one of them")
    with_logprobs = read_bool(fields, "logprobs")
    top_logprobs = read_int(fields, "top_logprobs", 0, MAX_LOGPROBS)
    if top_logprobs is not None and not with_logprobs:
        raise refuse("top_logprobs", "needs logprobs: true")
    return CompletionRequest(
        is_chat=True,
        prompts=[],
        messages=_read_messages(fields["messages"]),
        max_tokens=limits.pop() if limits else None,
        logprobs=(top_logprobs or 0) if with_logprobs else None,
        **_common(fields),
    )


def _common(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that both kinds of request have."""
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise refuse("model", "must be a string")
    top_k = read_int(fields, "top_k", -1)
    stream = read_bool(fields, "stream")
    temperature = read_number(fields, "temperature", 0.0, MAX_TEMPERATURE)
    top_p = read_number(fields, "top_p", 0.0, 1.0)
    if top_p == 0:
        raise refuse("top_p", "must be above 0")
    stops, ignore_eos = read_stop(fields.get("stop")), read_bool(fields, "ignore_eos")
    check_min_tokens(fields, ignore_eos, stops)
    include_usage, continuous_usage = read_stream_options(fields.get("stream_options"), stream)
    return {
        "model": model,
        "n": read_int(fields, "n", 1, MAX_CHOICES) or 1,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": max(0, top_k or 0),
        "seed": read_int(fields, "seed", -SEED_LIMIT, SEED_LIMIT - 1),
        "stop": stops,
        "ignore_eos": ignore_eos,
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": continuous_usage,
    }


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object")
    return {name: value for name, value in fields.items() if value is not None}  # null: left out


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _read_prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of a string, a list of strings, a list of tokens, or a list of lists of tokens."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_tokens(prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise refuse("prompt", "must be a string, a list of strings, a list of tokens, or a list of such lists")
    for item in prompt:
        if not (isinstance(item, str) or _is_tokens(item)) or type(item) is not type(prompt[0]):
            raise refuse("prompt", "must be a string, a list of strings, a list of tokens, or a list of such lists")
        if not item:
            raise refuse("prompt", "is empty; give at least one token")
    return prompt


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and set(map(type, prompt)) <= {int}  # true and false are of another type


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages with text content: parts of type text are joined by line breaks."""
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", "must be a list of at least one message")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise refuse(where, "must be an object with a role")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value not in (None, []):
            raise refuse(f"{where}.{name}", "is not supported; messages have role, content and name")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_read_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise refuse(f"{where}.content", "must be a string or a list of text parts")
    name = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
    return {"role": message["role"], "content": content or ""} | name


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise refuse(where, 'is not supported; content parts have the form {"type": "text", "text": "..."}')
    text: str = part["text"]
    return text
