"""Status, reason and exit code of every way a run can end."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from small_models import SMALL_MODELS

from llmb.config.spec import OutOfCore
from llmb.train import loop

PIPELINE = {"model": SMALL_MODELS["llama"], "pp": 2, "mbs": 2, "gbs": 4, "ga": 2}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_non_finite_loss_is_diverged(trained, capsys, dtype: str) -> None:
    done = trained(lr=1e30, dtype=dtype)
    assert done.code == 2
    ended = done.ended()
    assert ended.status == "diverged"
    last = done.steps()[-1]
    assert last.step < 4
    assert re.match(rf"(loss|grad norm) became (nan|inf) at step {last.step}: (nan|inf) first in the ", ended.reason)
    assert None in (last.loss, last.grad_norm)
    assert "NaN" not in (done.folder / "events.rank0.jsonl").read_text()
    out, err = capsys.readouterr()
    assert "number of nan iterations:   1 |" in out
    assert err == f"llmb.train: {ended.reason}\n"


@pytest.mark.slow
def test_sigterm_during_a_long_step(start) -> None:
    outcome = start(hidden=2048, ffn=16384, heads=16, kv_heads=16, head_dim=128, seqlen=4096, layers=1)
    outcome.wait_until(outcome.events)
    time.sleep(2)  # during the first step, which takes a core more than half a minute
    outcome.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = outcome.process.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert outcome.process.returncode == 128 + signal.SIGTERM
    assert outcome.ended().status == "incomplete"
    assert outcome.ended().reason == "interrupted by SIGTERM after step 0"
    assert err == "llmb.train: interrupted by SIGTERM after step 0\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGUSR1, marks=pytest.mark.nightly), signal.SIGKILL])
def test_interrupted_run_keeps_its_steps(start, number: signal.Signals) -> None:
    """No line of the events is torn; a killed run has no end."""
    outcome = start(steps=10**6)
    outcome.wait_until(lambda: len(outcome.steps()) >= 2)
    outcome.process.send_signal(number)
    outcome.process.communicate(timeout=30)
    steps = outcome.steps()
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    if number == signal.SIGKILL:
        assert len(outcome.events()) == 1 + len(steps)
    else:
        assert outcome.process.returncode == 128 + number
        reason = f"interrupted by SIGUSR1 after step {steps[-1].step}"
        assert (outcome.ended().status, outcome.ended().reason) == ("timeout", reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "nvfp4"}, "the native training engine does not run dtype=nvfp4; it runs dtype fp32, bf16, fp8"),
        ({"profile": True, "gpu_metrics": True}, "the native engine does not run gpu_metrics=true (needs Nsight"),
        ({"cuda_graphs": True}, "cuda_graphs=true needs a CUDA GPU; machine.gpu=cpu has none"),
        ({"cuda_graphs": True, "offload_layers": 1}, "does not run cuda_graphs=true with offload_layers=1; it"),
        ({"cuda_graphs": True, "model": SMALL_MODELS["grok1"]}, "cuda_graphs=true with experts in fp32; it runs"),
        ({"cuda_graphs": True, **PIPELINE}, "does not run cuda_graphs=true with pp=2; it runs"),
        ({"gbs": 8}, "gbs=8 is not mbs * ga * dp = 4 * 1 * 1 = 4"),
        ({"recompute_layers": 3}, "recompute_layers=3: the model has 2 layers, so 0 to 2"),
        ({"steps": 0}, "workload.steps=0: must be at least 1"),
        ({"tp": 4}, "tp 4 does not divide the 2 key and value heads of tiny; tp could be 1, 2"),
        ({"tp": 2, "vocab": 127}, "tp 2 does not divide the 127 entries of the vocabulary"),
        ({"tp": 2, "seqlen": 31}, "seqlen 31 is not a multiple of tp 2"),
        ({"cp": 2, "model": SMALL_MODELS["nemotron_h"]}, "a Mamba layer cannot split its sequence"),
        ({"pp": 2}, "pp 2 needs at least 2 micro-batches, a step has 1"),
        (PIPELINE | {"ga": 5, "gbs": 10, "vp": 2}, "vp 2 takes micro-batches in rounds of pp 2, a step has 5"),
        (PIPELINE | {"vp": 3}, "pp 2 x vp 3 needs more layers than the 4"),
        (PIPELINE | {"recompute_layers": 3}, "recompute_layers=3: a rank of the pipeline has 2 layers, so 0 to 2"),
        ({"vp": 2}, "vp 2 has no effect without pipeline parallelism"),
        ({"ep": 2}, "ep 2 and etp 1 have no effect: tiny has no experts"),
        ({"dp": 2, "gbs": 8}, "needs 2 ranks but 1 started; start it with: torchrun --nproc-per-node 2"),
        ({"engine": "trtllm"}, "engine=trtllm"),
        ({"workload": OutOfCore(seqlen=8, host_gib=1, device_gib=1)}, "python -m llmb.train runs kind training"),
        ({"lr_warmup_steps": -1}, "lr_warmup_steps=-1: must be at least 0"),
        ({"lr_decay_steps": 10}, "lr_decay_steps=10: must be more than lr_warmup_steps=10"),
        ({"architecture": "grok1"}, "model tiny: a grok1 needs the field experts"),
    ],
)
def test_invalid_settings_are_refused(trained, capsys, changes: dict, reason: str) -> None:
    """In a rank, as at the desk (tests/config/test_native_support.py)."""
    refusal = trained(**changes).refusal()
    assert reason in refusal
    assert capsys.readouterr() == ("", f"llmb.train: {refusal}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_run_needs_a_gpu(trained) -> None:
    assert "machine.gpu=h200 needs a CUDA device" in trained(gpu="h200").ended().reason


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_gives_advice(trained, monkeypatch, error: Exception) -> None:
    def fail(*_):
        raise error

    monkeypatch.setattr(loop, "train_step", fail)
    done = trained(recompute_layers=1, layers=4)
    assert done.code == 2
    assert done.ended().status == "oom"
    reason = done.ended().reason
    assert reason.startswith("out of memory at a peak of ")
    assert ": lower mbs from 4 to 2 (frees about " in reason
    assert ", or raise recompute_layers from 1 to 2 of 4 (frees about " in reason
    everything_tried = trained(recompute_layers=2, mbs=1, ga=4).ended().reason
    assert "mbs" not in everything_tried
    assert ": lower seqlen from 32 to 16 (frees about " in everything_tried


def test_unexpected_error_prints_traceback(trained, monkeypatch, capsys) -> None:
    monkeypatch.setattr(loop, "train_step", lambda *_: 1 / 0)
    done = trained()
    assert done.code == 2
    assert (done.ended().status, done.ended().reason) == ("failed", "ZeroDivisionError: division by zero")
    assert "Traceback" in capsys.readouterr().err


def test_invalid_config_is_one_line_without_torch(folder_of) -> None:
    folder = folder_of()
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"seqlen"', '"seqlem"'))
    command = [sys.executable, "-X", "importtime", "-m", "llmb.train"]
    result = subprocess.run([*command, config], capture_output=True, text=True, env=os.environ)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert result.returncode == 1
    assert len(lines) == 1
    assert "unknown field in config.json.workload: 'seqlem' (did you mean seqlen?)" in lines[0]
    assert "torch" not in result.stderr
    missing = subprocess.run([*command, folder / "none" / "config.json"], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "cannot read" in missing.stderr.splitlines()[-1]
