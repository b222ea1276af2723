"""Slack before the next step: from the shortest recent step of its size and the longest recent launch."""

import pytest

from llmb.serve import launch_slack
from llmb.serve.launch_slack import MARGIN_FRACTION, MARGIN_S, RECENT_STEPS, LaunchSlack

STEP_S, HOST_S = 0.010, 0.002
SLACK_S = STEP_S * (1 - MARGIN_FRACTION) - HOST_S - MARGIN_S


class Clock:
    """A clock that moves only when a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(launch_slack, "time", clock)
    return clock


def run_steps(
    slack: LaunchSlack, clock: Clock, count: int, size: str | None = "a", step_s: float = STEP_S, waited: bool = True
) -> None:
    """Launch and read steps of one size, which the device computes without a gap."""
    for _ in range(count):
        started, clock.now = clock.now, clock.now + HOST_S
        slack.on_launch(started)
        clock.now += step_s - HOST_S
        slack.on_read(size, waited, running=size)


def test_slack_is_the_shortest_step_less_the_longest_launch(clock: Clock) -> None:
    slack = LaunchSlack()
    run_steps(slack, clock, RECENT_STEPS)
    assert slack.seconds() == 0.0  # when the first began is not known
    run_steps(slack, clock, 1, step_s=2 * STEP_S)
    assert slack.seconds() == pytest.approx(SLACK_S)
    clock.now += 0.001
    assert slack.seconds() == pytest.approx(SLACK_S - 0.001)
    clock.now += STEP_S
    assert slack.seconds() == 0.0


def test_sizes_have_durations_of_their_own(clock: Clock) -> None:
    slack = LaunchSlack()
    run_steps(slack, clock, RECENT_STEPS + 1)
    run_steps(slack, clock, RECENT_STEPS, size="b", step_s=5 * STEP_S)
    assert slack.seconds() == pytest.approx(SLACK_S + 4 * STEP_S * (1 - MARGIN_FRACTION))
    slack.on_read("b", waited=True, running="a")
    assert slack.seconds() == pytest.approx(SLACK_S)
    slack.on_read("a", waited=True, running=None)
    assert slack.seconds() == 0.0


def test_late_host_learns_anew(clock: Clock) -> None:
    slack = LaunchSlack()
    run_steps(slack, clock, RECENT_STEPS + 1)
    run_steps(slack, clock, 1, waited=False)
    assert slack.seconds() == 0.0
    run_steps(slack, clock, RECENT_STEPS)
    assert slack.seconds() == 0.0
    run_steps(slack, clock, 1)
    assert slack.seconds() == pytest.approx(SLACK_S)
