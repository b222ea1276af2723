"""Start, limits, disconnects, signals and failures of the server, each with a process of its own.

Where only the HTTP process is asked for something, its engine is a fake, which starts without torch.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import FAKE_ENGINE, LiveServer, server_config, write_config

from llmb.events import RunEnded, RunStarted, ServingFacts, read

pytestmark = pytest.mark.slow
LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def config(tmp_path):
    """Random weights, a context of 8192, two sequences at once."""
    return write_config(tmp_path / "run", server_config(None, max_batch_size=2, kv_fraction=0.005))


def connect(server: LiveServer, fields: dict, buffer: int | None = None) -> socket.socket:
    """Send a streamed request and return its connection."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect((host, int(port)))
    body = json.dumps(fields | {"stream": True}).encode()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return sock


def wait_for(condition, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(server: LiveServer) -> float:
    return server.metrics()['vllm:num_requests_running{engine="0"}']


def read_all(sock: socket.socket) -> bytes:
    data = b""
    sock.settimeout(30)
    while chunk := sock.recv(65536):
        data += chunk
        if data.endswith(b"0\r\n\r\n"):
            break
    return data


def test_disconnect_frees_blocks_and_full_queue_is_429(config):
    with LiveServer(config, "--max-queue", "2") as server:
        socks = [connect(server, LONG) for _ in range(2)]
        wait_for(lambda: running(server) == 2)
        waiting = [connect(server, LONG) for _ in range(2)]
        wait_for(lambda: server.metrics()['vllm:num_requests_waiting{engine="0"}'] == 2)
        reply = server.complete(**LONG)
        assert reply.status == 429
        assert reply.headers["Retry-After"] == "1"
        assert reply.json()["error"]["code"] == "queue_full"
        for sock in socks + waiting:
            sock.close()
        figures = server.wait_idle()
        with ThreadPoolExecutor(5) as pool:  # two run, two wait, and the fifth is too many, however fast they come
            replies = list(pool.map(lambda _: server.complete(**LONG | {"max_tokens": 500}).status, range(5)))
        assert sorted(replies) == [200] * 4 + [429]
        assert figures['vllm:request_success_total{finished_reason="abort"}'] == 4
        assert server.complete(**LONG | {"max_tokens": 3}).status == 200
        assert server.stop() == 0
    events = list(read(config.parent / "events.rank0.jsonl"))
    assert [type(event) for event in events] == [RunStarted, ServingFacts, RunEnded]
    assert events[-1].status == "ok"


def test_slow_readers_get_all_of_their_text_in_fewer_chunks(config):
    """A fake engine writes faster than this client reads; other streams are not held up."""
    with LiveServer(config, program=(*FAKE_ENGINE, "4000")) as server:
        fields = LONG | {"max_tokens": 12_000}
        late = connect(server, fields, buffer=4096)
        reference = read_all(connect(server, fields))
        time.sleep(0.5)
        texts = {name: texts_of(data) for name, data in (("late", read_all(late)), ("reference", reference))}
        assert len("".join(texts["late"])) == len("".join(texts["reference"])) == 12_000
        assert len(texts["late"]) < 6000 < len(texts["reference"])


def test_clients_that_never_read_are_disconnected_and_take_little_memory(config):
    with LiveServer(config, "--stall-timeout", "1", program=(*FAKE_ENGINE, "2000")) as server:
        read_all(connect(server, LONG))
        before = resident_bytes(server.process.pid)
        socks = [connect(server, LONG | {"max_tokens": 1_000_000}, buffer=4096) for _ in range(32)]
        aborted = 'vllm:request_success_total{finished_reason="abort"}'
        most = 0
        deadline = time.monotonic() + 60
        while server.metrics()[aborted] < 32:
            most = max(most, resident_bytes(server.process.pid))
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert most - before < 32 * 2**20
        for sock in socks:
            sock.close()


def texts_of(data: bytes) -> list[str]:
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(event)["choices"][0]["text"] for event in events]


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_request_timeout_ends_streams_and_others(config):
    with LiveServer(config, "--request-timeout", "0.3") as server:
        reply = server.complete(**LONG)
        assert reply.status == 504
        assert reply.json()["error"]["code"] == "request_timeout"
        data = read_all(connect(server, LONG))
        assert b'"code": "request_timeout"' in data
        assert b"data: [DONE]" in data
        server.wait_idle()


