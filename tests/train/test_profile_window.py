"""Under Nsight Systems a rank opens the window and closes it around the asked steps, and torch's profiler stays off.

The calls of the CUDA driver are noted instead of made: there is no GPU here.
"""

from pathlib import Path

import pytest
import torch

from llmb.config.spec import Profile
from llmb.events import TimeSpent
from llmb.runtime.nsight_window import NsightWindow
from llmb.runtime.rank_info import Place
from llmb.serve.benchmark.step_trace import Trace


@pytest.fixture
def driver(monkeypatch) -> list[str]:
    """What the driver is told, in order."""
    told: list[str] = []
    monkeypatch.setenv("LLMB_NSIGHT", "1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: told.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: told.append("stop"))
    return told


def test_a_run_opens_it_for_the_asked_steps(trained, driver) -> None:
    done = trained(steps=4, profile=True, profile_start=2, profile_stop=4, gpu_metrics=True)
    assert done.ended().status == "ok"
    assert driver == ["wait", "start", "wait", "stop"]
    assert not (done.folder / "profile").exists()
    assert not [event for event in done.events() if isinstance(event, TimeSpent)]


def test_a_rank_that_is_not_asked_opens_nothing(trained, driver) -> None:
    assert trained(steps=3, profile=True, profile_start=1, profile_stop=3, profile_ranks=(1,)).ended().status == "ok"
    assert driver == []


def test_a_rank_that_is_not_asked_traces_nothing(trained) -> None:
    done = trained(steps=3, profile=True, profile_start=1, profile_stop=3, profile_ranks=(1,))
    assert done.ended().status == "ok"
    assert not (done.folder / "profile").exists()


def test_it_is_open_during_its_steps_only(driver) -> None:
    window = NsightWindow(range(2, 4))
    seen = []
    for step in range(1, 6):
        window.before(step)
        seen.append(window.is_open)
        window.after(step)
    assert seen == [False, True, True, False, False]
    window.close()
    assert driver == ["wait", "start", "wait", "stop"]


def test_serving_that_ends_within_the_window_closes_it(driver, tmp_path: Path, capsys) -> None:
    place = Place(rank=0, world_size=1, device=torch.device("cpu"))
    trace = Trace(tmp_path, Profile(profile=True, profile_start=1, profile_stop=9), place)
    for step in range(3):
        trace.before(step)
        trace.after(step)
    trace.close()
    assert driver == ["wait", "start", "wait", "stop"]
    assert not trace.path.exists()
    assert capsys.readouterr().out == ""
