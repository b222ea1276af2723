"""JSON of responses. The constant parts of a stream's chunks are rendered once; a chunk only adds its text.

Chunks of a stream are ASCII, so that the length of the text is that of its bytes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from llmb.serve.request import TokenLogprobs
from llmb.serve.text.text_tokenizer import TextTokenizer


def to_compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True)
class ResponseHead:
    """Fields that all chunks of a response have in common."""

    response_id: str
    created: int
    model: str
    is_chat: bool
    include_usage: bool = False

    def fields(self, stream: bool) -> dict[str, Any]:
        kind = "text_completion" if not self.is_chat else "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}


class ChunkFormat:
    """Chunks of one output of a stream."""

    def __init__(self, head: ResponseHead, index: int):
        opening = to_compact_json(head.fields(stream=True))[:-1]
        choice = f'data: {opening},"choices":[{{"index":{index},'
        self._first = choice + ('"delta":{"role":"assistant","content":' if head.is_chat else '"text":')
        self._next = choice + ('"delta":{"content":' if head.is_chat else '"text":')
        self._text_end = "}" if head.is_chat else ""
        self._end = "}]" + (',"usage":null' if head.include_usage else "") + "}\n\n"
        self._plain = f'{self._text_end},"logprobs":null,"finish_reason":null{self._end}'

    def event(
        self,
        text: str,
        logprobs: Any = None,
        finish_reason: str | None = None,
        usage: dict[str, Any] | None = None,
        first: bool = False,
    ) -> str:
        """Return the event of some text."""
        opening = (self._first if first else self._next) + encode_basestring_ascii(text)
        if logprobs is None and finish_reason is None and usage is None:
            return opening + self._plain
        ending = f'"logprobs":{to_compact_json(logprobs)},"finish_reason":{to_compact_json(finish_reason)}'
        end = self._end if usage is None else f'}}],"usage":{to_compact_json(usage)}}}\n\n'
        return f"{opening}{self._text_end},{ending}{end}"


def usage_event(head: ResponseHead, usage: dict[str, Any]) -> str:
    """Return the last chunk of a stream that was asked for usage."""
    return f"data: {to_compact_json(head.fields(stream=True) | {'choices': [], 'usage': usage})}\n\n"


def format_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """Return token counts; those from the prefix cache only where they are known."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return usage if cached_tokens is None else usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def format_choice(is_chat: bool, index: int, text: str, logprobs: Any, finish_reason: str) -> dict[str, Any]:
    """Return one output of a response that is not streamed."""
    content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass(frozen=True)
class TokenEntry:
    """A token with its log probabilities, and where its text begins in the output."""

    token: int
    logprobs: TokenLogprobs
    offset: int


def format_logprobs(tokenizer: TextTokenizer, is_chat: bool, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
    """Return the log probabilities of some tokens as each endpoint writes them."""
    if not entries:
        return None
    if is_chat:
        return {"content": [_chat_entry(tokenizer, entry) for entry in entries]}
    tops = []
    for entry in entries:
        top = {token_name(tokenizer, token): logprob for token, logprob in reversed(entry.logprobs.top)}
        tops.append({token_name(tokenizer, entry.token): entry.logprobs.logprob} | top)
    return {
        "tokens": [token_name(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [entry.logprobs.logprob for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }


def _chat_entry(tokenizer: TextTokenizer, entry: TokenEntry) -> dict[str, Any]:
    top = [_chat_token(tokenizer, token, logprob) for token, logprob in entry.logprobs.top]
    return _chat_token(tokenizer, entry.token, entry.logprobs.logprob) | {"top_logprobs": top}


def _chat_token(tokenizer: TextTokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def token_name(tokenizer: TextTokenizer, token: int) -> str:
    """Return the text of a token, or its bytes where they are no text, so that names differ."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
