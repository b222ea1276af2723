"""When a run counts as hung, and who is blamed for it. A clock and an engine of the test's own; no waiting."""

from dataclasses import dataclass, field, replace

import pytest

from llmb.config.spec import Limits, Machine, Profile, RunConfig
from llmb.events import RunStarted, StepDone, Whereabouts
from llmb.launch.hang_detector import ANSWER_S, IDLE_S, PAUSE_S, SHORTEST_S, StallWatch, suspect


@dataclass
class Stage:
    """A run of two ranks with a clock, as its watch sees it."""

    config: RunConfig
    now: float = 0.0
    cpu_s: float = 0.0
    asked: list = field(default_factory=list)

    def __post_init__(self):
        self.watch = StallWatch(self.config, self, lambda: self.now)
        for rank in (0, 1):
            self.watch.saw(RunStarted(time=0.0, rank=rank, pid=100 + rank))

    def ask_where(self, pids):
        self.asked.append(sorted(pids))

    def worked_s(self):
        return self.cpu_s

    def step(self, number, seconds=1.0):
        self.now += seconds
        self.watch.saw(StepDone(rank=0, step=number, seconds=seconds))

    def hung_after(self, working=True, at_most=2000):
        """Seconds until the watch loses patience, with every process busy or none."""
        began = self.now
        while not self.asked and self.now - began < at_most:
            self.now += 0.5
            self.cpu_s += 0.5 if working else 0.001
            assert self.watch.verdict() is None
        return self.now - began if self.asked else None


@pytest.fixture
def stage(config):
    def make(**workload):
        work = replace(config.workload, steps=1000, **workload)
        machine = Machine(gpu="cpu", gpus=2, gpus_per_node=2)
        return Stage(replace(config, machine=machine, workload=work))

    return make


def test_a_hang_among_short_steps_is_over_within_a_minute(stage):
    run = stage()
    run.step(1)
    assert run.hung_after() == SHORTEST_S
    assert run.asked == [[100, 101]]
    assert SHORTEST_S + ANSWER_S + 10 < 60  # the last is the grace time of local.py


def test_long_steps_are_not_taken_for_a_hang(stage):
    run = stage()
    for number in range(1, 9):
        run.step(number, seconds=20.0)
    assert run.hung_after() == 200


def test_the_first_step_may_take_long_unless_nobody_works(stage):
    assert stage().hung_after() == PAUSE_S
    assert IDLE_S <= stage().hung_after(working=False) <= IDLE_S + 3
    assert IDLE_S + 3 + ANSWER_S + 10 < 60


def test_a_host_may_sleep_while_its_gpu_works(config):
    run = Stage(replace(config, machine=Machine(gpu="h100", gpus=2, gpus_per_node=2)))
    assert run.hung_after(working=False) == PAUSE_S


@pytest.mark.parametrize(
    ("workload", "profile", "step"),
    [
        ({"checkpoint_every": 4}, Profile(), 8),
        ({}, Profile(profile=True, profile_start=5, profile_stop=7), 6),
        ({}, Profile(), 1000),
    ],
)
def test_checkpoints_traces_and_the_end_take_their_time(stage, workload, profile, step):
    before, after = stage(**workload), stage(**workload)
    for run in (before, after):
        run.watch._config = replace(run.config, profile=profile)
    before.step(3)
    after.step(step)
    assert before.hung_after() == SHORTEST_S
    assert after.hung_after() == PAUSE_S


def test_the_user_may_set_the_limit(stage):
    run = stage()
    run.watch._config = replace(run.config, limits=Limits(stall_limit_s=300.0))
    run.step(1)
    assert run.hung_after(working=False) == 300


def test_whoever_moves_again_is_not_hung(stage):
    run = stage()
    run.step(1)
    run.hung_after()
    run.watch.saw(StepDone(rank=1, step=1, seconds=31.0))
    run.now += 2 * ANSWER_S
    assert run.watch.verdict() is None


def test_the_verdict_waits_for_the_answers_but_not_for_ever(stage):
    run = stage()
    run.step(4)
    run.hung_after()
    run.watch.saw(where(0, world=7))
    assert run.watch.verdict() is None
    run.now += ANSWER_S
    status, reason, rank = run.watch.verdict()
    assert (status, rank) == ("failed", 1)
    assert reason.startswith("hung: no rank made progress for 30 s after step 4; rank 1 did not answer")


def where(rank: int, waiting: bool = True, **collectives: int) -> Whereabouts:
    return Whereabouts(time=0.0, rank=rank, collectives=collectives, waiting=waiting)


def blamed(*answers: Whereabouts, asked: int | None = None) -> int | None:
    return suspect({answer.rank: answer for answer in answers}, range(asked or len(answers))).rank


def test_who_is_behind_in_a_collective_is_to_blame():
    assert blamed(where(0, world=5), where(1, world=5), where(2, False, world=4)) == 2


def test_who_is_behind_because_it_waits_for_another_is_not():
    # Rank 0 waits in the world for 1, which waits in its own group for 2.
    assert blamed(where(0, world=5), where(1, world=4, tp=9), where(2, False, world=4, tp=8)) == 2


def test_groups_of_the_same_shape_are_not_compared_with_one_another():
    assert blamed(where(0, a=5), where(1, False, a=4), where(2, b=3), where(3, b=3)) == 1


def test_along_a_pipeline_who_does_not_wait_is_to_blame():
    assert blamed(where(0, world=5), where(1, False, world=5), where(2, world=5)) == 1
    assert blamed(where(0, world=2), where(1, False, world=4), where(2, world=2)) == 1  # a middle stage: more messages


def test_nobody_is_blamed_without_evidence():
    assert blamed(where(0, world=5), where(1, world=5)) is None
    assert blamed(where(0, False, world=5), where(1, False, world=5)) is None
    assert suspect({}, ()).evidence == "no rank could be asked"


def test_a_single_process_can_only_blame_itself():
    assert blamed(where(0, waiting=False)) == 0
