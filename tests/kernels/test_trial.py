"""Which way is fastest, by a clock that the ways themselves advance; on a real GPU: tests/gpu/test_multiply_gpu.py."""

import pytest
import torch

from llmb.kernels.trial import FEWEST_ROUNDS, HOPELESS, fastest, in_turn


class Device:
    """Work takes as long as it says, behind what was asked for before."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def work(self, *spent: float):
        """Takes its turns to last so long, the last one from then on."""
        left = list(spent)

        def way() -> None:
            self.calls += 1
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return way


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
    monkeypatch.setattr("llmb.kernels.trial.TRIED_S", 0.0)
    return made


def test_each_is_timed_by_itself(device: Device) -> None:
    assert in_turn([device.work(3.0), device.work(1.0), device.work(2.0)]) == [3.0, 1.0, 2.0]


def test_the_fastest_is_found(device: Device) -> None:
    assert fastest([device.work(3.0), device.work(1.0), device.work(1.1)]) == 1


def test_what_is_fast_only_at_first_is_not(device: Device) -> None:
    """The first way is called once more in each round."""
    assert fastest([device.work(0.9, 0.9, 0.9, 1.1), device.work(1.0)]) == 1


def test_a_hopeless_way_is_tried_once_and_a_single_one_never(device: Device) -> None:
    assert fastest([device.work(1.0), device.work(1.0), device.work(2 * HOPELESS)]) == 0
    assert device.calls == 4 + 3 * (FEWEST_ROUNDS - 1)
    device.calls = 0
    assert fastest([device.work(1.0)]) == 0
    assert device.calls == 0
