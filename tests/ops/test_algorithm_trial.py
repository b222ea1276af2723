"""Algorithm trial with a clock that the candidates themselves advance; on a GPU: tests/ops/test_matmul.py."""

from collections import defaultdict

import pytest
import torch

from llmb.ops.gemm import algorithm_trial
from llmb.ops.gemm.algorithm_trial import (
    CUTOFF,
    REPEATED_S,
    SETTLING_FRACTION,
    SLOWDOWN_SAMPLES,
    pick_fastest,
    time_interleaved,
    time_repeated,
)


class FakeDevice:
    """Device whose kernels take given times and run in order."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def kernel(self, *durations: float):
        """Return a candidate whose runs last so long, in turn; the last duration repeats."""
        remaining = list(durations)

        def candidate() -> bool:
            self.calls += 1
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]
            return True

        return candidate

    def unsupported(self) -> bool:
        """Candidate that does not support its operands and takes no time."""
        self.calls += 1
        return False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = fake.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(algorithm_trial, "_slowdowns", defaultdict(list))
    monkeypatch.setattr(algorithm_trial, "_warmed_up", set())
    for name in ("INTERLEAVED_S", "FIRST_INTERLEAVED_S"):
        monkeypatch.setattr(algorithm_trial, name, 0.0)
    return fake


def test_interleaved_candidates_are_timed_individually(device: FakeDevice) -> None:
    assert time_interleaved([device.kernel(3.0), device.kernel(1.0), device.kernel(2.0)]) == [3.0, 1.0, 2.0]


def test_repeated_runs_skip_the_settling_time(device: FakeDevice) -> None:
    count = round(1000 * REPEATED_S / 2.0)
    settling = [9.0] * round(count * SETTLING_FRACTION)
    assert time_repeated(device.kernel(*settling, 2.0), estimate_ms=2.0) == pytest.approx(2.0)
    assert device.calls == count
    assert time_repeated(device.kernel(500.0), estimate_ms=500.0) == 500.0  # longer than the whole time


def test_fastest_candidate_is_picked(device: FakeDevice) -> None:
    assert pick_fastest([device.kernel(3.0), device.kernel(1.0), device.kernel(1.1)], "abc") == 1


def test_unsupported_candidate_is_not_picked(device: FakeDevice) -> None:
    assert pick_fastest([device.unsupported, device.kernel(3.0), device.kernel(2.0)], "abc") == 2
    assert pick_fastest([device.unsupported, device.kernel(1.0)], "ab") == 1
    with pytest.raises(RuntimeError, match="none of 1 kernels supports"):
        pick_fastest([device.unsupported], "a")


def test_first_launch_of_a_kernel_is_a_warmup(device: FakeDevice) -> None:
    assert pick_fastest([device.kernel(9.0, 1.0), device.kernel(1.2)], "ab") == 0


def test_kernel_that_lowers_the_clock_is_not_picked(device: FakeDevice) -> None:
    """Of two kernels with nearly equal cycles one slows the chip down as soon as it has it to itself."""
    hot, cool = device.kernel(1.0, 1.0, 1.0, 1.1), device.kernel(1.02)
    assert pick_fastest([hot, cool], ["hot", "cool"]) == 1
    # The slowdown holds for other sizes, and is not measured again once there are enough samples.
    algorithm_trial._slowdowns["hot"] *= SLOWDOWN_SAMPLES
    algorithm_trial._slowdowns["cool"] *= SLOWDOWN_SAMPLES
    device.calls = 0
    assert pick_fastest([device.kernel(2.0), device.kernel(2.04)], ["hot", "cool"]) == 1
    assert device.calls == 3
    assert pick_fastest([device.kernel(2.0), device.kernel(2.5)], ["hot", "cool"]) == 0


def test_one_outlier_of_a_slowdown_is_ignored(device: FakeDevice) -> None:
    algorithm_trial._warmed_up |= {"a", "b"}
    for slow in (1.2, 1.0, 1.0):
        pick_fastest([device.kernel(1.0, 1.0, slow), device.kernel(1.05)], ["a", "b"])
    assert algorithm_trial._slowdowns["a"] == pytest.approx([1.2, 1.0, 1.0])
    assert pick_fastest([device.kernel(1.0), device.kernel(1.05)], ["a", "b"]) == 0


def test_candidate_beyond_the_cutoff_is_tried_once(device: FakeDevice) -> None:
    algorithm_trial._warmed_up |= {"fast", "slow"}
    assert pick_fastest([device.kernel(1.0), device.kernel(2 * CUTOFF)], ["fast", "slow"]) == 0
    assert device.calls == 3
    assert not algorithm_trial._slowdowns
