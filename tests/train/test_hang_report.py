"""A rank tells how far it has come: ranks of a group count alike, and one that waits is told from one that works."""

import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import on_ranks
from small_config import CONFIG, changed

from llmb.events import WHERE_SIGNAL, StepDone, Whereabouts, read
from llmb.launch.hang_detector import suspect
from llmb.runtime.hang_report import collectives_entered, whereabouts
from llmb.runtime.recorder import Record
from llmb.train import loop


def test_a_running_process_answers_and_goes_on(start) -> None:
    outcome, process = start(steps=10**6)

    def wait_until(condition) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    wait_until(outcome.steps)
    process.send_signal(WHERE_SIGNAL)
    wait_until(lambda: any(isinstance(event, Whereabouts) for event in outcome.events()))
    count = len(outcome.steps())
    wait_until(lambda: len(outcome.steps()) > count)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert err.startswith("Stack (most recent call first):\n")
    assert "in train\n" in err
    (answer,) = [event for event in outcome.events() if isinstance(event, Whereabouts)]
    assert (answer.rank, answer.collectives) == (0, {})


def count_after_training(rank: int, layout: dict, folder: Path) -> dict[str, int]:
    loop.train(changed(CONFIG, steps=2, **layout), Record(folder, rank))
    return collectives_entered()


def test_ranks_of_a_group_have_entered_the_same_collectives(tmp_path) -> None:
    counts = on_ranks(4, count_after_training, {"tp": 2, "pp": 2, "mbs": 2, "ga": 2}, tmp_path)
    groups = {group for count in counts for group in count}
    members = {group: [rank for rank in range(4) if group in counts[rank]] for group in groups}
    assert {(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)} <= set(map(tuple, members.values()))  # tp, pp, all
    assert any(min(counts[rank][group] for rank in members[group]) > 0 for group in groups)
    for group in groups:
        if members[group] not in ([0, 2], [1, 3]):  # along the pipeline each stage counts its own messages
            assert len({counts[rank][group] for rank in members[group]}) == 1


def one_hangs(rank: int, layout: dict, folder: Path) -> tuple[Whereabouts, list[float | None]]:
    """Rank 1 is slow in the second step and never takes part in the third; both are asked then."""
    train_step = loop.train_step
    answers: list[Whereabouts] = []

    def ask() -> None:
        time.sleep(1)
        answers.append(whereabouts(rank))

    def hang(job, parts, optimizer, step):
        if step == 2 and rank == 1:
            time.sleep(0.3)
        if step == 3:
            threading.Thread(target=ask, daemon=True).start()
            if rank == 1:
                time.sleep(1.5)
        return train_step(job, parts, optimizer, step)

    loop.train_step = hang
    loop.train(changed(CONFIG, steps=3, **layout), Record(folder, rank))
    steps = [event for event in read(folder / f"events.rank{rank}.jsonl") if isinstance(event, StepDone)]
    return answers[0], [step.busy_s for step in steps]


@pytest.mark.parametrize("layout", [{"dp": 2, "gbs": 8}, {"tp": 2}, {"pp": 2, "mbs": 2, "ga": 2}], ids=str)
def test_one_who_waits_is_ahead_of_one_who_does_not_come(layout, tmp_path) -> None:
    (waits, idle), (hangs, busy) = on_ranks(2, one_hangs, layout, tmp_path)
    assert (waits.waiting, hangs.waiting) == (True, False)
    assert waits.collectives.keys() == hangs.collectives.keys()
    assert any(waits.collectives[group] > hangs.collectives[group] for group in waits.collectives)
    assert suspect({0: waits, 1: hangs}, (0, 1)).rank == 1
    assert busy[1] > 0.3 > idle[1]  # seconds of own work in the second step


def test_without_a_process_group_there_is_nothing_to_count() -> None:
    assert not dist.is_initialized()
    assert collectives_entered() == {}
