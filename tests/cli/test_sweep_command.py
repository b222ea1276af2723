"""`llmb-run sweep`: refusals and plans, and real sweeps of the no-op server, killed and resumed."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmb.cli.llmb_run import parser
from llmb.cli.sweep.plan_builder import build_plan
from llmb.loadgen.calibration import NoopServerProcess
from llmb.perfmodel.tune.pareto import knee, pareto_set

REFUSED = [
    ([], "give what to measure"),
    (["--base-url", "http://h:1", "-w", "inference_llama3.1"], "give what to measure"),
    (["--base-url", "http://h:1", "--model", "m"], "no load is given"),
    (["--base-url", "http://h:1", "--concurrency", "1", "--rate", "1"], "two kinds of load"),
    (["--base-url", "http://h:1", "--concurrency", "1..x"], "--concurrency '1..x'"),
    (["--base-url", "http://h:1", "--concurrency", "1", "--set", "mbs=1"], "--set is for -w"),
    (["--base-url", "http://h:1", "--concurrency", "1", "--precision", "5%"], "no effect without --slo"),
    (["--base-url", "http://h:1", "--rate", "1..2", "--slo", "tfft=5ms"], "did you mean ttft"),
    (["--base-url", "http://h:1", "--rate", "1..2", "--slo-tiers", "none.yaml"], "--slo-tiers: cannot read none.yaml"),
    (["--base-url", "ftp://h", "--model", "m", "--rate", "1"], "expected http://"),
    (["--base-url", "http://h:1", "--rate", "1", "--repeats", "0"], "--repeats 0"),
    (["--base-url", "http://h:1", "--rate", "1", "--point-seconds", "0"], "--point-seconds 0"),
    (["--base-url", "http://h:1", "--rate", "1", "--ramp", "0.5"], "--ramp is for --concurrency"),
    (["--base-url", "http://h:1", "--concurrency", "1", "--ramp", "-1"], "--ramp -1"),
    (["--resume", "x", "--rate", "1"], "--resume continues"),
    (["--resume", "x"], "no sweep 'x'; the newest are: none yet"),
    (["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--scale", "1", "--proxy", "--concurrency", "1"],
     "kind inference"),
    (["-w", "inference_llama3.1", "-s", "8b", "--proxy", "--dtype", "bf16", "--scale", "1", "--concurrency", "1",
      "--set", "max_num_tokens=64,128", "--set", "isl=1,2"], "one setting may vary"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_requests_are_refused_in_one_line(llmb_run, arguments, message):
    code, out, err = llmb_run("sweep", *arguments)
    assert code == 1
    assert out == ""
    assert err.startswith("ERROR: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_server_that_is_not_there_is_named(llmb_run):
    code, _, err = llmb_run("sweep", "--base-url", "http://127.0.0.1:9", "--concurrency", "1")
    assert code == 2
    assert "no server responds at http://127.0.0.1:9" in err


def documented(command):
    """Return the lines of docs/serving.md that run a command."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    return [line.strip() for line in text.splitlines() if line.strip().startswith(f"llmb-run {command}")]


