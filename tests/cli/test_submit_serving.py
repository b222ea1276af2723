"""`llmb-run submit` of a serving run: the report on the screen and in the log, repeats, failures.

The engine is a script that writes the events of a real one; everything around it is real.
"""

import json
import sys
from pathlib import Path

import pytest

SERVE = ["submit", "-w", "inference_deepseek-r1", "-s", "671b", "--dtype", "fp8", "--scale", "1", "--proxy"]
LOAD = ["--set", "num_requests=4", "--set", "concurrency=2", "--set", "max_batch_size=2"]
ENGINE = """
import os, sys
from pathlib import Path
from llmb.events import RequestDone, RunEnded, RunStarted, ServingSample, append

missing = int(sys.argv[1])
path = Path("events.rank0.jsonl")
append(path, RunStarted(time=0.0, pid=os.getpid()))
append(path, ServingSample(elapsed_s=1.0, done=1, requests=4, output_tokens=5))
slower = len(list(Path("../..").resolve().iterdir())) / 10  # each run of the experiment a little
for number in range(4):
    first = (number // 2) * 5 + 1.0
    times = tuple(first + i * (1 + slower) for i in range(5 - missing))
    append(path, RequestDone(request=number, arrival=first - 1, first_token=first, token_times=times, end=times[-1],
                             input_tokens=10, output_tokens=len(times), requested_tokens=5))
append(path, RunEnded(time=1.0, status="ok"))
"""


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Return a function that replaces the engine by the script; `missing`: tokens that each output lacks."""
    from llmb.launch import command

    script = tmp_path / "engine.py"
    script.write_text(ENGINE)

    def install(missing=0):
        monkeypatch.setattr(command, "engine_command", lambda *_: [sys.executable, str(script), str(missing)])

    return install


def logs(tmp_path):
    return sorted((tmp_path / "llmb").glob("workloads/*/experiments/*/*/*/*.out"))


def test_one_screen_is_printed_and_the_whole_report_ends_the_log(llmb_run, engine, tmp_path, monkeypatch):
    engine()
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = llmb_run(*SERVE, *LOAD)
    assert code == 0, err
    assert "= PERFORMANCE OVERVIEW" not in out
    assert len(out.splitlines()) < 50
    assert out.index("output, whole run") < out.index("run folder: /", 200)
    assert "in the layout of trtllm-bench: llmb-run jobs log L1\n" in out
    (log,) = logs(tmp_path)
    assert "= PERFORMANCE OVERVIEW" in log.read_text()
    code, out, _ = llmb_run("jobs", "log", "L1")
    assert (code, out) == (0, log.read_text())
    code, out, _ = llmb_run("read", str(log), "--json")
    read, stored = json.loads(out), json.loads((log.parent / "result.json").read_text())
    assert code == 0
    for figure in ("requests", "output_tokens", "request_throughput", "output_tokens_per_s", "ttft_ms", "e2e_ms"):
        expected = stored[figure]
        if isinstance(expected, dict):  # p25 and p75 are not printed
            expected = {name: value for name, value in expected.items() if name in read[figure]}
            assert {"mean", "p50", "p99"} <= expected.keys()
        assert read[figure] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_repeats_end_with_an_interval_and_json_stays_last(llmb_run, engine, tmp_path):
    engine()
    code, out, err = llmb_run(*SERVE, *LOAD, "-r", "3", "--json")
    assert code == 0, err
    results = [json.loads(line) for line in out.splitlines()]
    assert len(results) == len(logs(tmp_path)) == 3
    assert "over 3 of 3 runs" in err
    assert "95 % interval" in err
    assert "output tokens/s, whole run" in err
    assert all("= PERFORMANCE OVERVIEW" in log.read_text() for log in logs(tmp_path))
    _, out, _ = llmb_run(*SERVE, *LOAD)
    assert "interval" not in out  # of one run


def test_quiet_prints_one_line_for_each_run(llmb_run, engine, tmp_path):
    engine()
    code, out, err = llmb_run(*SERVE, *LOAD, "--quiet", "-r", "2")
    assert (code, err) == (0, "")
    assert [line.partition(": ")[0] for line in out.splitlines()] == ["L1 ok", "L2 ok"]
    assert Path(out.splitlines()[0].partition(": ")[2], "report.html").exists()
    code, out, err = llmb_run(*SERVE, *LOAD, "-q", "--json")
    assert (code, err, json.loads(out)["status"]) == (0, "", "ok")


def test_wrong_output_lengths_fail_the_run_without_a_report(llmb_run, engine, tmp_path):
    engine(missing=2)
    code, out, err = llmb_run(*SERVE, *LOAD)
    assert code == 2
    assert "4 of 4 outputs do not have the requested length: request 0 has 3 of 5 tokens" in out
    assert "1 of 1 runs failed" in err
    assert "PERFORMANCE OVERVIEW" not in out + logs(tmp_path)[0].read_text()
