"""Fault files and drawn faults: what is read, and what is refused in one line."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmb.config.faults.fault_file import SPARE_RESTARTS, draw_faults, read_faults, with_faults
from llmb.config.faults.fault_plan import CHECKPOINT_KINDS, Fault, FaultInjection
from llmb.config.model import Model
from llmb.config.serialization import build, to_plain
from llmb.config.spec import Machine, Override, Parallel, Precision, RunConfig, Training
from llmb.errors import ConfigError

CONFIG = RunConfig(
    name="small",
    target="small",
    size="tiny",
    machine=Machine(gpu="cpu", gpus=4, gpus_per_node=2),
    model=Model(
        name="m", architecture="llama", layers=1, hidden=8, ffn=8, heads=2, kv_heads=1, head_dim=4, vocab=32
    ),
    parallel=Parallel(dp=4),
    precision=Precision(dtype="fp32"),
    workload=Training(seqlen=8, mbs=1, gbs=4, ga=1, steps=100, checkpoint_every=5),
)  # fmt: skip


def faulty(*faults: Fault) -> RunConfig:
    return with_faults(CONFIG, FaultInjection(faults=faults, source="f.yaml"))


@pytest.mark.parametrize("name", ["f.yaml", "f.json"])
def test_a_file_is_read_in_order_of_steps(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('[{"kind": "hang", "step": 9}, {"kind": "node_lost", "step": 2, "rank": 3, "node_ranks": 2}]')
    plan = read_faults(path)
    assert [(fault.kind, fault.step, fault.rank) for fault in plan.faults] == [("node_lost", 2, 3), ("hang", 9, 0)]
    assert plan.source == name


def test_a_run_with_faults_says_so_and_may_restart() -> None:
    config = faulty(Fault(kind="hang", step=3), Fault(kind="slow_rank", step=4))
    assert config.name == "small_faults2"
    assert config.limits.max_restarts == 1 + SPARE_RESTARTS
    assert build(RunConfig, to_plain(config)) == config


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_number_of_restarts_that_was_set_is_kept(restarts: int) -> None:
    override = Override(field="max_restarts", value=restarts, replaced=None, source="--set")
    limits = replace(CONFIG.limits, max_restarts=restarts)
    config = replace(CONFIG, limits=limits, overrides=(override,))
    plan = FaultInjection(faults=(Fault(kind="hang", step=3), Fault(kind="hang", step=5)), source="f.yaml")
    assert with_faults(config, plan).limits.max_restarts == restarts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("kind: hang", "expected a list of faults"),
        ("[]", "expected a list of faults"),
        ("- {kind: nap, step: 3}", "choices are: rank_killed"),
        ("- {kind: hang, stp: 3}", "did you mean step"),
        ("- {kind: hang}", "'step' is missing"),
        ("- {kind: hang, step: x}", "expected a whole number"),
        ("- hang", "expected a mapping"),
        ("- {kind: hang, step: 3, slow_s: 2}", r"fault 1 \(hang\): slow_s is for slow_rank"),
        (f"- {{kind: slow_rank, step: 3, slow_s: 1{'0' * 400}}}", "a whole number of more than 1024 bits"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_faults(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(kind="hang", step=0), "1 to 100"),
        (Fault(kind="hang", step=101), "1 to 100"),
        (Fault(kind="hang", step=3, rank=4), "0 to 3"),
        (Fault(kind="disk_full", step=7), "multiple of 5"),
        (Fault(kind="hang", step=3, node_ranks=2), "node_ranks is for node_lost"),
        (Fault(kind="node_lost", step=3, node_ranks=5), "from 1 to 4"),
        (Fault(kind="slow_rank", step=3, slow_s=float("nan")), "slow_s must be"),
        (Fault(kind="slow_rank", step=3, slow_steps=0), "slow_steps 1 to 100"),
    ],
)
def test_faults_that_the_run_cannot_have_are_refused(fault: Fault, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        faulty(fault)


def test_runs_that_cannot_restart_are_refused() -> None:
    plan = FaultInjection(faults=(Fault(kind="hang", step=3),), source="f.yaml")
    with pytest.raises(ConfigError, match="checkpoint_every"):
        with_faults(replace(CONFIG, workload=replace(CONFIG.workload, checkpoint_every=None)), plan)
    with pytest.raises(ConfigError, match="native engine"):
        with_faults(replace(CONFIG, engine="megatron_bridge"), plan)
    with pytest.raises(ConfigError, match="two faults at step 3"):
        faulty(Fault(kind="hang", step=3), Fault(kind="rank_killed", step=3))


def test_drawn_faults_follow_rate_and_seed() -> None:
    config = replace(CONFIG, workload=replace(CONFIG.workload, steps=10_000))
    plan = draw_faults(config, "8640/day", step_s=0.5)  # one in 20 steps
    assert plan == draw_faults(config, "8640/day", step_s=0.5) != draw_faults(config, "8640/day", step_s=0.51)
    assert plan.seconds_between == 10
    assert 400 < len(plan.faults) < 600
    assert len({fault.step for fault in plan.faults}) == len(plan.faults)
    assert {fault.rank for fault in plan.faults} == {0, 1, 2, 3}
    assert all(fault.step % 5 == 0 for fault in plan.faults if fault.kind in CHECKPOINT_KINDS)
    assert with_faults(config, plan).fault_injection == plan
    by_steps = draw_faults(config, "50/1000steps", step_s=None)
    assert (by_steps.faults, by_steps.seconds_between) == (plan.faults, None)


@pytest.mark.parametrize("rate", ["", "5", "5/d", "-1/day", "0/day", "1e9/day", "5/day ", "nan/day", "9" * 30 + "/day"])
def test_wrong_rates_are_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match="expected N/day or N/1000steps"):
        draw_faults(CONFIG, rate, step_s=1.0)


def test_rates_that_draw_nothing_or_too_much_are_refused() -> None:
    with pytest.raises(ConfigError, match="no fault falls into 100 steps"):
        draw_faults(CONFIG, "1/day", step_s=0.1)
    with pytest.raises(ConfigError, match="not predicted; give N/1000steps"):
        draw_faults(CONFIG, "1/day", step_s=None)
    with pytest.raises(ConfigError, match="more than 1,000 faults"):
        draw_faults(replace(CONFIG, workload=replace(CONFIG.workload, steps=10**6)), "999/1000steps", step_s=None)
