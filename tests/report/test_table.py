"""Text tables: alignment, and nothing lost in a narrow terminal."""

import sys

import pytest

from llmb.report.table import render, terminal_width

HEADER = ("name", "max_batch_size", "GPUs", "value")
ROWS = [("first run", 768, "gb300 gb200 b200 h100", 1.5), ("second", 2884, "h100", None)]


def test_natural_width_has_one_line_a_row():
    assert render(HEADER, ROWS) == (
        "name       max_batch_size  GPUs                   value\n"
        "---------  --------------  ---------------------  -----\n"
        "first run             768  gb300 gb200 b200 h100    1.5\n"
        "second               2884  h100                       -"
    )
    assert render(HEADER, ROWS, 80) == render(HEADER, ROWS)
    assert render(HEADER, []).splitlines()[0] == "name  max_batch_size  GPUs  value"


def test_narrow_table_breaks_cells_at_spaces_and_headers_after_underscores():
    assert render(HEADER, ROWS, 36) == (  # the key stays whole
        "name         max_  GPUs        value\n"
        "           batch_\n"
        "             size\n"
        "---------  ------  ----------  -----\n"
        "first run     768  gb300         1.5\n"
        "                   gb200 b200\n"
        "                   h100\n"
        "second       2884  h100            -"
    )


def test_a_table_fits_the_terminal_and_uses_all_of_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "36")
    assert render(HEADER, ROWS) == render(HEADER, ROWS, 36)
    monkeypatch.setenv("COLUMNS", "160")
    assert render(HEADER, ROWS) == render(HEADER, ROWS, None)


def test_columns_without_space_continue_below_with_the_keys():
    first, second = render(HEADER, ROWS, 22).split("\n\n")
    assert first.splitlines()[0].split() == ["name", "max_", "GPUs"]
    assert second.splitlines()[0].split() == ["name", "value"]
    assert all(max(map(len, block.splitlines())) <= 22 for block in (first, second))


@pytest.mark.parametrize("width", range(1, 80))
def test_no_word_is_lost_at_any_width(width):
    text = render(HEADER, ROWS, width)
    assert all(
        word in text.split() for word in ("first", "run", "768", "gb300", "gb200", "b200", "h100", "1.5", "2884")
    )


def test_width_is_that_of_the_terminal_and_unlimited_in_a_pipe(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", open("/dev/null", "w"))  # noqa: SIM115
    assert terminal_width() is None
    monkeypatch.setenv("COLUMNS", "123")
    assert terminal_width() == 123
