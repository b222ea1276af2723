"""`llmb-run serve`: what it refuses before anything starts, and a whole run of a small proxy."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_models import llama_model
from tokenizers import Tokenizer

from llmb.models.architectures import build_model
from llmb.models.hf_weights import save_weights

SERVE = ["serve", "-w", "inference_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1", "--proxy"]
SHAPE = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
TINY = [f"--set=model.{field}={value}" for field, value in SHAPE.items()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "no workload is named"),
        (["serve", "--model", "folder", "-w", "inference_llama3.1"], "leave out -w"),
        (["serve", "--model", "/no/such/folder"], "/no/such/folder"),
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


@contextmanager
def server(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen, list[str], str]]:
    """Start `llmb-run`, and yield the process, its lines up to the address, and the address; then stop it."""
    command = [sys.executable, "-m", "llmb.cli.llmb_run", *arguments, "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, match = [], None
    try:
        while match is None and (line := process.stdout.readline()):
            lines.append(line)
            match = re.search(r"^serving \S+ at (http://127.0.0.1:\d+/v1) \(Ctrl-C stops\)$", line.rstrip())
        assert match, "".join(lines)
        yield process, lines, match[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def post(address: str, path: str, body: dict, key: str = "") -> dict:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{address}/{path}", data=json.dumps(body).encode(), headers=headers)
    return json.load(urllib.request.urlopen(request, timeout=60))


@pytest.mark.slow
def test_a_proxy_is_served_until_a_signal(tmp_path):
    key = "hunter2-hunter2"
    with server(*SERVE, *TINY, "--api-key-env", "MY_KEY", MY_KEY=key) as (process, lines, address):
        assert lines[-1].startswith("serving Llama-3.1-8B at ")
        assert "a proxy, not the model: " in "".join(lines)
        reply = post(address, "completions", {"prompt": "Hello", "max_tokens": 4}, key)
        assert reply["usage"]["completion_tokens"] <= 4
    output = "".join(lines) + process.stdout.read()
    assert process.returncode == 0
    (folder,) = (path.parent for path in tmp_path.glob("llmb/workloads/*/experiments/*/*/*/config.json"))
    config = json.loads((folder / "config.json").read_text())
    assert config["workload"]["prefix_cache"] is True
    assert "prefix cache on" in output
    assert '"status": "ok"' in (folder / "events.rank0.jsonl").read_text().splitlines()[-1]
    assert lines[-1].rstrip() in next(folder.glob("*.out")).read_text()
    for path in folder.iterdir():
        assert "hunter2" not in path.read_text(), path


@pytest.mark.slow
def test_a_model_folder_is_served_with_its_weights_and_tokenizer(tmp_path):
    folder = tmp_path / "my-model"
    network = build_model(llama_model(vocab=4096))
    network.init_weights(seed=3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(8.0)  # so that no two tokens are nearly as likely
    save_weights(network, folder, torch.float32)
    tokenizer = Path(__file__).parents[2] / "data" / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    prompt = [17, 401, 5, 2222]
    with server("serve", "--model", str(folder)) as (process, lines, address):
        reply = post(address, "completions", {"prompt": prompt, "max_tokens": 6, "temperature": 0})
        listed = json.load(urllib.request.urlopen(f"{address}/models", timeout=60))["data"][0]
    assert process.returncode == 0
    expected = list(prompt)
    for _ in range(6):
        expected.append(int(network(torch.tensor([expected]))[0, -1].argmax()))
    assert (listed["id"], listed["tokenizer"]) == ("my-model", "tokenizer.json")
    assert reply["choices"][0]["text"] == Tokenizer.from_file(str(tokenizer)).decode(expected[len(prompt) :])
    assert not any("proxy" in line for line in lines)
