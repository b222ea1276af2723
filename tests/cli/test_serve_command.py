"""`llmb-run serve`: what it refuses before anything starts, and a whole run of a small proxy."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

SERVE = ["serve", "-w", "inference_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1", "--proxy"]
SHAPE = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
TINY = [f"--set=model.{field}={value}" for field, value in SHAPE.items()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "no workload is named"),
        (["serve", "-w", "inference_llama3.1", "-s", "8b", "--proxy"], "a server has one configuration"),
        ([*SERVE, "-w", "pretrain_llama3.1", "--dtype", "fp32"], "kind inference"),
        ([*SERVE[:-1], "--gpu-type", "h200"], "no GPU"),
        ([*SERVE, "--port", "99999"], "--port 99999"),
        ([*SERVE, "--api-key-env", "NO_SUCH_VARIABLE"], "--api-key-env NO_SUCH_VARIABLE"),
        ([*SERVE, "--set", "weights=/no/such/folder"], "/no/such/folder"),
    ],
)  # fmt: skip
def test_wrong_requests_are_one_line(llmb_run, arguments, words, tmp_path):
    code, _, err = llmb_run(*arguments)
    assert code == 1
    assert words in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.glob("llmb/workloads/*/experiments/*/*/*/config.json"))


def test_help_has_examples(llmb_run):
    code, out, _ = llmb_run("serve", "--help")
    assert code == 0
    for words in (
        "--served-model-name",
        "--max-queue",
        "--no-prefix-cache",
        "llmb-run serve -w",
        "/v1/chat/completions",
    ):
        assert words in out


@pytest.mark.slow
def test_a_proxy_is_served_until_a_signal(tmp_path):
    command = [sys.executable, "-m", "llmb.cli.llmb_run", *SERVE, *TINY, "--port", "0", "--api-key-env", "MY_KEY"]
    environment = os.environ | {"MY_KEY": "hunter2-hunter2", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if match := re.search(r"^serving Llama-3.1-8B at (http://127.0.0.1:\d+/v1) \(Ctrl-C stops\)$", line.rstrip()):
            break
    assert match, "".join(lines)
    request = urllib.request.Request(
        f"{match[1]}/completions",
        data=json.dumps({"prompt": "Hello", "max_tokens": 4}).encode(),
        headers={"Authorization": "Bearer hunter2-hunter2"},
    )
    reply = json.load(urllib.request.urlopen(request, timeout=60))
    assert reply["usage"]["completion_tokens"] <= 4
    process.send_signal(signal.SIGINT)
    output = "".join(lines) + process.stdout.read()
    assert process.wait(30) == 0
    (folder,) = (path.parent for path in tmp_path.glob("llmb/workloads/*/experiments/*/*/*/config.json"))
    config = json.loads((folder / "config.json").read_text())
    assert config["workload"]["prefix_cache"] is True
    assert "prefix cache on" in output
    assert '"status": "ok"' in (folder / "events.rank0.jsonl").read_text().splitlines()[-1]
    assert match[0] in next(folder.glob("*.out")).read_text()
    for path in folder.iterdir():
        assert "hunter2" not in path.read_text(), path
