"""Control sequences of others never reach a screen; our own do."""

import io
import sys

import pytest

from llmb.cli.llmb_run import guarded
from llmb.errors import ConfigError
from llmb.report.terminal.safe_stream import SafeStream, without_controls


@pytest.mark.parametrize(
    "hostile",
    ["\x1b]0;title\x07", "\x1b]52;c;aGk=\x07", "\x1b[2J", "\x1b[8mhidden", "\x1bc", "\x9b2J", "\b", "\u202e"],
)  # fmt: skip
def test_hostile_sequences_are_spelled_out(hostile):
    safe = without_controls(f"name {hostile} end")
    assert not set(safe) & {"\x1b", "\x07", "\x9b", "\b", "\u202e"}
    assert safe.startswith("name ")


@pytest.mark.parametrize(
    "sequence", ["\x1b[31mred\x1b[0m", "\x1b[1;38;5;208mx\x1b[0m", "\r\x1b[K", "a\tb\n", "größe ✓", "\x1b[1A\x1b[2K"]
)
def test_colours_and_progress_pass(sequence):
    assert without_controls(sequence) == sequence


def test_commands_print_through_it(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def action() -> int:
        print("n1\x1b]0;x\x07")
        raise ConfigError("recipe \x1b[2J is wrong")

    assert guarded(action, False) == 1
    assert (out.getvalue(), err.getvalue()) == ("n1\\x1b]0;x\\x07\n", "ERROR: recipe \\x1b[2J is wrong\n")


def test_characters_without_an_encoding_are_spelled_out():
    buffer = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(buffer, encoding="utf-8"))
    stream.write("folder-\udcff\n")
    stream.flush()
    assert buffer.getvalue() == b"folder-\\udcff\n"
