"""GPUs of the server under load: those of the process that listens here, and of no other."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from recorded_gpus import recorded_gpus

from llmb.formats.nvidia_smi import GpuProcess
from llmb.loadgen import server_device as module
from llmb.loadgen.server_device import server_device


@pytest.fixture
def url():
    """A socket of this process that listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://localhost:{listener.getsockname()[1]}"


def gpus_of(monkeypatch, *pids: int, **changes: object) -> None:
    """Let nvidia-smi list two GPUs with one process each; `changes` are fields of the second."""
    first = recorded_gpus("h200")[0]
    gpus = [replace(first, processes=(GpuProcess(pid=pid, name="server"),)) for pid in pids]
    monkeypatch.setattr(
        module, "query_gpus", lambda links: ([*gpus[:1], *(replace(g, **changes) for g in gpus[1:])], None)
    )


def test_the_gpu_of_the_listening_process(monkeypatch, url):
    gpus_of(monkeypatch, os.getpid(), 1)
    name, facts = server_device(url)
    assert name == "NVIDIA H200"
    assert facts["power_limit_w"] == recorded_gpus("h200")[0].power_limit_w


def test_a_descendant_serves_and_facts_that_differ_are_left_out(monkeypatch, url):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        gpus_of(monkeypatch, os.getpid(), sleeper.pid, power_limit_w=123.0)
        name, facts = server_device(url)
        assert name == "NVIDIA H200"
        assert "power_limit_w" not in facts
        assert facts["driver"] == recorded_gpus("h200")[0].driver
    finally:
        sleeper.kill()
        sleeper.wait()


def test_nothing_is_known_of_other_processes_and_machines(monkeypatch, url):
    gpus_of(monkeypatch, 1, os.getppid())
    assert server_device(url) == (None, None), "the GPU's process is not the server"
    gpus_of(monkeypatch, os.getpid())
    assert server_device("http://other-machine:8000") == (None, None)
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):  # a connection at the same port does not listen
        assert server_device(url)[0] == "NVIDIA H200"
    assert server_device("http://127.0.0.1:1") == (None, None), "nobody listens"
