"""Responses of servers and gateways that are no plain stream of text: what each is called, and what is measured."""

import json

import pytest

from llmb.loadgen.client.http_client import Connection, Exchange

DONE = b"data: [DONE]\n\n"


class FakeTransport:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class FakeClient:
    """What a connection needs of its client."""

    def __init__(self) -> None:
        self.ended: list[Exchange] = []
        self.on_end = self.ended.append

    def release(self, connection: Connection) -> None: ...

    def forget(self, connection: Connection) -> None: ...


def exchange_of(body: bytes, headers: str = "Content-Type: text/event-stream", streaming: bool = True) -> Exchange:
    """Return the exchange of a request that has this response."""
    client, exchange = FakeClient(), Exchange(streaming)
    connection = Connection(client)  # type: ignore[arg-type]
    connection.transport, connection.exchange = FakeTransport(), exchange  # type: ignore[assignment]
    head = f"HTTP/1.1 200 OK\r\n{headers}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.data_received(head.encode() + body)
    assert client.ended == [exchange]
    return exchange


def event(content: dict) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(words: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": finish}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            text("a") + event({"object": "error", "message": "out of memory", "code": 500}),
            "stream error: out of memory",
        ),
        (text("a") + b'event: error\ndata: {"message": "overloaded"}\n\n', "stream error: overloaded"),
        (text("a") + text("", "abort"), "given up by the server: finish_reason abort"),
        (text("a") + text("", "error"), "given up by the server: finish_reason error"),
        (text("", "stop") + usage(0), "empty response: no text, no tokens"),
        (b": ping\n\n", "empty response: no text, no tokens"),
    ],
)
def test_a_stream_without_an_output_is_a_failure_however_it_ends(body, error):
    assert exchange_of(body + DONE).error == error


def test_tokens_without_text_are_an_output():
    """A special token, or a part of a character, has no text of its own."""
    assert exchange_of(text("", "length") + usage(1) + DONE).error is None


@pytest.mark.parametrize(
    ("body", "headers", "error"),
    [
        (b"\x1f\x8b\x08", "Content-Encoding: gzip", "bad response: compressed (gzip), which was not asked for"),
        (
            b'{"choices": [{"text": "a b"}]}',
            "Content-Type: application/json",
            "bad response: no stream of events but application/json; --no-stream reads it whole",
        ),
        (b"<html>", "X: y", "bad response: no stream of events but no Content-Type; --no-stream reads it whole"),
        (b'{"error": {"message": "no quota"}}', "Content-Type: application/json", "error response: no quota"),
        (b'{"detail": "busy"}', "Content-Type: application/json", "error response: busy"),
        (b"", "Content-Type: text/event-stream", "truncated: the stream ended without [DONE]"),
        (text("a"), "Content-Type: text/event-stream", "truncated: the stream ended without [DONE]"),
    ],
)
def test_what_is_no_stream_is_named(body, headers, error):
    assert exchange_of(body, headers).error == error


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ({"choices": [{"message": {"content": None, "reasoning_content": "hm"}}]}, None),
        ({"choices": [{"message": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}, None),
        ({"choices": [{"text": ""}], "usage": {"completion_tokens": 1}}, None),
        ({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}, "empty response: no text, no tokens"),
        ({"choices": [{"text": "a", "finish_reason": "abort"}]}, "given up by the server: finish_reason abort"),
        ({"object": "error", "message": "busy"}, "error response: busy"),
    ],
)
def test_whole_responses_without_an_output_are_failures(response, error):
    assert exchange_of(json.dumps(response).encode(), "X: y", streaming=False).error == error


def test_reasoning_and_content_of_one_message_are_its_text():
    message = {"content": "so", "reasoning": "hm ", "reasoning_content": "hm "}
    exchange = Exchange(False, keep_text=True)
    exchange.reader.whole(json.dumps({"choices": [{"message": message}]}).encode(), 1.0)
    assert exchange.reader.text == "hm so"
