"""Layouts of a run as the native engine would run them: its exact memory, and what it refuses.

config = native_config(base, setup)              the resolved run with the layout of a candidate
search_layouts(setup, {}, native_room(base), runs_natively(base))
"""

import math
from collections.abc import Callable
from dataclasses import replace

from llmb.config.native.training_support import supported_training
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import memory_bytes
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.memory_fit import USABLE_FRACTION
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.tune.memory_savings import MemoryRoom


def native_config(base: RunConfig, setup: StepSetup) -> RunConfig:
    """Return a run with the layout, micro-batches, recompute and offload of a candidate."""
    work = base.workload
    assert isinstance(work, Training)
    return replace(
        base,
        parallel=replace(setup.parallel, dp=setup.dp),
        workload=replace(
            work,
            mbs=setup.mbs,
            ga=setup.ga,
            recompute_layers=setup.recompute_layers or 0,
            offload_layers=setup.offload_layers,
        ),
    )


def native_room(base: RunConfig) -> MemoryRoom:
    """Return the memory of the run's GPU, all of whose tensors are known; unlimited where it is unknown."""
    capacity = memory_bytes(base.machine)
    limit = math.inf if capacity is None else USABLE_FRACTION * capacity
    return MemoryRoom(limit=limit, estimate=lambda setup: memory_estimate(native_config(base, setup)))


def runs_natively(base: RunConfig) -> Callable[[StepSetup], bool]:
    """Return the test whether the native engine runs a candidate."""

    def is_supported(setup: StepSetup) -> bool:
        try:
            supported_training(native_config(base, setup))
        except ConfigError:
            return False
        return True

    return is_supported
