"""The output of a serving run fits a terminal of 80 columns and 24 lines; elsewhere nothing is left out."""

import os
from dataclasses import replace

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RequestDone, RunEnded
from llmb.report.screen_summary import closing_text
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.result import Caution

BELOW = ["all figures: llmb-run jobs log L1"]


@pytest.fixture
def result(recipes):
    config = resolve(recipes["inference_llama3.1"], RunRequest(size="8b", dtype="fp8", gpus=1, proxy="small"))
    requests = [
        RequestDone(
            request=n, arrival=0.1 * n, first_token=0.1 * n + 0.5, end=0.1 * n + 1.5, input_tokens=64, output_tokens=64,
            requested_tokens=64, token_times=[0.1 * n + 0.5 + k / 63 for k in range(64)],
        )
        for n in range(config.workload.num_requests)
    ]  # fmt: skip
    return derive(config, [*requests, RunEnded(status="ok")])


@pytest.fixture
def terminal(monkeypatch):
    def of(columns, lines):
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, lines)))

    return of


@pytest.mark.parametrize("warnings", [0, 1, 3, 9])
def test_a_serving_run_fits_one_screen(result, terminal, warnings):
    terminal(80, 24)
    many = replace(result, warnings=(Caution(code="CODE", text="a long text " * 20),) * warnings)
    text = closing_text(many, "run folder: /x", BELOW, other_lines=4)
    lines = text.splitlines()
    assert len(lines) + 4 <= 23  # and the prompt
    assert max(map(len, lines)) <= 80
    for word in ("ok, precision: fp8", "output, whole run", "TTFT", "TPOT", "ITL", "end to end", BELOW[0]):
        assert word in text
    assert text.count("warning CODE") == min(warnings, 2 if warnings > 3 else 3)
    assert ("7 notes and warnings are on the page" in text) == (warnings == 9)
    assert ("tokens/s/user" in text) == (warnings < 3)


def test_nothing_is_left_out_elsewhere(result, terminal):
    whole = "\n".join(["", summary(result), "", "run folder: /x", *BELOW])
    assert closing_text(result, "run folder: /x", BELOW, 4) == whole  # a pipe
    terminal(200, 60)
    assert closing_text(result, "run folder: /x", BELOW, 4).startswith(f"\n{result.name}: ok")
    terminal(80, 24)
    failed = replace(result, status="failed", reason="an error")
    assert "failed (an error)" in closing_text(failed, "run folder: /x", BELOW, 4)
    assert "run folder: /x" in closing_text(failed, "run folder: /x", BELOW, 4)
