"""Hang detection and its culprit, with a fake clock and a fake engine; no waiting."""

from dataclasses import dataclass, field, replace

import pytest

from llmb.config.spec import Limits, Machine, Profile, RunConfig
from llmb.events import GpuSample, HangReport, RunStarted, StepDone
from llmb.launch.hang_detector import (
    IDLE_LIMIT_S,
    MIN_LIMIT_S,
    PAUSE_LIMIT_S,
    REPORT_TIMEOUT_S,
    HangDetector,
    find_hang_cause,
)


@dataclass
class FakeRun:
    """Run of two ranks with a fake clock, as its hang detector sees it."""

    config: RunConfig
    now: float = 0.0
    cpu_s: float = 0.0
    requested: list = field(default_factory=list)

    def __post_init__(self):
        self.detector = HangDetector(self.config, self, lambda: self.now)
        for rank in (0, 1):
            self.detector.observe(RunStarted(time=0.0, rank=rank, pid=100 + rank))

    def request_hang_reports(self, pids):
        self.requested.append(sorted(pids))

    def cpu_time_s(self):
        return self.cpu_s

    def step(self, number, seconds=1.0):
        self.now += seconds
        self.detector.observe(StepDone(rank=0, step=number, seconds=seconds))

    def hangs_after(self, busy=True, max_s=2000):
        """Return the seconds until hang reports are requested, with every process busy or none."""
        start = self.now
        while not self.requested and self.now - start < max_s:
            self.now += 0.5
            self.cpu_s += 0.5 if busy else 0.001
            assert self.detector.verdict() is None
        return self.now - start if self.requested else None


@pytest.fixture
def fake_run(config):
    def make(**workload):
        work = replace(config.workload, steps=1000, **workload)
        machine = Machine(gpu="cpu", gpus=2, gpus_per_node=2)
        return FakeRun(replace(config, machine=machine, workload=work))

    return make


def test_samples_of_the_gpu_are_no_progress(fake_run):
    run = fake_run()
    run.step(1)
    run.now += MIN_LIMIT_S / 2
    run.detector.observe(GpuSample(time=0.0, power_w=600.0))
    assert run.hangs_after() == MIN_LIMIT_S / 2


def test_hang_with_short_steps_is_stopped_within_a_minute(fake_run):
    run = fake_run()
    run.step(1)
    assert run.hangs_after() == MIN_LIMIT_S
    assert run.requested == [[100, 101]]
    assert MIN_LIMIT_S + REPORT_TIMEOUT_S + 10 < 60  # the last is the grace period of local.py


def test_long_steps_are_not_a_hang(fake_run):
    run = fake_run()
    for number in range(1, 9):
        run.step(number, seconds=20.0)
    assert run.hangs_after() == 200


def test_first_step_may_be_slow_unless_no_process_is_busy(fake_run):
    assert fake_run().hangs_after() == PAUSE_LIMIT_S
    assert IDLE_LIMIT_S <= fake_run().hangs_after(busy=False) <= IDLE_LIMIT_S + 3
    assert IDLE_LIMIT_S + 3 + REPORT_TIMEOUT_S + 10 < 60


def test_idle_host_with_a_gpu_is_not_a_hang(config):
    run = FakeRun(replace(config, machine=Machine(gpu="h100", gpus=2, gpus_per_node=2)))
    assert run.hangs_after(busy=False) == PAUSE_LIMIT_S


@pytest.mark.parametrize(
    ("workload", "profile", "step"),
    [
        ({"checkpoint_every": 4}, Profile(), 8),
        ({}, Profile(profile=True, profile_start=5, profile_stop=7), 6),
        ({}, Profile(), 1000),
    ],
)
def test_checkpoints_traces_and_the_end_get_a_longer_limit(fake_run, workload, profile, step):
    before, after = fake_run(**workload), fake_run(**workload)
    for run in (before, after):
        run.detector._config = replace(run.config, profile=profile)
    before.step(3)
    after.step(step)
    assert before.hangs_after() == MIN_LIMIT_S
    assert after.hangs_after() == PAUSE_LIMIT_S


def test_stall_limit_overrides_the_default(fake_run):
    run = fake_run()
    run.detector._config = replace(run.config, limits=Limits(stall_limit_s=300.0))
    run.step(1)
    assert run.hangs_after(busy=False) == 300


def test_progress_after_the_request_cancels_the_verdict(fake_run):
    run = fake_run()
    run.step(1)
    run.hangs_after()
    run.detector.observe(StepDone(rank=1, step=1, seconds=31.0))
    run.now += 2 * REPORT_TIMEOUT_S
    assert run.detector.verdict() is None


def test_verdict_waits_for_hang_reports_with_a_timeout(fake_run):
    run = fake_run()
    run.step(4)
    run.hangs_after()
    run.detector.observe(report(0, world=7))
    assert run.detector.verdict() is None
    run.now += REPORT_TIMEOUT_S
    status, reason, rank = run.detector.verdict()
    assert (status, rank) == ("failed", 1)
    assert reason.startswith("hung: no rank made progress for 30 s after step 4; rank 1 did not respond")


def report(rank: int, waiting: bool = True, **collectives: int) -> HangReport:
    return HangReport(time=0.0, rank=rank, collectives=collectives, waiting=waiting)


def culprit(*reports: HangReport) -> int | None:
    return find_hang_cause({report.rank: report for report in reports}, range(len(reports))).rank


def test_rank_behind_in_a_collective_is_the_culprit():
    assert culprit(report(0, world=5), report(1, world=5), report(2, False, world=4)) == 2


def test_rank_behind_because_it_waits_is_not_the_culprit():
    # Rank 0 waits in the world for 1, which waits in its own group for 2.
    assert culprit(report(0, world=5), report(1, world=4, tp=9), report(2, False, world=4, tp=8)) == 2


def test_different_process_groups_are_not_compared():
    assert culprit(report(0, a=5), report(1, False, a=4), report(2, b=3), report(3, b=3)) == 1


def test_in_a_pipeline_the_rank_that_does_not_wait_is_the_culprit():
    assert culprit(report(0, world=5), report(1, False, world=5), report(2, world=5)) == 1
    assert (
        culprit(report(0, world=2), report(1, False, world=4), report(2, world=2)) == 1
    )  # a middle stage: more messages


def test_no_culprit_without_evidence():
    assert culprit(report(0, world=5), report(1, world=5)) is None
    assert culprit(report(0, False, world=5), report(1, False, world=5)) is None
    assert find_hang_cause({}, ()).evidence == "no rank could be reached"


def test_single_rank_is_the_culprit():
    assert culprit(report(0, waiting=False)) == 0
