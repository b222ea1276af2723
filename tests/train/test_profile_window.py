"""Under Nsight Systems a rank opens a window around the profiled steps, and torch's profiler stays off.

Calls to the CUDA driver are recorded, not executed: there is no GPU.
"""

from pathlib import Path

import pytest
import torch

from llmb.config.spec import Profile
from llmb.events import TimeSpent
from llmb.runtime.rank_info import RankInfo
from llmb.serve.benchmark.step_trace import StepTrace


@pytest.fixture
def driver(monkeypatch) -> list[str]:
    """Record profiler calls to the CUDA driver, in order."""
    calls: list[str] = []
    monkeypatch.setenv("LLMB_NSIGHT", "1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    return calls


def test_run_opens_window_for_profiled_steps(trained, driver) -> None:
    done = trained(steps=4, profile=True, profile_start=2, profile_stop=4, gpu_metrics=True)
    assert done.ended().status == "ok"
    assert driver == ["wait", "start", "wait", "stop"]
    assert not (done.folder / "profile").exists()
    assert not [event for event in done.events() if isinstance(event, TimeSpent)]


@pytest.mark.parametrize("under_nsight", [True, False])
def test_unprofiled_rank_opens_no_window_and_writes_no_trace(trained, driver, monkeypatch, under_nsight: bool) -> None:
    monkeypatch.setenv("LLMB_NSIGHT", str(int(under_nsight)))
    done = trained(steps=3, profile=True, profile_start=1, profile_stop=3, profile_ranks=(1,))
    assert done.ended().status == "ok"
    assert driver == []
    assert not (done.folder / "profile").exists()


def test_serving_that_ends_early_closes_the_window(driver, tmp_path: Path, capsys) -> None:
    rank_info = RankInfo(rank=0, world_size=1, device=torch.device("cpu"))
    trace = StepTrace(tmp_path, Profile(profile=True, profile_start=1, profile_stop=9), rank_info)
    for step in range(3):
        trace.before(step)
        trace.after(step)
    trace.close()
    assert driver == ["wait", "start", "wait", "stop"]
    assert not trace.path.exists()
    assert capsys.readouterr().out == ""
