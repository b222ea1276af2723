"""Hang reports: ranks of a group count the same collectives, and waiting ranks are told from busy ones."""

import signal
import threading
import time
from pathlib import Path

import pytest
from config_changes import changed
from small_config import CONFIG
from training_ranks import on_ranks

from llmb.events import HANG_REPORT_SIGNAL, HangReport, StepDone, read
from llmb.launch.hang_detector import find_hang_cause
from llmb.runtime.hang_report import collectives_entered, hang_report
from llmb.runtime.recorder import EventRecorder
from llmb.train import loop

HANG_S = 0.5


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_running_process_writes_hang_report_and_continues(start) -> None:
    outcome = start(steps=10**6)
    outcome.wait_until(outcome.steps)
    outcome.process.send_signal(HANG_REPORT_SIGNAL)
    outcome.wait_until(lambda: any(isinstance(event, HangReport) for event in outcome.events()))
    count = len(outcome.steps())
    outcome.wait_until(lambda: len(outcome.steps()) > count)
    outcome.process.send_signal(signal.SIGTERM)
    _, err = outcome.process.communicate(timeout=30)
    assert err.startswith("Stack (most recent call first):\n")
    assert "in train\n" in err
    (answer,) = [event for event in outcome.events() if isinstance(event, HangReport)]
    assert (answer.rank, answer.collectives) == (0, {})


def count_after_training(rank: int, layout: dict, folder: Path) -> dict[str, int]:
    loop.train(changed(CONFIG, steps=2, **layout), EventRecorder(folder, rank))
    return collectives_entered()


@pytest.mark.slow
def test_ranks_of_a_group_count_the_same_collectives(tmp_path) -> None:
    counts = on_ranks(4, count_after_training, {"tp": 2, "pp": 2, "mbs": 2, "ga": 2}, tmp_path)
    groups = {group for count in counts for group in count}
    members = {group: [rank for rank in range(4) if group in counts[rank]] for group in groups}
    assert {(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)} <= set(map(tuple, members.values()))  # tp, pp, all
    assert any(min(counts[rank][group] for rank in members[group]) > 0 for group in groups)
    for group in groups:
        if members[group] not in ([0, 2], [1, 3]):  # each pipeline stage counts its own point-to-point messages
            assert len({counts[rank][group] for rank in members[group]}) == 1


def one_hangs(rank: int, layout: dict, folder: Path) -> tuple[HangReport, list[StepDone]]:
    """Rank 1 begins the second and third step when rank 0 waits for it, and both ranks have reported.

    In the second step it lets rank 0 wait for longer.
    """
    train_step = loop.train_step
    reports: dict[int, HangReport] = {}

    def report(step: int, entered: dict[str, int]) -> None:
        answer = hang_report(rank)
        while rank == 0 and not (answer.waiting and answer.collectives != entered):
            time.sleep(0.01)
            answer = hang_report(rank)
        reports[step] = answer
        (folder / f"step{step}.rank{rank}").touch()

    def hang(job, model_parts, optimizer, step):
        if step > 1:
            thread = threading.Thread(target=report, args=(step, collectives_entered()), daemon=True)
            if rank == 1:
                wait_until((folder / f"step{step}.rank0").exists)
            thread.start()
            if rank == 1:
                thread.join()
                time.sleep(HANG_S if step == 2 else 0)
        return train_step(job, model_parts, optimizer, step)

    loop.train_step = hang
    loop.train(changed(CONFIG, steps=3, **layout), EventRecorder(folder, rank))
    return reports[3], [event for event in read(folder / f"events.rank{rank}.jsonl") if isinstance(event, StepDone)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2, "gbs": 8}, {"tp": 2}, {"pp": 2, "mbs": 2, "ga": 2}], ids=str)
def test_waiting_rank_is_ahead_of_hanging_rank(layout, tmp_path) -> None:
    (waits, steps), (hangs, hanging_steps) = on_ranks(2, one_hangs, layout, tmp_path)
    assert (waits.waiting, hangs.waiting) == (True, False)
    assert waits.collectives.keys() == hangs.collectives.keys()
    assert any(waits.collectives[group] > hangs.collectives[group] for group in waits.collectives)
    assert find_hang_cause({0: waits, 1: hangs}, (0, 1)).rank == 1
    # Of the second step, rank 0 was busy for all but the time it waited, however long its own work took.
    assert hanging_steps[1].busy_s > HANG_S
    assert steps[1].seconds - steps[1].busy_s > 0.3
