"""`llmb-run load` and `submit --engine openai` against the no-op server: run folder, result, job, refusals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from llmb.loadgen.calibration import NoopServerProcess
from llmb.loadgen.worker_pool import python_environment


@pytest.fixture(scope="module")
def server():
    with NoopServerProcess("--ttft-ms", "3", "--itl-ms", "1") as process:
        yield process.url


SMALL = ["--model", "noop", "--isl", "16", "--osl", "4", "--no-calibrate"]


def test_a_load_is_a_run_like_any_other(llmb_run, server, tmp_path):
    options = ["-c", "4", "-n", "20", "--warmup", "2", "--slo", "ttft=1s,tpot=100ms", "--gpus", "1"]
    code, out, err = llmb_run("load", "--base-url", f"{server}/v1", *SMALL, *options, "--gpu-cost-per-hour", "2")
    assert code == 0, err
    for figure in ("goodput", "within the SLO", "cost, output", "TTFT", "client: 1 process"):
        assert figure in out, figure
    (folder,) = (tmp_path / "llmb" / "workloads" / "load" / "experiments").glob("*/*/*")
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["engine"], result["requests"], result["size"]) == ("ok", "openai", 20, "noop")
    assert result["dtype"] is None
    config = json.loads((folder / "config.json").read_text())
    assert config["model"] is None
    assert config["workload"]["base_url"] == server
    assert (folder / "job.sh").exists()
    assert list(folder.glob("llmb-config_L1.yaml"))
    code, out, _ = llmb_run("jobs")
    assert code == 0
    assert "load" in out
    assert "None" not in out
    assert llmb_run("jobs", "show", "L1")[0] == 0
    assert llmb_run("compare", "L1", "L1")[0] == 0
    code, out, err = llmb_run("explain", "L1")  # the model behind a server has but a name
    command = out.partition("describe it: llmb-run ")[2].split("\n")[0].split()
    assert command[:7] == ["explain", "--model", "MODEL", "--gpu-type", "GPU", "--dtype", "DTYPE"]
    described = ["explain", "--model", "llama3.1-8b", "--gpu-type", "h200", "--dtype", "bf16", *command[7:]]
    assert "IMPOSSIBLE as described" in llmb_run(*described)[1]
    code, out, err = llmb_run("jobs", "rebuild")
    assert code == 0, err
    assert llmb_run("jobs", "show", "L1")[0] == 0


@pytest.mark.slow
def test_calibration_and_json(llmb_run, server):
    options = ["--model", "noop", "--isl", "16", "--osl", "4", "--rate", "100", "--duration", "0.4", "--json"]
    code, out, err = llmb_run("load", "--base-url", server, *options)
    assert code == 0, err
    client = json.loads(out.splitlines()[-1])["client"]
    assert 0 < client["request_cost_us"] < 5000
    assert 0 < client["token_cost_us"] < 500
    assert client["idle_lateness_p50_ms"] >= 0


def test_repeats_have_intervals(llmb_run, server):
    code, out, err = llmb_run("load", "--base-url", server, *SMALL, "-c", "4", "-n", "12", "-r", "2")
    assert code == 0, err
    assert "over 2 of 2 runs" in out
    code, out, err = llmb_run("compare", "L1,L2", "L2,L1", "--json")  # another seed makes no other configuration
    assert code == 0, err
    assert list(json.loads(out)["differing"]) == ["workload.seed"]  # a prefix cache has seen neither's prompts


def test_the_time_limit_follows_the_arrivals(llmb_run):
    rate = ["--rate", "2", "-n", "7200", "--dry-run", "--json"]
    code, out, _ = llmb_run("load", "--base-url", "http://h", *SMALL, *rate)
    assert (code, json.loads(out)["limits"]["time_limit_s"]) == (0, 2 * 3600 + 600)


def test_submit_sends_the_requests_of_a_recipe(llmb_run, server, tmp_path):
    run = ["submit", "-w", "inference_llama3.1", "-s", "8b", "--dtype", "fp8", "--scale", "1", "--gpu-type", "h200"]
    changes = ["served_model=noop", "num_requests=12", "concurrency=4", "max_batch_size=4", "isl=16", "osl=4"]
    settings = [word for change in changes for word in ("--set", change)]
    code, _, err = llmb_run(*run, "--engine", "openai", "--base-url", server, *settings)
    assert code == 0, err
    (folder,) = (tmp_path / "llmb" / "workloads" / "inference_llama3.1" / "experiments").glob("*/*/*")
    assert any("= PERFORMANCE OVERVIEW" in log.read_text() for log in folder.glob("*.out"))
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["engine"], result["requests"]) == ("ok", "openai", 12)
    assert result["input_tokens"] == 12 * 16
    code, _, err = llmb_run(*run, "--engine", "openai")
    assert (code, "needs a server; give --base-url URL" in err) == (1, True)
    code, _, err = llmb_run(*run, "--base-url", server)
    assert (code, "add --engine openai" in err) == (1, True)
    code, _, err = llmb_run(*run, "--set", "burstiness=2")
    assert (code, "burstiness has no effect without a rate" in err) == (1, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "ftp://h", "-c", "1", "-n", "1"], "expected http://HOST[:PORT]"),
        (["--base-url", "http://u:secret@h", "-c", "1", "-n", "1"], "leave user:password@ out"),
        (["--base-url", "http://h:99999", "-c", "1", "-n", "1"], "Port out of range"),
        (["--base-url", "http://h", "-c", "1"], "the load has no end"),
        (["--base-url", "http://h", "-n", "1", "--burstiness", "2"], "give --rate"),
        (["--base-url", "http://h", "-n", "1", "--rate", "-1"], "rate=-1: expected more than 0"),
        (["--base-url", "http://h", "-n", "0"], "num_requests=0: expected 1 to"),
        (["--base-url", "http://h", "-n", "1", "--slo", "speed=1"], "unknown limit in the SLO: 'speed'"),
        (["--base-url", "http://h", "-n", "1", "--slo", "ttft=fast"], "expected a time above 0"),
        (["--base-url", "http://h", "-n", "1", "--dataset", "/none"], "cannot read the dataset /none"),
        (["--base-url", "http://h", "-n", "1", "--api-key-env", "NO_KEY"], "NO_KEY is not set"),
        (["--base-url", "http://h", "-n", "1", "--prompts", "ids"], "token ids need a vocabulary"),
        (["--base-url", "http://h", "-n", "1", "--gpu-cost-per-hour", "2"], "needs --gpus"),
        (["--base-url", "http://h", "-n", "1", "--trace", "x", "--rate", "1"], "--trace has times of its own"),
        (["--base-url", "http://h", "-n", "1", "--lengths", "normal", "--isl-spread", "2000"], "must be less than isl"),
        (["--base-url", "http://h", "-n", "1", "--think", "1"], "think_s has no effect on one turn"),
        (["--base-url", "http://h", "-n", "1", "--timeout", "0"], "--timeout 0: expected 1 or more"),
        (["--base-url", "http://h", "-n", "1", "--repeats", "0"], "--repeats 0: expected 1 or more"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(llmb_run, tmp_path, options, message):
    code, out, err = llmb_run("load", "--model", "m", *options)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1
    assert "secret" not in out + err
    assert not (tmp_path / "llmb" / "workloads").exists()


def test_a_server_that_is_not_there_is_a_failed_run(llmb_run):
    code, out, _ = llmb_run("load", "--base-url", "http://127.0.0.1:1", *SMALL, "-n", "2", "--ready-timeout", "0.1")
    assert code == 2
    assert "no server is ready at http://127.0.0.1:1" in out
    wait = ["-n", "2", "--ready-timeout", "0.1", "-q"]
    code, out, _ = llmb_run("load", "--base-url", "http://127.0.0.1:1", *SMALL, *wait)
    assert code == 2
    assert out.startswith("L2 failed (")
    assert "no server is ready at http://127.0.0.1:1 after 0.1 s" in out
    assert len(out.splitlines()) == 1


def test_dry_run_prints_the_configuration(llmb_run, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    options = ["-n", "5", "--rate", "3", "--dry-run", "--api-key-env", "SOME_KEY"]
    code, out, _ = llmb_run("load", "--base-url", "https://h/v1/", "--model", "org/m:1", *options)
    config = json.loads(out)
    assert code == 0
    assert config["name"] == "load_org-m-1_isl1000_osl1000_poisson3_n5"
    assert config["workload"]["base_url"] == "https://h"
    assert "sk-very-secret" not in out


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(server, tmp_path):
    command = [sys.executable, "-m", "llmb.cli.llmb_run", "load", "--base-url", server, *SMALL, "-c", "2"]
    environment = {**python_environment(), "LLMB_INSTALL": str(tmp_path / "llmb")}
    process = subprocess.Popen(
        [*command, "--duration", "60"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 30
    pattern = "llmb/workloads/load/experiments/*/*/*/events.rank0.jsonl"
    while time.monotonic() < deadline and not any("RequestDone" in p.read_text() for p in tmp_path.glob(pattern)):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    (result_file,) = tmp_path.glob("llmb/workloads/load/experiments/*/*/*/result.json")
    result = json.loads(result_file.read_text())
    assert result["status"] == "incomplete", out
    assert result["requests"] > 0
    assert process.returncode == 2
