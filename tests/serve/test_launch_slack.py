"""Slack before the next step: from the shortest recent step of decodes and the longest recent launch."""

import pytest

from llmb.serve import launch_slack
from llmb.serve.launch_slack import MARGIN_FRACTION, MARGIN_S, RECENT_STEPS, LaunchSlack

STEP_S, HOST_S = 0.010, 0.002


class Clock:
    """A clock that moves when told."""

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
    slack: LaunchSlack, clock: Clock, count: int, step_s: float = STEP_S, decode_only: bool = True, waited: bool = True
) -> None:
    """Launch and read steps that the device computes without a gap."""
    for _ in range(count):
        started, clock.now = clock.now, clock.now + HOST_S
        slack.on_launch(started)
        clock.now += step_s - HOST_S
        slack.on_read(waited, decode_only)


def test_slack_is_the_shortest_step_less_the_longest_launch(clock: Clock) -> None:
    slack = LaunchSlack()
    run_steps(slack, clock, RECENT_STEPS)
    assert slack.seconds() == 0.0  # one interval is missing
    run_steps(slack, clock, 1, step_s=2 * STEP_S)
    assert slack.seconds() == pytest.approx(STEP_S * (1 - MARGIN_FRACTION) - HOST_S - MARGIN_S)
    clock.now += 0.001
    assert slack.seconds() == pytest.approx(STEP_S * (1 - MARGIN_FRACTION) - HOST_S - MARGIN_S - 0.001)
    clock.now += STEP_S
    assert slack.seconds() == 0.0


def test_mixed_steps_do_not_lengthen_it(clock: Clock) -> None:
    """The step that the device computes may be one of decodes again."""
    slack = LaunchSlack()
    run_steps(slack, clock, RECENT_STEPS + 1)
    expected = slack.seconds()
    run_steps(slack, clock, 3 * RECENT_STEPS, step_s=5 * STEP_S, decode_only=False)
    assert slack.seconds() == pytest.approx(expected)


def test_late_host_learns_anew(clock: Clock) -> None:
    slack = LaunchSlack()
    run_steps(slack, clock, RECENT_STEPS + 1)
    run_steps(slack, clock, 1, waited=False)
    assert slack.seconds() == 0.0
    run_steps(slack, clock, RECENT_STEPS)
    assert slack.seconds() == 0.0
    run_steps(slack, clock, 1)
    assert slack.seconds() > 0.0
