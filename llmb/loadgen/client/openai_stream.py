"""Reader of one OpenAI response, streamed or whole: when text came, how many tokens, how it ended.

    reader = ResponseReader(streaming=True)
    reader.event(data, now)                  # of each server-sent event
    reader.first_token, reader.token_times, reader.usage, reader.error

A chunk with text is recognized by its bytes: parsing all JSON would cost more than reading it. What the bytes do not
tell (the first chunks, usage, errors, unusual spacing) is parsed. Role-only and empty chunks are no tokens.
"""

import json
from array import array
from dataclasses import dataclass
from typing import Any

from llmb.formats.json_checks import LARGEST_NUMBER
from llmb.loadgen.client.sse import split_events

TEXT_MARKS = tuple(f'"{key}":{space}"'.encode() for key in ("text", "content") for space in ("", " "))
RARE_MARKS = (b'"usage":{', b'"usage": {', b'"finish_reason":"', b'"finish_reason": "', b'"error"')
NO_TEXT = (b'"', b"")  # what follows the mark of an empty text
BARE_ERROR = "message"  # of older servers and gateways: an error without the key `error`
FAILED_FINISHES = ("abort", "error", "cancelled")  # reasons of servers that give an output up
MAX_ERROR_CHARS = 200
LARGE_BLOCK = 2048  # bytes, from which counting pays
FIRST_EVENTS = 2  # of a stream: a role, and a first text that tells what the others look like
LAST_EVENTS = 4  # of a stream: its last text, finish reason, usage and [DONE]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts that the server reports. None: it does not."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class ResponseReader:
    """State of one response."""

    __slots__ = ("_mark", "_texts", "done", "error", "finish", "first_token", "has_text", "token_times", "usage")

    def __init__(self, keep_text: bool = False):
        self.first_token: float | None = None
        self.token_times: array[float] = array("d")
        self.usage = Usage()
        self.finish: str | None = None
        self.error: str | None = None
        self.done = False  # the stream has said that it is complete
        self.has_text = False  # of a response that was not streamed
        self._mark: bytes | None = None  # bytes before a text in this server's chunks
        self._texts: list[str] | None = [] if keep_text else None

    @property
    def text(self) -> str | None:
        """The output text, where it is kept."""
        return None if self._texts is None else "".join(self._texts)

    def block(self, block: bytes, now: float) -> None:
        """Read a block of whole events, as SseParser.feed_block returns it.

        The last events of a large block are read one by one: they tell how the output ended. Those before are counted,
        not divided, where each has one text.
        """
        for _ in range(FIRST_EVENTS):
            if self._mark is None and self._texts is None and len(block) > LARGE_BLOCK:
                first, _, block = block.partition(b"\n\n")
                self.events(split_events(first), now)
        mark = self._mark
        if mark is not None and len(block) > LARGE_BLOCK:
            end = len(block)
            for _ in range(LAST_EVENTS):
                end = block.rfind(b"\n\n", 0, end)
            chunks = block.count(mark, 0, end)
            if end > 0 and chunks == block.count(b"\n\n", 0, end) + 1 and not block.endswith(mark, 0, end):
                self.token_times.extend([now] * (chunks - block.count(mark + b'"', 0, end)))
                block = block[end + 2 :]
        self.events(split_events(block), now)

    def events(self, events: list[bytes], now: float) -> None:
        """Read the events of one read."""
        mark, times = self._mark, self.token_times
        size = 0 if mark is None else len(mark)
        for data in events:
            if mark is not None:
                position = data.find(mark)
                if position >= 0 and data[position + size : position + size + 1] not in NO_TEXT and not _is_rare(data):
                    times.append(now)
                    continue
            self._parse(data, now)
            mark = self._mark
            size = 0 if mark is None else len(mark)

    def _parse(self, data: bytes, now: float) -> None:
        if data.strip() == b"[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            self.error = self.error or f"bad stream: an event is not JSON: {_short(data.decode(errors='replace'))}"
            return
        if not isinstance(chunk, dict):
            return
        if chunk.get("error") or ("choices" not in chunk and isinstance(chunk.get(BARE_ERROR), str)):
            self.error = f"stream error: {error_text(chunk)}"
            return
        self._read_usage(chunk)
        for choice in _choices(chunk):
            text = _text_of(choice)
            if text:
                if self.first_token is None:
                    self.first_token = now
                self.token_times.append(now)
                if self._texts is not None:
                    self._texts.append(text)
                elif self._mark is None:
                    self._mark = next((m for m in TEXT_MARKS if data.count(m) == 1), None)
            self.finish = _finish_reason(choice) or self.finish

    def whole(self, body: bytes, now: float) -> None:
        """Read a response that was not streamed."""
        try:
            response = json.loads(body)
            if response.get("error") or ("choices" not in response and isinstance(response.get(BARE_ERROR), str)):
                self.error = f"error response: {error_text(response)}"
                return
            self._read_usage(response)
            for choice in _choices(response):
                text = _text_of(choice, "message")
                self.has_text = self.has_text or bool(text)
                if self._texts is not None:
                    self._texts.append(text)
                self.finish = _finish_reason(choice) or self.finish
            self.done = True
        except (ValueError, AttributeError, TypeError, RecursionError):
            self.error = f"bad response: not a completion: {_short(body.decode(errors='replace'))}"

    def failure(self) -> str | None:
        """Return why a response that is complete is none that counts; None: it counts."""
        if self.error is not None:
            return self.error
        if self.finish in FAILED_FINISHES:
            return f"given up by the server: finish_reason {self.finish}"
        if not self.has_text and self.first_token is None and not self.usage.output_tokens:
            return "empty response: no text, no tokens"
        return None

    def _read_usage(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.usage = Usage(
                _count(usage.get("prompt_tokens")),
                _count(usage.get("completion_tokens")),
                _count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            )


def error_text(body: Any) -> str:
    """Return the message of an error object as servers send it, in one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = (
        next((error[key] for key in ("message", "detail") if error.get(key)), error)
        if isinstance(error, dict)
        else error
    )
    return _short(str(message))


def _is_rare(data: bytes) -> bool:
    usage, spaced_usage, finish, spaced_finish, error = RARE_MARKS
    return usage in data or finish in data or error in data or spaced_usage in data or spaced_finish in data


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a response, whatever a server sends in their place."""
    choices = chunk.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _finish_reason(choice: dict[str, Any]) -> str | None:
    reason = choice.get("finish_reason")
    return reason if isinstance(reason, str) else None


def _text_of(choice: dict[str, Any], part: str = "delta") -> str:
    """Return the new text of a chunk: of a completion, or of a chat message, reasoning and tool calls included."""
    delta = choice.get(part)
    if not isinstance(delta, dict):
        text = choice.get("text")
        return text if isinstance(text, str) else ""
    content = delta.get("content")
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")  # some servers send one text as both
    if isinstance(reasoning, str) and reasoning:
        return reasoning + (content if isinstance(content, str) else "")
    if isinstance(content, str) and content:
        return content
    calls = delta.get("tool_calls")
    if isinstance(calls, list) and calls and isinstance(calls[0], dict):
        function = calls[0].get("function")
        return str(function.get("arguments") or function.get("name") or "") if isinstance(function, dict) else ""
    return ""


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < LARGEST_NUMBER else None  # an event takes no larger one


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 3] + "..."