def test_sigterm_drains_and_refuses_new_requests(config):
    with LiveServer(config, "--drain-timeout", "30", program=(*FAKE_ENGINE, "1000")) as server:
        sock = connect(server, LONG | {"max_tokens": 2500})
        wait_for(lambda: running(server) == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/health").status == 503)
        reply = server.complete(**LONG)
        assert reply.status == 503
        assert reply.json()["error"]["code"] == "shutting_down"
        assert b'"finish_reason":"length"' in read_all(sock)
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("second", [False, True])
def test_drain_ends_after_its_timeout_or_a_second_signal(config, second):
    with LiveServer(config, "--drain-timeout", "60" if second else "0.2", program=(*FAKE_ENGINE, "100")) as server:
        sock = connect(server, LONG | {"max_tokens": 8000})
        wait_for(lambda: running(server) == 1)
        server.process.send_signal(signal.SIGINT)
        if second:
            wait_for(lambda: server.get("/health").status == 503)
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        sock.close()


def test_dead_engine_fails_requests_and_ends_the_server(config):
    with LiveServer(config) as server:
        replies: list = []
        thread = threading.Thread(target=lambda: replies.append(server.complete(**LONG | {"max_tokens": 8000})))
        sock = connect(server, LONG | {"max_tokens": 8000})
        thread.start()
        wait_for(lambda: running(server) == 2)
        (worker,) = children(server.process.pid)
        os.kill(worker, signal.SIGKILL)
        assert b'"code": "engine_failed"' in read_all(sock)
        thread.join(10)
        assert replies[0].status == 500
        assert server.process.wait(15) == 2
        server._reader.join(5)
    assert server.lines[-1].endswith("engine 0 rank 0 was killed by signal 9, so the server ends")
    assert list(read(config.parent / "events.rank0.jsonl"))[-1].status == "failed"


def test_signal_before_the_engine_is_ready_ends_the_server_at_once(config):
    server = LiveServer(config)
    wait_for(lambda: children(server.process.pid))
    time.sleep(0.3)
    (worker,) = children(server.process.pid)
    assert server.stop(timeout_s=4) == 0
    assert not server.url
    assert not is_alive(worker)


def test_engine_ends_with_a_killed_server(config):
    with LiveServer(config) as server:
        (worker,) = children(server.process.pid)
        server.process.kill()
        wait_for(lambda: not is_alive(worker))


def test_api_key_is_required_and_never_printed(config, tmp_path):
    file = tmp_path / "key"
    file.write_text("a-secret-key\n")
    arguments = ("--api-key-file", str(file), "--served-model-name", "m")
    with LiveServer(config, *arguments, program=(*FAKE_ENGINE, "1000")) as server:
        assert server.complete(**LONG | {"max_tokens": 1}).status == 401
        assert server.get("/v1/models", Authorization="Bearer wrong").status == 401
        assert server.get("/v1/models", Authorization="Bearer a-secret-key").json()["data"][0]["id"] == "m"
        assert server.get("/health").status == 200
        assert server.client(api_key="a-secret-key").completions.create(model="m", prompt="a", max_tokens=1).choices
        assert "a-secret-key" not in server.output
    assert not any("a-secret-key" in path.read_text() for path in config.parent.iterdir())


def test_fallback_tokenizer_gives_every_token_a_text(config):
    with LiveServer(config, "--max-model-len", "64") as server:
        assert "no tokenizer.json" in server.output
        assert server.get("/v1/models").json()["data"][0]["tokenizer"] == "byte-level fallback"
        reply = server.complete(prompt="Hello", max_tokens=8, temperature=1, stop="<").json()
        assert reply["usage"]["prompt_tokens"] == 5
        stream = server.client().chat.completions.create(
            model="small-llama", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
        )
        assert all(chunk.choices[0].delta.content for chunk in stream)
        assert server.complete(prompt="a" * 64).status == 400


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--max-model-len", "100000000"], 1, "the KV cache holds"),
        (["--api-key-file", "/nonexistent"], 1, "cannot read the API key"),
        (["--host", "no.such.host.invalid"], 1, "--host no.such.host.invalid"),
        (["--max-queue", "0"], 1, "--max-queue 0: must be at least 1"),
    ],
)
def test_servers_that_cannot_start_say_why_in_one_line(config, arguments, code, words):
    command = [sys.executable, "-m", "llmb.serve.http", str(config), "--port", "0", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_used_port_is_refused_before_the_engine_starts(config):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        command = [sys.executable, "-m", "llmb.serve.http", str(config), "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