@pytest.mark.parametrize("line", documented("sweep"))
def test_documented_sweeps_are_accepted(line, tmp_path, monkeypatch):
    """Up to the server, which is not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiers.yaml").write_text("interactive: {ttft: 500ms, tpot: 30ms}\n")
    options = parser().parse_args(shlex.split(line)[1:])
    options.dry_run = True
    if options.base_url:
        options.base_url, options.model = options.base_url.replace("HOST", "127.0.0.1"), "m"
    if options.workload:
        options.gpu_type = "h200"
    if not options.resume:
        assert build_plan(options).estimate().points > 0


def test_documented_knee():
    points = [(50, 100), (40, 350), (20, 400), (10, 300)]
    assert pareto_set(points) == [0, 1, 2]
    assert knee(points) == 1


ENGINE = ["-w", "inference_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1", "--proxy"]


def test_a_dry_run_says_what_it_costs_and_writes_nothing(llmb_run, tmp_path):
    code, out, _ = llmb_run("sweep", *ENGINE, "--concurrency", "1..8", "--dry-run", "-o", str(tmp_path / "s"))
    assert code == 0
    assert "concurrency: 1, 2, 4, 8" in out
    assert "4 points of about 10 s: 0:00:40" in out
    assert "32 requests" in out
    assert not (tmp_path / "s").exists()


def test_a_setting_may_vary_at_the_concurrency_of_the_recipe(llmb_run):
    out = llmb_run("sweep", *ENGINE, "--in-process", "--set", "max_num_tokens=64..256", "--dry-run")[1]
    assert "variants: max_num_tokens=64, max_num_tokens=128, max_num_tokens=256" in out
    assert "3 points" in out


@pytest.fixture(scope="module")
def server():
    with NoopServerProcess("--ttft-ms", "30", "--itl-ms", "5") as process:
        yield process


def sweep(*arguments, install, wait=True):
    environment = {**os.environ, "LLMB_INSTALL": str(install)}
    command = [sys.executable, "-m", "llmb.cli.llmb_run", "sweep", "--no-calibrate", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if not wait:
        return process
    out, err = process.communicate(timeout=120)
    result = json.loads(out.splitlines()[-1]) if out else {}
    usable = any(row["excluded"] is None for row in result.get("rows", ()))  # on a busy machine the client is late
    assert process.returncode == (0 if usable else 2), out + err
    return result


LOAD = ["--model", "noop", "--isl", "8", "--osl", "10", "--point-seconds", "0.4", "--json", "--processes", "1"]


@pytest.mark.slow
def test_a_server_is_swept_over_http(server, tmp_path):
    result = sweep("--base-url", server.url, "--concurrency", "1..4", "--gpus", "2", *LOAD, install=tmp_path)
    assert [row["load"] for row in result["rows"]] == [1, 2, 4]
    for row in result["rows"]:
        assert row["output_tokens_per_s_per_gpu"] == pytest.approx(row["output_tokens_per_s"] / 2)
        assert row["ttft_ms"]["p50"] >= 30
        assert row["tpot_ms"]["p50"] > 0
        # The server's pauses. A busy client sees the first token late, and then a TPOT below the pause.
        assert row["e2e_ms"]["p50"] >= 30 + 9 * 5
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert {path.name for path in folder.iterdir()} >= {
        "sweep.json", "points.jsonl", "result.json", "sweep.svg", "sweep.csv", "points",
    }  # fmt: skip
    assert "Pareto set" in (folder / "sweep.svg").read_text()
    assert json.loads((folder / "result.json").read_text()) == result


@pytest.mark.slow
def test_a_killed_sweep_resumes_without_measuring_a_point_again(server, tmp_path):
    process = sweep("--base-url", server.url, "--concurrency", "1..16", *LOAD, install=tmp_path, wait=False)
    points = None
    while points is None or points.read_text().count("\n") < 2:
        time.sleep(0.02)
        points = next((tmp_path / "sweeps").glob("*/points.jsonl"), None) if (tmp_path / "sweeps").exists() else None
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = points.read_text()
    measured = [json.loads(line) for line in before.splitlines() if line.endswith("}")]
    result = sweep("--resume", points.parent.name, "--json", install=tmp_path)
    assert points.read_text().startswith(before[: before.rfind("\n") + 1])
    assert [row["load"] for row in result["rows"]] == [1, 2, 4, 8, 16]
    assert result["points"] == 5
    assert result["finished"]
    assert 2 <= len(measured) < 5


@pytest.mark.slow
def test_the_highest_load_of_tiers_is_searched_in_one_sweep(server, tmp_path):
    """E2E is at least 30 + 9 x 5 ms at any concurrency of a server that computes nothing."""
    (tmp_path / "tiers.yaml").write_text("easy: {e2e.p50: 10s}\nhard: {e2e: 40ms}\n")
    arguments = ["--base-url", server.url, "--concurrency", "1..4", "--slo-tiers", str(tmp_path / "tiers.yaml")]
    result = sweep(*arguments, *LOAD, install=tmp_path)
    easy, hard = result["tiers"]
    assert hard["load"] is None
    assert hard["fails_at"] == 1
    if not any(row["excluded"] for row in result["rows"]):  # a busy machine may be late
        assert (easy["load"], easy["fails_at"]) == (4, None)


@pytest.mark.slow
def test_rates_are_swept(server, tmp_path):
    result = sweep("--base-url", server.url, "--rate", "10,20", *LOAD, install=tmp_path)
    assert [row["load"] for row in result["rows"]] == [10, 20]
    assert [row["requests"] for row in result["rows"]] == [16, 16]
