"""Messages between the HTTP process and its engine processes, and their framing on a socket.

    HTTP process -> rank 0 of an engine        Submit, Cancel
    rank that reports -> HTTP process          EngineReady once, then one StepReport a step

A frame is its length in four bytes and a pickle: both ends are processes of one server, on one machine.
"""

import pickle
import select
import socket
from array import array
from typing import Any, NamedTuple

from llmb.serve.request import FinishReason, SamplingParams, TokenLogprobs

LENGTH_BYTES = 4
RECEIVE_BYTES = 1 << 18
PROMPT_TYPE = "i"  # of the array that holds the tokens of a prompt


class Submit(NamedTuple):
    """A request for one output."""

    request_id: int
    shard: int  # of attention data parallelism; 0 without
    prompt: bytes  # an array of PROMPT_TYPE
    max_tokens: int
    sampling_params: SamplingParams
    ignore_eos: bool = False

    @property
    def token_ids(self) -> list[int]:
        return array(PROMPT_TYPE, self.prompt).tolist()


class Cancel(NamedTuple):
    """End of a request whose output nobody wants any more."""

    request_id: int
    shard: int


Command = Submit | Cancel


class EngineReady(NamedTuple):
    """An engine that takes requests."""

    max_model_len: int  # tokens of prompt and output
    kv_blocks: int
    block_tokens: int
    slots: int  # sequences that can run at once
    prefix_cache: bool


class EngineState(NamedTuple):
    """State of an engine after a step; counters run since its start."""

    waiting: int = 0
    running: int = 0
    blocks_used: int = 0
    blocks: int = 0
    free_slots: int = 0
    slots: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens
    prefix_hits: int = 0


class StepReport(NamedTuple):
    """Everything that a step changed for requests, in order of `starts`, tokens, `ends`."""

    starts: list[tuple[int, int]]  # request id and prompt tokens from the prefix cache
    request_ids: list[int]  # of the tokens
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] | None  # by index in `tokens`
    ends: list[tuple[int, FinishReason]]
    refusals: list[tuple[int, str]]  # requests that can never be served, and why
    state: EngineState


def encode_prompt(token_ids: list[int]) -> bytes:
    """Return the tokens of a prompt as Submit holds them."""
    return array(PROMPT_TYPE, token_ids).tobytes()


def encode_frame(message: Any) -> bytes:
    """Return a message as it travels."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class FrameReader:
    """Reassembles the messages of a byte stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that are complete with this data."""
        buffer, messages, start = self._buffer, [], 0
        buffer += data
        while len(buffer) - start >= LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(buffer[start : start + LENGTH_BYTES], "little")
            if len(buffer) < end:
                break
            messages.append(pickle.loads(memoryview(buffer)[start + LENGTH_BYTES : end].tobytes()))
            start = end
        del buffer[:start]
        return messages


class ChannelClosed(Exception):
    """The HTTP process closed its end, or is gone: the engine must exit."""


class EngineChannel:
    """The engine's end of the socket. Sending never waits for the HTTP process: what does not fit is sent later."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameReader()
        self._unsent = bytearray()

    def receive(self, timeout_s: float | None) -> list[Any]:
        """Return the messages that have arrived, after at most so many seconds; None: wait for one."""
        self._wait(timeout_s)
        messages: list[Any] = []
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return messages
            except ConnectionError:
                raise ChannelClosed from None
            if not data:
                raise ChannelClosed
            messages += self._frames.feed(data)

    def send(self, message: Any) -> None:
        self._unsent += encode_frame(message)
        self._flush()

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until there is something to receive; meanwhile send what is left."""
        while timeout_s != 0:
            writers = [self._socket] if self._unsent else []
            readable, writable, _ = select.select([self._socket], writers, [], timeout_s)
            if writable:
                self._flush()
            if readable or not writable:
                return

    def _flush(self) -> None:
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except ConnectionError:
                raise ChannelClosed from None
