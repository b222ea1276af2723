"""Server that computes nothing: it sends pre-rendered OpenAI responses, to measure the client that reads them.

    python -m llmb.loadgen.noop_server --port 8001 [--ttft-ms 20 --itl-ms 5]

Without delays a whole stream is one write, each token a chunk and a server-sent event of its own. Model names that
begin with `fault:` misbehave on purpose: fault:500, fault:truncated, fault:error, fault:short, fault:no-usage,
fault:silent, fault:close.
"""

import argparse
import asyncio
import json
import re
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import cast

WORD = "word "
MODEL = "noop"
FAULTS = ("500", "truncated", "error", "short", "no-usage", "silent", "close")
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_STREAM = re.compile(rb'"stream":\s*true')
_FAULT = re.compile(rb'"model":\s*"fault:([\w-]+)"')
_PROMPT_IDS = re.compile(rb'"prompt":\s*\[([\d,\s]*)\]')
_TEXTS = re.compile(rb'"(?:prompt|content)":\s*"((?:[^"\\]|\\.)*)"')
JSON_HEAD = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def json_response(body: object, status: bytes = b"200 OK") -> bytes:
    """Return a whole response."""
    content = json.dumps(body, separators=(",", ":")).encode()
    return JSON_HEAD % (status, len(content)) + content


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(body: object) -> bytes:
    return _http_chunk(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


def _choice(chat: bool, text: str, finish: str | None, whole: bool = False) -> dict[str, object]:
    message = {"message": {"role": "assistant", "content": text}} if whole else {"delta": {"content": text}}
    return {"index": 0, **(message if chat else {"text": text}), "logprobs": None, "finish_reason": finish}


@cache
def stream_parts(chat: bool) -> tuple[bytes, bytes, bytes]:
    """Return a stream in three parts: up to the first token, one further token, and what follows the last."""
    identity = {"id": "cmpl-0", "object": "chat.completion.chunk" if chat else "text_completion", "created": 0}
    begin = STREAM_HEAD
    if chat:  # the role comes before any text
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        begin += _event({**identity, "model": MODEL, "choices": [role]})
    token = _event({**identity, "model": MODEL, "choices": [_choice(chat, WORD, None)]})
    finish = _event({**identity, "model": MODEL, "choices": [_choice(chat, "", "length")]})
    return begin + token, token, finish + _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def usage_event(prompt_tokens: int, tokens: int) -> bytes:
    """Return the chunk that carries the token counts."""
    return _event({"id": "cmpl-0", "model": MODEL, "choices": [], "usage": _usage(prompt_tokens, tokens)})


def _usage(prompt_tokens: int, tokens: int) -> dict[str, object]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    return {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


@lru_cache(maxsize=4096)
def whole_stream(chat: bool, tokens: int, prompt_tokens: int, usage: bool) -> bytes:
    """Return a stream as one block of bytes."""
    first, token, last = stream_parts(chat)
    if usage:
        finish, done, end = last.partition(_http_chunk(b"data: [DONE]\n\n"))
        last = finish + usage_event(prompt_tokens, tokens) + done + end
    return first + token * (tokens - 1) + last


@lru_cache(maxsize=4096)
def whole_response(chat: bool, tokens: int, prompt_tokens: int, usage: bool = True) -> bytes:
    """Return a response that is not streamed."""
    body = {"id": "cmpl-0", "object": "chat.completion" if chat else "text_completion", "created": 0, "model": MODEL}
    choices = [_choice(chat, WORD * tokens, "length", whole=True)]
    return json_response({**body, "choices": choices, "usage": _usage(prompt_tokens, tokens) if usage else None})


class NoopConnection(asyncio.Protocol):
    """Responds to each request as soon as its body is complete."""

    def __init__(self, ttft_s: float, itl_s: float):
        self._buffer = b""
        self._ttft_s, self._itl_s = ttft_s, itl_s
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._buffer[:end]
            position = head.lower().find(b"content-length:")
            length = int(head[position + 15 :].partition(b"\r\n")[0]) if position >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._respond(head.partition(b"\r\n")[0].split(b" "), body)

    def _respond(self, request_line: list[bytes], body: bytes) -> None:
        assert self._transport is not None
        method, path = request_line[0], request_line[1]
        if method == b"GET":
            is_route = path.endswith((b"/health", b"/v1/models"))
            names = [MODEL, *(f"fault:{fault}" for fault in FAULTS)]
            models = {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}
            self._transport.write(json_response(models) if is_route else json_response({}, b"404 Not Found"))
            return
        chat = path.endswith(b"/chat/completions")
        if not chat and not path.endswith(b"/completions"):
            self._transport.write(json_response({"error": {"message": "no such route"}}, b"404 Not Found"))
            return
        match = _MAX_TOKENS.search(body)
        tokens = int(match[1]) if match else 16
        fault = _FAULT.search(body)
        if fault is not None:
            self._misbehave(fault[1].decode(), chat, tokens, _STREAM.search(body) is not None)
            return
        prompt_tokens = count_prompt_tokens(body)
        if not _STREAM.search(body):
            self._respond_whole(self._ttft_s + self._itl_s * (tokens - 1), whole_response(chat, tokens, prompt_tokens))
        elif not self._ttft_s and not self._itl_s:
            self._transport.write(whole_stream(chat, tokens, prompt_tokens, b"include_usage" in body))
        else:
            asyncio.get_running_loop().create_task(self._stream(chat, tokens, prompt_tokens))

    async def _stream(self, chat: bool, tokens: int, prompt_tokens: int) -> None:
        """Send one token after the other at absolute times."""
        first, token, last = stream_parts(chat)
        finish, done, end = last.partition(_http_chunk(b"data: [DONE]\n\n"))
        start = time.monotonic() + self._ttft_s
        for number in range(tokens):
            await _wait_until(start + number * self._itl_s)
            self._write(first if number == 0 else token)
        self._write(finish + usage_event(prompt_tokens, tokens) + done + end)

    def _misbehave(self, fault: str, chat: bool, tokens: int, streaming: bool) -> None:
        first, token, _ = stream_parts(chat)
        responses = {
            "500": json_response({"error": {"message": "out of luck"}}, b"500 Internal Server Error"),
            "truncated": first + token,
            "error": first + _event({"error": {"message": "engine died"}}) + b"0\r\n\r\n",
            "short": whole_stream(chat, max(1, tokens // 2), 8, True),
            "no-usage": whole_stream(chat, tokens, 8, False) if streaming else whole_response(chat, tokens, 8, False),
            "silent": b"",
            "close": b"",
        }
        self._write(responses[fault])
        if fault in ("truncated", "close") and self._transport is not None:
            self._transport.close()

    def _respond_whole(self, delay_s: float, response: bytes) -> None:
        if delay_s <= 0:
            self._write(response)
        else:
            asyncio.get_running_loop().create_task(self._write_at(time.monotonic() + delay_s, response))

    async def _write_at(self, due: float, response: bytes) -> None:
        await _wait_until(due)
        self._write(response)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _wait_until(due: float) -> None:
    """Sleep until a time of the monotonic clock; uvloop counts whole milliseconds, so its timers may fire early."""
    while (left := due - time.monotonic()) > 0:
        await asyncio.sleep(left)


def count_prompt_tokens(body: bytes) -> int:
    """Return the ids of a prompt, or the words of its texts."""
    ids = _PROMPT_IDS.search(body)
    if ids is not None:
        return ids[1].count(b",") + 1
    return sum(text.count(b" ") + 1 for text in _TEXTS.findall(body))


async def start_server(
    host: str = "127.0.0.1", port: int = 0, ttft_s: float = 0.0, itl_s: float = 0.0
) -> asyncio.base_events.Server:
    """Start the server in this event loop; port 0 chooses a free one."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: NoopConnection(ttft_s, itl_s), host, port, backlog=4096)


async def _serve(options: argparse.Namespace) -> None:
    server = await start_server(options.host, options.port, options.ttft_ms / 1000, options.itl_ms / 1000)
    port = server.sockets[0].getsockname()[1]
    print(f"listening on http://{options.host}:{port}", flush=True)
    await server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m llmb.loadgen.noop_server", description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--ttft-ms", type=float, default=0.0, help="delay of the first token")
    parser.add_argument("--itl-ms", type=float, default=0.0, help="delay between tokens")
    options = parser.parse_args(arguments)
    from llmb.loadgen.event_loop import run_loop

    with suppress(OSError, ValueError):  # a connection each
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(KeyboardInterrupt):
        run_loop(_serve(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
