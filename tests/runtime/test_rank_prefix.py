"""Who said what: every line of a rank carries its number, the last one of a killed rank too."""

import subprocess
import sys

PROGRAM = """
import os, signal, sys
from llmb.runtime.rank_prefix import label_output
label_output(3)
print("one")
print("two", flush=True)
os.write(1, b"half a li")
os.write(2, b"terminate called\\n")
os.write(1, b"ne")
os.kill(os.getpid(), signal.SIGKILL)
"""
SAID = ["[rank3]: one", "[rank3]: two", "[rank3]: half a line"]


def test_both_streams_are_labelled_to_the_last_word() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=20)
    assert done.returncode == -9
    assert done.stdout.splitlines() == SAID
    assert done.stderr.splitlines() == ["[rank3]: terminate called"]


def test_two_streams_to_one_place_keep_their_order() -> None:
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
