"""Colours of statuses, warnings and verdicts on a terminal; plain text everywhere else, without importing Rich."""

import io
import re
import subprocess
import sys

import pytest
from terminal_screen import Screen

from llmb.report.terminal.colour import print_report

TEXT = """\
pretrain_llama3.1_8b: ok
pretrain_grok1: oom (rank 3 ran out of memory)
warning FEW_SAMPLES: only 2 steps were measured
note PROXY: a proxy of the model
verdict: B is faster, by 2.0 % in tokens/s; but
IMPOSSIBLE as described: it needs 1.20 times what the chip sustains
figure: okay [not a style] \u00b5s"""
COLOUR = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)


class ColourScreen(Screen):
    """Terminal that keeps what was written to it."""

    def __init__(self):
        super().__init__(200)
        self.raw = ""

    def write(self, text: str) -> int:
        self.raw += text
        return super().write(text)


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def printed(text):
    screen = ColourScreen()
    print_report(text, screen)
    return screen


def test_statuses_warnings_and_verdicts_are_coloured_and_nothing_is_changed():
    screen = printed(TEXT)
    assert "\n".join(screen.rows).rstrip() == TEXT
    coloured = {text: code for code, text in COLOUR.findall(screen.raw)}
    assert coloured["ok"] == "32"
    assert coloured["oom (rank 3 ran out of memory)"] == "31"
    assert coloured["warning FEW_SAMPLES"] == "33"
    assert coloured["faster"] == "1;32"
    assert coloured["IMPOSSIBLE"] == "31"
    assert not any("okay" in text for text in coloured)


@pytest.mark.parametrize(
    "verdict",
    [
        "too few samples to tell; B looks slower, by 0.4 % in tokens/s",
        "B generates 2.0 % fewer output tokens/s (too few requests to tell)",
    ],
)
def test_an_undecided_verdict_is_neither_good_nor_bad(verdict):
    colours = {code.rpartition(";")[2] for code, _ in COLOUR.findall(printed(f"verdict: {verdict}").raw)}
    assert "33" in colours
    assert not colours & {"31", "32"}


@pytest.mark.parametrize(
    ("line", "word", "code"),
    [
        ("ok: llama is 0.10 % faster in tokens_per_s (limit 2 %)", "ok", "32"),
        ("slower: llama is 3.10 % slower in tokens_per_s (limit 2 %)", "slower", "31"),
        ("undecided: llama looks 0.10 % slower, too few samples", "undecided", "33"),
        ("pass  llama  step_time_s 1.2, at most 2", "pass", "32"),
        ("FAIL llama (3 s)", "FAIL", "31"),
        ("L1   llama3.1  ok       0:05:10", "ok", "32"),
        ("L1   llama3.1  oom", "oom", "31"),
        ("4711  llama3.1  running  RUNNING", "running", "1"),
        ("job L3, failed (rank 1: killed)", "failed (rank 1: killed)", "31"),
    ],
)
def test_lines_of_gate_exemplar_and_jobs(line, word, code):
    assert COLOUR.findall(printed(line).raw) == [(code, word)]


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_refused(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert printed(TEXT).raw == TEXT + "\n"


def test_words_longer_than_the_terminal_are_left_to_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert printed("x" * 70 + " " + "y" * 70).raw.strip() == "x" * 70 + "\n  " + "y" * 70


def test_a_pipe_gets_plain_text():
    out = io.StringIO()
    print_report(TEXT, out)
    assert out.getvalue() == TEXT + "\n"


def test_nothing_imports_rich_where_no_terminal_shows_it():
    code = (
        "import sys, llmb.cli.llmb_run as r\n"
        "from llmb.report.status_line import StatusLine\n"
        "from llmb.report.terminal.colour import print_report\n"
        "r.parser(); print_report('run: ok'); line = StatusLine(); line.draw('1/2', True, 0.5); line.close()\n"
        "print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["run:", "ok", "False"]
    assert done.stderr == "1/2\n"
