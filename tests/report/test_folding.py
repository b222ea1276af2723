"""Sentences of a report within the terminal's width."""

import pytest

from llmb.report.terminal.colour import styled
from llmb.report.terminal.folding import fold

NOTE = "note PROXY: a proxy of the model; do not compare it with published results or scale it up"


@pytest.mark.parametrize("width", [12, 20, 40, 80, 88])
def test_lines_fit_and_lose_no_word(width):
    lines = fold(NOTE, width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == NOTE
    if width == 40:
        assert lines[0] == "note PROXY: a proxy of the model; do not"  # as much as fits


@pytest.mark.parametrize(
    "line",
    [
        NOTE,  # in a pipe
        "x" * 90,
        "command: python -m llmb.train " + "config.json " * 9,
        "run folder: /data/with a space/" + "long/" * 20,
        "L1   llama3.1  ok       " + "0:05:10  " * 9,  # a table's row
    ],
)
def test_what_is_copied_or_fits_by_itself_is_unchanged(line):
    assert fold(line, None if line == NOTE else 80) == line


def test_a_word_longer_than_the_terminal_has_a_line_of_its_own():
    assert fold(f"see {'x' * 30} for more", 20).splitlines() == ["see", f"  {'x' * 30}", "  for more"]


def test_colours_cross_line_breaks():
    text = styled("verdict: B is slower, by 67.1 % in tokens/s", 20)
    assert text.plain == "verdict: B is\n  slower, by 67.1 %\n  in tokens/s"
    assert [text.plain[span.start : span.end] for span in text.spans if span.style == "red"] == ["slower"]
