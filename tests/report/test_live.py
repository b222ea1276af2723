"""The live line of training steps and of a benchmark's requests."""

import io
from dataclasses import replace

import pytest
from terminal_screen import Screen

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import ServingSample, StepDone
from llmb.report.live_progress import LiveLine
from llmb.report.terminal.clock_time import format_duration


@pytest.fixture
def config(recipes):
    actual = resolve(recipes["inference_deepseek-r1"], RunRequest(size="671b", dtype="fp8", gpus=1, proxy="small"))
    return replace(actual, workload=replace(actual.workload, num_requests=10, osl=100))


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    monkeypatch.setattr("llmb.report.status_line.REDRAW_S", 0.0)
    monkeypatch.setenv("COLUMNS", "160")


def drawn(config, *samples):
    """The last row of a wide terminal after these samples, without its bar."""
    screen = Screen(160)
    live = LiveLine(config, screen)
    for event in samples:
        live.show(event)
    live.close()
    (row,) = [row for row in screen.rows if row] or [""]
    return row.partition(" % ")[2].strip() if " % " in row[:40] else row.strip()


def sample(elapsed_s, done, tokens, **more):
    return ServingSample(elapsed_s=elapsed_s, done=done, output_tokens=tokens, requests=10, **more)


def test_rates_cache_queue_and_time_left(config):
    line = drawn(
        config,
        sample(2.0, 0, 20),
        sample(10.0, 1, 200, waiting=4, running=5, blocks_used=3, blocks=4),
        sample(15.0, 2, 700, waiting=3, running=5, blocks_used=3, blocks=4),
    )
    assert line == (
        "2/10 requests | 0:00:06 left | 100 tokens/s now, 46.67 so far | KV 75 % | 5 running, 3 waiting | "
        "0:00:15 elapsed"
    )


def test_a_warm_up_is_shown_as_such_and_does_not_enter_the_rate(config):
    before = sample(9.0, 2, 9000, warmup=True)
    assert drawn(config, before).startswith("warm-up: 2/10 requests | ")
    assert drawn(config, before, sample(2.0, 1, 50)).startswith(
        "1/10 requests | 0:00:18 left | 25 tokens/s now, 25 so far | "
    )


def test_what_is_not_known_is_not_shown(config):
    assert drawn(config, ServingSample(elapsed_s=3.0, done=0)) == "0/10 requests | 0:00:03 elapsed"
    files = replace(config, workload=replace(config.workload, dataset="requests.jsonl"))
    assert drawn(files, sample(4.0, 5, 999)).startswith("5/10 requests | 0:00:04 left | ")


def test_other_ranks_are_left_to_the_result(config):
    assert drawn(config, sample(1.0, 1, 10, rank=1)) == ""


@pytest.mark.parametrize(("gpus", "unit"), [(1, "TFLOP/s"), (2, "TFLOP/s/GPU")])
def test_training_on_several_gpus_names_what_is_of_one(recipes, gpus, unit):
    training = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=gpus, proxy="small"))
    parts = drawn(training, StepDone(step=1, seconds=0.5, tokens=1024)).split(" | ")
    assert parts[1] == format_duration(0.5 * (training.workload.steps - 1)) + " left"
    assert parts[2] == "2,048 tokens/s"
    assert parts[3].endswith(f" {unit}")


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_redrawn_line_leaves_one_row_however_narrow_the_terminal(config, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen(columns)
    live = LiveLine(config, screen)
    for second in range(1, 30):
        live.show(sample(second, second // 3, 30 * second, waiting=4, running=5, blocks_used=3, blocks=4))
        assert len(screen.rows) == 1
        assert len(screen.rows[0]) < columns
    live.close()
    assert [bool(row) for row in screen.rows] == [True, False]
    assert "9/10" in screen.rows[0]


def test_a_terminal_made_narrower_keeps_no_stale_row(config, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    screen = Screen(120)
    live = LiveLine(config, screen)
    live.show(sample(3, 1, 90, waiting=4, running=5, blocks_used=3, blocks=4))
    monkeypatch.setenv("COLUMNS", "50")
    screen.resize(50)
    live.show(sample(4, 2, 120, waiting=4, running=5, blocks_used=3, blocks=4))
    assert len(screen.rows) == 1
    assert screen.rows[0].startswith("2/10 requests")


def test_the_bar_shows_how_much_is_done(config):
    screen = Screen(160)
    LiveLine(config, screen).show(sample(5, 5, 500))
    assert screen.rows[0].startswith("\u2501" * 10)
    assert "  50 % 5/10 requests | 0:00:05 left" in screen.rows[0]


def test_a_file_gets_whole_lines_without_a_bar(config):
    out = io.StringIO()
    live = LiveLine(config, out)
    live.show(sample(5, 5, 500))
    live.show(sample(6, 6, 600))  # too soon for a line of its own
    live.close()
    assert out.getvalue() == "5/10 requests | 0:00:05 left | 100 tokens/s now, 100 so far | 0:00:05 elapsed\n"
