"""Every line of a rank has its prefix, including the last one of a killed rank."""

import subprocess
import sys

PROGRAM = """
import os, signal, sys
from llmb.runtime.rank_prefix import prefix_output
prefix_output(3)
print("one")
print("two", flush=True)
os.write(1, b"half a li")
os.write(2, b"terminate called\\n")
os.write(1, b"ne")
os.kill(os.getpid(), signal.SIGKILL)
"""
EXPECTED = ["[rank3]: one", "[rank3]: two", "[rank3]: half a line"]


def test_stdout_and_stderr_are_prefixed_to_the_last_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=20)
    assert done.returncode == -9
    assert done.stdout.splitlines() == EXPECTED
    assert done.stderr.splitlines() == ["[rank3]: terminate called"]


def test_stdout_and_stderr_to_one_file_keep_their_order() -> None:
    program = PROGRAM.replace('b"half a li"', 'b"before\\n"').replace('b"ne"', 'b"after\\n"')
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20
    )
    assert [line.removeprefix("[rank3]: ") for line in done.stdout.splitlines()] == [
        "one",
        "two",
        "before",
        "terminate called",
        "after",
    ]
