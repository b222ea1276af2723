"""Goodput of a run that was restarted, from events whose times are known."""

from dataclasses import replace

import pytest
from small_models import llama_model

from llmb.config.faults.fault_plan import Fault, FaultInjection
from llmb.config.serialization import build, to_plain
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.events import Event, FaultInjected, RunEnded, RunLaunched, StepDone
from llmb.report.compare.compare_doubts import doubts
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.goodput.goodput_result import Goodput
from llmb.results.result import Result
from llmb.results.run_settings import run_settings

CONFIG = RunConfig(
    name="small_faults3",
    target="small",
    size="tiny",
    machine=Machine(gpu="cpu", gpus=2, gpus_per_node=2),
    model=llama_model(),
    parallel=Parallel(dp=2),
    precision=Precision(dtype="fp32"),
    workload=Training(seqlen=8, mbs=1, gbs=2, ga=1, steps=8, window=(1, 8), checkpoint_every=2),
    fault_injection=FaultInjection(
        faults=(
            Fault(kind="slow_rank", step=2, slow_s=1.0, slow_steps=1),
            Fault(kind="rank_killed", step=6, rank=1),
            Fault(kind="hang", step=7),
        ),
        source="f.yaml",
    ),
)


def steps(first: int, last: int, end: float, gap: float = 0.0, slow: int | None = None) -> list[Event]:
    """Steps of a second each; after every second one a checkpoint takes `gap`."""
    done: list[Event] = []
    for step in range(first, last + 1):
        seconds = 2.0 if step == slow else 1.0
        end += seconds
        done.append(StepDone(time=end, step=step, seconds=seconds, tokens=16, loss=1 / step, grad_norm=1.0))
        end += gap if step % 2 == 0 else 0.0
    return done


def restarted_run() -> list[Event]:
    return [
        RunLaunched(time=100.0, start=0, step=0),
        FaultInjected(time=111.0, rank=0, fault=0, kind="slow_rank", step=2),
        *steps(1, 5, 110.0, gap=0.5, slow=2),  # ends at 117
        FaultInjected(time=117.25, rank=1, fault=1, kind="rank_killed", step=6),
        RunEnded(time=118.25, status="failed", reason="rank 1: killed"),
        RunLaunched(time=118.5, start=1, step=4),
        *steps(5, 6, 128.25, gap=0.5),  # ends at 130.25
        FaultInjected(time=130.25, rank=0, fault=2, kind="hang", step=7),
        RunEnded(time=140.25, status="failed", reason="hung"),
        RunLaunched(time=140.5, start=2, step=6),
        *steps(7, 8, 150.25),
        RunEnded(time=153.0, status="ok"),
    ]


def goodput_of(config: RunConfig, events: list[Event]) -> Goodput:
    goodput = derive(config, events).goodput
    assert goodput is not None
    return goodput


def test_useful_tokens_count_once_over_all_the_wall_time() -> None:
    goodput = goodput_of(CONFIG, restarted_run())
    assert (goodput.wall_s, goodput.restarts, goodput.planned_faults) == (53.0, 2, 3)
    assert goodput.useful_tokens == 8 * 16
    assert goodput.tokens_per_s == pytest.approx(128 / 53)
    assert goodput.fraction == pytest.approx(8 / 53)  # a step takes a second
    assert goodput.seconds == pytest.approx(
        {"start-up": 10.0, "steps": 9.0, "lost": 1.25, "detect": 11.0, "restart": 20.0, "between": 1.75}
    )


def test_each_fault_has_its_cost() -> None:
    slow, killed, hung = goodput_of(CONFIG, restarted_run()).faults
    assert (slow.kind, slow.detect_s, slow.steps_lost, slow.lost_s) == ("slow_rank", None, None, 1.0)
    assert (killed.kind, killed.rank, killed.step, killed.reason) == ("rank_killed", 1, 6, "rank 1: killed")
    assert (killed.detect_s, killed.restart_s, killed.steps_lost, killed.lost_s) == (1.0, 10.0, 1, 1.25)
    assert (hung.detect_s, hung.restart_s, hung.steps_lost, hung.lost_s) == (10.0, 10.0, 0, 0.0)


def test_checkpoint_interval_stands_beside_the_best() -> None:
    advice = goodput_of(CONFIG, restarted_run()).checkpoints
    assert advice is not None
    assert (advice.every_steps, advice.interval_s, advice.checkpoint_s) == (2, 2.0, 0.5)
    assert advice.between_faults_s == pytest.approx((7.25 + 2.0 + 2.0) / 2)
    assert advice.best_interval_s == pytest.approx((2 * 0.5 * advice.between_faults_s) ** 0.5)
    stated = replace(CONFIG, fault_injection=replace(CONFIG.fault_injection, seconds_between=50.0))
    assert goodput_of(stated, restarted_run()).checkpoints.between_faults_s == 50.0


def test_repeated_steps_with_another_loss_are_counted() -> None:
    events = restarted_run()
    assert goodput_of(CONFIG, events).repeated_steps == 1
    assert goodput_of(CONFIG, events).repeated_losses_differ == 0
    changed = [replace(e, loss=9.0) if isinstance(e, StepDone) and e.time > 120 and e.step == 5 else e for e in events]
    assert goodput_of(CONFIG, changed).repeated_losses_differ == 1
    assert "1 WITH ANOTHER LOSS" in summary(derive(CONFIG, changed))


def test_real_failures_are_counted_as_unplanned() -> None:
    config = replace(CONFIG, fault_injection=None)
    events = [event for event in restarted_run() if not isinstance(event, FaultInjected)]
    goodput = goodput_of(config, events)
    assert goodput.injected is None
    assert {kind: cost.faults for kind, cost in goodput.by_kind.items()} == {"unplanned": 2}


def test_a_run_without_restarts_has_no_goodput() -> None:
    assert derive(CONFIG, steps(1, 8, 0.0)).goodput is None


def test_a_start_that_did_no_step_and_one_without_end_are_counted() -> None:
    events = restarted_run()[:-4]
    events += [RunEnded(time=140.25, status="failed"), RunLaunched(time=140.5, start=2, step=6)]
    goodput = goodput_of(CONFIG, events)
    assert goodput.restarts == 2
    assert goodput.wall_s == pytest.approx(40.5)


def test_the_result_says_everywhere_that_faults_were_injected() -> None:
    result = derive(CONFIG, restarted_run())
    assert build(Result, to_plain(result)) == result
    text = summary(result)
    assert "faults injected on purpose: f.yaml" in text
    assert "note FAULT_INJECTION: 3 faults were injected on purpose" in text
    assert "best interval" in text
    other = (replace(CONFIG, fault_injection=None), replace(result, warnings=()))
    assert any("injected on purpose" in doubt for doubt in doubts(other, (CONFIG, result)))
    assert "injected-faults=3" in run_settings(CONFIG)
