"""Every command the README prints works, in the order it is printed."""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A shorter run of the same kind; arguments of a command win, so steps and requests among them are replaced.
SHORT = {"-w pretrain": {"MAX_STEPS": "3"}, "-w inference": {"NUM_REQUESTS": "4", "CONCURRENCY": "4"}}


def printed_commands() -> list[str]:
    """The lines of fenced blocks that are commands, comments cut off; `make` calls this test, so it is left out."""
    commands, fenced = [], False
    for line in (ROOT / "README.md").read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced and ("llmb-run" in line or line.startswith("common/")):
            commands.append(line.split("  #")[0].strip())
    return commands


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def skip_if_taken(port: int) -> None:
    """Skip where another program listens on a port that the README prints, which no test can then serve on."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            pytest.skip(f"port {port}, which the README prints, is taken by another program")


def shortened(command: str, port: int) -> str:
    """Return a command with fewer steps and requests; servers take a free port, as 8000 may be taken."""
    command = re.sub(r"--requests \d+", "--requests 8", re.sub(r"--set steps=\d+", "--set steps=3", command))
    command = command.replace("localhost:8000", f"localhost:{port}")
    return f"{command} --port {port}" if command.startswith("llmb-run serve") else command


def shortening(command: str) -> dict[str, str]:
    """Return the variables that shorten the run of a proxy."""
    return next((each for target, each in SHORT.items() if target in command and "--proxy" in command), {})


def test_the_readme_has_commands():
    assert len(printed_commands()) > 10
    assert sum(bool(shortening(command)) for command in printed_commands()) >= len(SHORT)


def test_a_taken_port_is_a_reason_to_skip():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        with pytest.raises(pytest.skip.Exception, match=r"port \d+, which the README prints, is taken"):
            skip_if_taken(listener.getsockname()[1])
    skip_if_taken(free_port())


@pytest.mark.slow
@pytest.mark.parametrize("as_printed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_every_printed_command_works(as_printed: bool):
    servers: list[subprocess.Popen[bytes]] = []
    port = free_port()
    if as_printed:
        skip_if_taken(8000)
    try:
        for printed in printed_commands():
            command = printed if as_printed else shortened(printed, port)
            environment = os.environ | ({} if as_printed else shortening(command))
            if command.startswith("llmb-run serve"):  # serves the commands after it, which wait until it is ready
                servers.append(subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=ROOT, env=environment))
                continue
            done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            assert done.stdout.strip(), command
    finally:
        for server in servers:
            server.terminate()
    assert [server.wait(60) for server in servers] == [0]
