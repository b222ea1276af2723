"""Reading of fault files, drawing of faults at a rate, and the check that a run can have them.

faults.yaml:  - {kind: rank_killed, step: 12, rank: 1}
              - {kind: hang, step: 30}

with_faults(config, read_faults(Path("faults.yaml")))
with_faults(config, draw_faults(config, "2000/day", step_s=0.5))
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmb.config.faults.fault_plan import CHECKPOINT_KINDS, FAULT_KINDS, Fault, FaultInjection
from llmb.config.serialization import build
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.formats.yaml_file import load_yaml

DAY_S = 86400.0
MOST_FAULTS = 1000
EXPECTED = f"a list of faults such as {{kind: {FAULT_KINDS[0]}, step: 12, rank: 0}}"
SPARE_RESTARTS = 3  # for real faults beside those of the plan

_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)/(day|1000steps)")


def read_faults(path: Path) -> FaultInjection:
    """Return the faults of a YAML or JSON file: a list of mappings."""
    content = load_yaml(path, EXPECTED)
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{path}: expected {EXPECTED}")
    if len(content) > MOST_FAULTS:
        raise ConfigError(f"{path}: {len(content):,} faults; a run takes at most {MOST_FAULTS:,}")
    faults = [_fault(item, f"{path}: fault {number}") for number, item in enumerate(content, start=1)]
    return FaultInjection(faults=_by_step(faults), source=path.name)


def _fault(item: Any, where: str) -> Fault:
    fault = build(Fault, item, where)
    unused = [name for name in ("slow_s", "slow_steps") if name in item and fault.kind != "slow_rank"]
    if unused:
        raise ConfigError(f"{where} ({fault.kind}): {unused[0]} is for slow_rank")
    return fault


def draw_faults(config: RunConfig, rate: str, step_s: float | None) -> FaultInjection:
    """Draw faults at random times, on random ranks and of random kinds; the run's seed decides.

    `rate`: faults per day, which a step of `step_s` seconds turns into steps, or faults per 1000 steps.
    """
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--fault-rate: expected N/day or N/1000steps, such as 24/day, got {rate[:60]!r}")
    work = _training(config, "--fault-rate")
    seconds_between = DAY_S / float(match[1]) if match[2] == "day" else None
    if seconds_between is not None and step_s is None:
        raise ConfigError("--fault-rate: the step time of this run is not predicted; give N/1000steps instead of N/day")
    steps_between = 1000 / float(match[1]) if seconds_between is None else seconds_between / (step_s or 1.0)
    draw, faults, taken, at = random.Random(work.seed), [], set[int](), 0.0
    while (at := at + draw.expovariate(1 / steps_between)) < work.steps:
        kind = draw.choice(FAULT_KINDS)
        step = _free_step(int(at) + 1, kind, work, taken)
        if step is not None:
            taken.add(step)
            faults.append(Fault(kind=kind, step=step, rank=draw.randrange(config.parallel.world_size)))
        if len(faults) > MOST_FAULTS:
            raise ConfigError(f"--fault-rate {rate}: more than {MOST_FAULTS:,} faults in {work.steps:,} steps")
    if not faults:
        raise ConfigError(
            f"--fault-rate {rate}: no fault falls into {work.steps} steps with seed {work.seed}; "
            "raise the rate or steps, or set another seed"
        )
    source = f"drawn at {rate}, seed {work.seed}"
    return FaultInjection(faults=_by_step(faults), source=source, seconds_between=seconds_between)


def with_faults(config: RunConfig, plan: FaultInjection) -> RunConfig:
    """Return a run that injects these faults and restarts after each; refuse what it cannot have."""
    work = _training(config, "faults")
    if work.checkpoint_every is None:
        raise ConfigError("faults: the run writes no checkpoint to restart from; add --set checkpoint_every=N")
    ranks = config.parallel.world_size
    for number, fault in enumerate(plan.faults, start=1):
        _check_fault(fault, f"{plan.source}: fault {number} ({fault.kind})", work, ranks)
    for before, after in pairwise(plan.faults):
        if before.step == after.step:
            raise ConfigError(f"{plan.source}: two faults at step {after.step}; give each a step of its own")
    limits = config.limits
    if not limits.max_restarts and not any(override.field == "max_restarts" for override in config.overrides):
        limits = replace(limits, max_restarts=sum(fault.ends_run for fault in plan.faults) + SPARE_RESTARTS)
    return replace(config, fault_injection=plan, limits=limits, name=f"{config.name}_faults{len(plan.faults)}")


def _check_fault(fault: Fault, where: str, work: Training, ranks: int) -> None:
    every = work.checkpoint_every or 1
    if not 1 <= fault.step <= work.steps:
        raise ConfigError(f"{where}: step {fault.step} is not one of the run, 1 to {work.steps}")
    if not 0 <= fault.rank < ranks:
        raise ConfigError(f"{where}: rank {fault.rank} is not one of the run, 0 to {ranks - 1}")
    if fault.kind in CHECKPOINT_KINDS and fault.step % every:
        raise ConfigError(f"{where}: no checkpoint follows step {fault.step}; it must be a multiple of {every}")
    if fault.node_ranks is not None and not (fault.kind == "node_lost" and 1 <= fault.node_ranks <= ranks):
        raise ConfigError(f"{where}: node_ranks is for node_lost, from 1 to {ranks}")
    is_slow = fault.kind == "slow_rank"
    if is_slow and not (0 < fault.slow_s <= 3600 and 1 <= fault.slow_steps <= work.steps):
        raise ConfigError(f"{where}: slow_s must be above 0 and at most 3600, slow_steps 1 to {work.steps}")


def _training(config: RunConfig, option: str) -> Training:
    work = config.workload
    if not isinstance(work, Training) or config.engine != "native" or config.one_rank is not None:
        raise ConfigError(f"{option}: only training by all ranks of the native engine takes injected faults")
    return work


def _free_step(step: int, kind: str, work: Training, taken: set[int]) -> int | None:
    """Return the first free step from this one on that a fault of this kind can have; None: there is none."""
    every = (work.checkpoint_every or 1) if kind in CHECKPOINT_KINDS else 1
    step = -(-step // every) * every
    while step in taken:
        step += every
    return step if step <= work.steps else None


def _by_step(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.step))
