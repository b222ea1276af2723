"""HTTP responses, server-sent events and OpenAI chunks, split at any byte."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.loadgen.client.http_response import HttpError, ResponseParser
from llmb.loadgen.client.openai_stream import ResponseReader
from llmb.loadgen.client.sse import SseParser
from llmb.loadgen.noop_server import whole_response, whole_stream


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


CUTS = st.lists(st.integers(0, 10**6), max_size=30)


@settings(max_examples=200, deadline=None)
@given(bodies=st.lists(st.binary(max_size=40), max_size=5), cuts=CUTS, trailer=st.booleans())
def test_chunked_bodies_are_joined_wherever_they_are_split(bodies, cuts, trailer):
    chunks = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(body), body) for body in bodies if body)
    end = b"0\r\nX-Sum: 1\r\n\r\n" if trailer else b"0\r\n\r\n"
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + end
    parser = ResponseParser()
    assert b"".join(parser.feed(piece) for piece in pieces(data, cuts)) == b"".join(bodies)
    assert parser.complete
    assert parser.status == 200
    assert parser.keep_alive


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=60), cuts=CUTS)
def test_bodies_of_known_length(body, cuts):
    data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
    parser = ResponseParser()
    assert b"".join(parser.feed(piece) for piece in pieces(data, cuts)) == body
    assert parser.complete
    assert not parser.keep_alive


def test_two_responses_on_one_connection():
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert parser.complete
    parser.reset()
    assert parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") == b"ok"


def test_the_end_of_the_connection_ends_a_body_without_length():
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\nab") == b"ab"
    assert not parser.complete
    assert parser.end()
    truncated = ResponseParser()
    truncated.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
    assert not truncated.end()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000,
    ],
)
def test_what_is_no_response_is_refused(data):
    with pytest.raises(HttpError):
        ResponseParser().feed(data)


LINES = st.text(st.characters(codec="ascii", exclude_characters="\r\n\0"), max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    contents=st.lists(LINES, min_size=1, max_size=6),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    comments=st.booleans(),
    cuts=CUTS,
)
def test_events_are_the_same_wherever_the_stream_is_split(contents, line_end, comments, cuts):
    comment = f": ping{line_end}" if comments else ""
    blank = line_end * 2 if comments else line_end
    text = "".join(f"{comment}event: x{line_end}data: {content}{line_end}{blank}" for content in contents)
    parser = SseParser()
    events = [event for piece in pieces(text.encode(), cuts) for event in parser.feed(piece)]
    assert [event.decode() for event in events + parser.end()] == contents


def test_events_of_several_lines_and_without_a_space():
    assert SseParser().feed(b"data:a\ndata: b\n\nid: 1\n\ndata: c\n\n") == [b"a\nb", b"c"]


@settings(max_examples=150, deadline=None)
@given(chat=st.booleans(), tokens=st.integers(1, 60), cuts=CUTS)
def test_a_whole_stream_has_its_tokens_wherever_it_is_split(chat, tokens, cuts):
    parser, sse, reader = ResponseParser(), SseParser(), ResponseReader()
    for moment, piece in enumerate(pieces(whole_stream(chat, tokens, 7, True), cuts)):
        reader.block(sse.feed_block(parser.feed(piece)), float(moment))
    assert parser.complete
    assert reader.done
    assert len(reader.token_times) == tokens
    assert reader.first_token == reader.token_times[0]
    assert list(reader.token_times) == sorted(reader.token_times)
    assert (reader.usage.input_tokens, reader.usage.output_tokens, reader.usage.cached_tokens) == (7, tokens, 0)
    assert reader.finish == "length"
    assert reader.error is None


def chunk(**choice) -> bytes:
    return json.dumps({"id": "x", "choices": [{"index": 0, **choice}]}).encode()


def test_empty_and_role_only_chunks_are_no_tokens():
    reader = ResponseReader(keep_text=True)
    chunks = [
        {"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": None}}, {"delta": {"content": "He"}},
        {"delta": {"reasoning_content": "hm"}}, {"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}},
        {"delta": {}, "finish_reason": "stop"},
    ]  # fmt: skip
    reader.events([chunk(**c) for c in chunks], 1.0)
    assert len(reader.token_times) == 3
    assert reader.text == "Hehm{}"
    assert reader.finish == "stop"


def test_bytes_decide_as_the_parser_does():
    """The fast path counts what the slow one counts, also for texts that look like JSON."""
    texts = ["a", '"', "", '"text":"', "\\", '"error"', '"usage":{', "é", "", "end"]
    for spaces in ((",", ":"), (", ", ": ")):
        events = [json.dumps({"choices": [{"text": text}]}, separators=spaces).encode() for text in ["x", *texts]]
        fast, slow = ResponseReader(), ResponseReader(keep_text=True)
        fast.events(events, 1.0)
        slow.events(events, 1.0)
        assert len(fast.token_times) == len(slow.token_times) == 9
        assert fast.error == slow.error


def test_errors_inside_a_stream_have_a_name():
    reader = ResponseReader()
    reader.events([chunk(text="a"), b'{"error": {"message": "no\\nmemory", "code": 500}}'], 1.0)
    assert reader.error == "stream error: no memory"
    broken = ResponseReader()
    broken.events([b"{"], 1.0)
    assert broken.error == "bad stream: an event is not JSON: {"


def test_whole_responses():
    for chat in (False, True):
        parser, reader = ResponseParser(), ResponseReader(keep_text=True)
        reader.whole(parser.feed(whole_response(chat, 3, 5)), 1.0)
        assert reader.text == "word word word "
        assert reader.usage.output_tokens == 3
        assert reader.first_token is None
    failed = ResponseReader()
    failed.whole(b'{"error": "busy"}', 1.0)
    assert failed.error == "error response: busy"
    other = ResponseReader()
    other.whole(b"<html>", 1.0)
    assert other.error == "bad response: not a completion: <html>"


@pytest.mark.parametrize(
    "chunk",
    [
        b"[" * 100_000, b'{"choices": 7}', b'{"choices": ["a", null]}', b'{"choices": {"a": 1}}',
        b'{"choices": [{"text": ["a"], "finish_reason": {"a": 1}}]}',
        b'{"usage": {"completion_tokens": 1000000000000000000000000000000}}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("keep_text", [False, True])
def test_what_no_server_should_send_ends_no_client(chunk, keep_text):
    reader = ResponseReader(keep_text)
    reader.events([b'{"choices": [{"text": "a"}]}', chunk, b'{"choices": [{"text": "b"}]}'], 1.0)
    reader.whole(chunk, 2.0)
    assert len(reader.token_times) >= 2
    assert reader.finish is None
    assert reader.usage.output_tokens is None
    assert reader.text is None or isinstance(reader.text, str)
