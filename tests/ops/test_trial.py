"""Which way is fastest, by a clock that the ways themselves advance; on a real GPU: tests/gpu/test_multiply_gpu.py."""

from collections import defaultdict

import pytest
import torch

from llmb.ops.gemm import algorithm_trial
from llmb.ops.gemm.algorithm_trial import ALONE_S, HOPELESS, MEETINGS, SETTLING, alone, fastest, in_turn


class Device:
    """Work takes as long as it says, behind what was asked for before."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def work(self, *spent: float):
        """Takes its turns to last so long, the last one from then on."""
        left = list(spent)

        def way() -> bool:
            self.calls += 1
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return True

        return way

    def refused(self) -> bool:
        """Work that is not done, which takes no time."""
        self.calls += 1
        return False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = made.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(algorithm_trial, "_thirst", defaultdict(list))
    monkeypatch.setattr(algorithm_trial, "_loaded", set())
    for name in ("TRIED_S", "RESTED_S"):
        monkeypatch.setattr(algorithm_trial, name, 0.0)
    return made


def test_each_is_timed_by_itself(device: Device) -> None:
    assert in_turn([device.work(3.0), device.work(1.0), device.work(2.0)]) == [3.0, 1.0, 2.0]


def test_by_itself_the_first_times_do_not_count(device: Device) -> None:
    count = round(1000 * ALONE_S / 2.0)
    assert alone(device.work(*[9.0] * round(count * SETTLING), 2.0), expected=2.0) == pytest.approx(2.0)
    assert device.calls == count
    assert alone(device.work(500.0), expected=500.0) == 500.0  # longer than all that time


def test_the_fastest_is_found(device: Device) -> None:
    assert fastest([device.work(3.0), device.work(1.0), device.work(1.1)], "abc") == 1


def test_what_cannot_is_not_the_fastest(device: Device) -> None:
    assert fastest([device.refused, device.work(3.0), device.work(2.0)], "abc") == 2
    assert fastest([device.refused, device.work(1.0)], "ab") == 1
    with pytest.raises(RuntimeError, match="none of 1 kernels takes"):
        fastest([device.refused], "a")


def test_the_first_launch_of_a_kernel_does_not_count(device: Device) -> None:
    assert fastest([device.work(9.0, 1.0), device.work(1.2)], "ab") == 0


def test_a_kernel_that_is_fast_in_turns_but_thirsty_is_not_taken(device: Device) -> None:
    """Two of as many cycles, of which one slows the chip down as soon as it has it to itself."""
    thirsty, frugal = device.work(1.0, 1.0, 1.0, 1.1), device.work(1.02)
    assert fastest([thirsty, frugal], ["thirsty", "frugal"]) == 1
    # What is known of it holds for other sizes, and is not measured again once it has been met often enough.
    algorithm_trial._thirst["thirsty"] *= MEETINGS
    algorithm_trial._thirst["frugal"] *= MEETINGS
    device.calls = 0
    assert fastest([device.work(2.0), device.work(2.04)], ["thirsty", "frugal"]) == 1
    assert device.calls == 3
    assert fastest([device.work(2.0), device.work(2.5)], ["thirsty", "frugal"]) == 0


def test_one_bad_meeting_is_forgotten(device: Device) -> None:
    algorithm_trial._loaded |= {"one", "other"}
    for slow in (1.2, 1.0, 1.0):
        fastest([device.work(1.0, 1.0, slow), device.work(1.05)], ["one", "other"])
    assert algorithm_trial._thirst["one"] == pytest.approx([1.2, 1.0, 1.0])
    assert fastest([device.work(1.0), device.work(1.05)], ["one", "other"]) == 0


def test_a_hopeless_way_is_tried_once(device: Device) -> None:
    algorithm_trial._loaded |= {"one", "hopeless"}
    assert fastest([device.work(1.0), device.work(2 * HOPELESS)], ["one", "hopeless"]) == 0
    assert device.calls == 3
    assert not algorithm_trial._thirst
