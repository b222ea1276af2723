"""Control sequences of others never reach a screen; our own do."""

import io
import sys
from types import SimpleNamespace

import pytest

from llmb.cli.jobs.watch import _Screen
from llmb.cli.llmb_run import guarded
from llmb.errors import ConfigError
from llmb.report.status_line import StatusLine
from llmb.report.terminal.colour import print_report
from llmb.report.terminal.safe_stream import SafeStream, without_controls

OWN = {"\x1b[J", "\x1b[0m", "\x1b[31m", "\x1b[1A"}  # of a row, of a red word, of a screen drawn again
HOSTILE = [
    "\x1b]0;title\x07", "\x1b]52;c;aGk=\x07", "\x1b[2J", "\x1b[8mhidden", "\x1bc", "\x9b2J", "\b", "\u202e", "\rfaked",
    "\x1b[1A", "\x1b[2K", "\x1b[31mred", "\x1b[?25l", "\x1b[1G", "\x0b", "\x0c", "\x85", "\x1b",
    "\x1b[38;2;1;2;3m", "\x1bPq\x1b\\",
]  # fmt: skip


class Terminal(io.StringIO):
    """Output that is a terminal with colours."""

    def isatty(self) -> bool:
        return True


def controls(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c not in "\n\t"}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_sequences_are_spelled_out_or_left_out(hostile):
    safe = without_controls(f"name {hostile} end")
    assert not controls(safe)
    assert safe.startswith("name ")
    assert safe.endswith(" end")


def test_text_lines_and_colours_of_a_log_stay_readable():
    assert without_controls("a\tb\n größe ✓\n") == "a\tb\n größe ✓\n"
    assert without_controls("\x1b[1;31mERROR\x1b[0m no memory\r\n") == "ERROR no memory\n"


def test_every_way_to_the_screen_is_clean_but_for_our_own_sequences(monkeypatch):
    """A report, a progress row, the screen of `jobs --watch` and plain prints, each with text of others."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    foreign = " ".join(HOSTILE)
    screen = Terminal()
    output = SafeStream(screen)
    monkeypatch.setattr(sys, "stdout", output)
    print(foreign, file=output)
    output.writelines([foreign])
    assert not controls(screen.getvalue())

    print_report(f"L1: failed ({foreign})", output)
    assert "\x1b[31m" in screen.getvalue()  # in red
    line = StatusLine(output)
    line.draw(f"started on {foreign}", force=True)
    line.close()
    view = _Screen(lambda jobs: "table")
    view.log(f"node {foreign} is down")
    for _ in range(2):
        view.show([SimpleNamespace(status=foreign)])
    on_screen = screen.getvalue()
    for sequence in OWN | {f"\x1b[{n}A" for n in range(10)}:
        on_screen = on_screen.replace(sequence, "")
    assert controls(on_screen) == {"\r"}  # of the row and of the screen
    assert "\rfaked" not in on_screen


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
