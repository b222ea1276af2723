"""Injected faults on a GPU: without kernels that differ between processes, losses repeat bit for bit."""

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from cuda_checks import NEEDS_GPU
from small_models import llama_model
from training_run import run_config

from llmb.config.faults.fault_file import with_faults
from llmb.config.faults.fault_plan import Fault, FaultInjection
from llmb.config.spec import Limits, RunConfig, Training
from llmb.events import StepDone, read_all
from llmb.launch.command import engine_command
from llmb.launch.local import run_local
from llmb.launch.restarts.restart_loop import run_with_restarts
from llmb.launch.run_folder import RunFolder
from llmb.ops.device_capabilities import FORCE
from llmb.results.derive import derive
from llmb.results.goodput.goodput_result import Goodput

pytestmark = [*NEEDS_GPU, pytest.mark.slow]
MODEL = llama_model(name="small", layers=2, hidden=512, ffn=1024, heads=4, vocab=1000)
WORK = Training(seqlen=512, mbs=1, gbs=2, ga=2, steps=8, window=(2, 8), checkpoint_every=2)
REPEATABLE = {FORCE: "gemm_trial,flash_attention_4,cudnn_attention,flash_attention"}


def run(config: RunConfig, install: Path) -> tuple[dict[int, set], Goodput | None]:
    """Run to the end; return all losses of each step, and the goodput."""

    def start(this: RunConfig, folder: RunFolder):
        return run_local(this, folder, engine_command(this, folder, sys.executable), REPEATABLE, lambda _: None, 300)

    folder, outcome = run_with_restarts(config, RunFolder.create(install, config, datetime.now()), start)
    assert outcome.status == "ok", folder.log.read_text()
    recorded = list(read_all(path for each in folder.starts for path in each.all_events()))
    losses: dict[int, set] = {}
    for event in recorded:
        if isinstance(event, StepDone):
            losses.setdefault(event.step, set()).add((event.loss, event.grad_norm))
    return losses, derive(config, recorded).goodput


def test_losses_after_faults_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    config = replace(run_config(MODEL, "bf16", WORK), limits=Limits(stall_limit_s=5))
    faults = (
        Fault(kind="checkpoint_interrupted", step=4),
        Fault(kind="hang", step=6),
        Fault(kind="disk_full", step=8),
    )
    expected, _ = run(config, tmp_path / "undisturbed")
    losses, goodput = run(with_faults(config, FaultInjection(faults=faults, source="test")), tmp_path / "faulty")
    assert losses == expected
    assert goodput is not None
    assert [fault.kind for fault in goodput.faults] == [fault.kind for fault in faults]
