"""Framing of messages: any split of the bytes gives the same messages; a closed socket raises."""

import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.serve.http.engine_messages import (
    Cancel,
    ChannelClosed,
    EngineChannel,
    FrameReader,
    Submit,
    encode_frame,
    encode_prompt,
)
from llmb.serve.request import SamplingParams

MESSAGES = [Cancel(1, 0), Submit(2, 0, encode_prompt([5, 2**31 - 1]), 7, SamplingParams(seed=3)), Cancel(3, 1)]


@given(cuts=st.lists(st.integers(0, 1000), max_size=10))
def test_any_split_gives_the_same_messages(cuts):
    data = b"".join(map(encode_frame, MESSAGES))
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader = FrameReader()
    pieces = [data[start:end] for start, end in pairwise(bounds)]
    assert [message for piece in pieces for message in reader.feed(piece)] == MESSAGES


def test_channel_sends_without_waiting_and_ends_with_its_peer():
    near, far = socket.socketpair()
    channel, peer = EngineChannel(near), EngineChannel(far)
    big = "x" * 3_000_000
    channel.send(big)
    received: list[str] = []
    while not received:
        received = peer.receive(0.01)
        channel._flush()
    assert received == [big]
    peer.send(MESSAGES[0])
    assert channel.receive(None) == MESSAGES[:1]
    assert channel.receive(0) == []
    far.close()
    with pytest.raises(ChannelClosed):
        channel.receive(None)


def test_prompt_travels_as_an_array():
    assert MESSAGES[1].token_ids == [5, 2**31 - 1]
