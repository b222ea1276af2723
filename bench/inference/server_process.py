"""A server in a process of its own, for benches: ours, or the no-op server.

with running_server([sys.executable, "-m", "llmb.serve.http", "config.json", "--port", "0"]) as (process, url): ...
"""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

STOP_S = 120.0  # that a server may take to end
READY = re.compile(r"(?:serving .* at|listening on) (http://[^/\s]+)")


@contextmanager
def running_server(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start a server, wait until it prints its URL, and end it; give its process and the URL."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if match := READY.search(line):
                yield process, match[1]
                return
        raise SystemExit("".join(lines) or "the server did not start")
    finally:
        process.terminate()
        process.wait(STOP_S)
