"""Remedies for a run of which no layout fits: more GPUs, or GPUs with more memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GPUS
from llmb.perfmodel.step_time.cluster_fabric import FABRICS
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.setup_fields import scaled
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.tune.layout_space import layout_space
from llmb.perfmodel.tune.memory_savings import external_room, smallest_variant, usable_fraction

MOST_GPUS = 16384


def layout_remedies(base: StepSetup, fixed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that let some layout fit, with as much recompute as is allowed."""
    gpus = 2 * base.gpus
    while gpus <= MOST_GPUS and math.isfinite(external_room(base).limit):
        larger_run = scaled(base, gpus)
        if not _is_predictable(larger_run):
            break
        if least_memory(larger_run, fixed) <= external_room(larger_run).limit:
            yield f"--scale {gpus}"
            break
        gpus *= 2
    usable = usable_fraction(base)
    needed = least_memory(base, fixed) / usable
    larger = sorted((GPUS[key].memory_bytes or 0.0, key) for key in FABRICS)
    for memory, key in larger:
        if key == base.gpu or memory < needed or not _is_predictable(base, key):
            continue
        if least_memory(replace(base, gpu=key), fixed) <= usable * memory:
            yield f"--gpu-type {key}"
            break
    if fixed:
        yield f"fewer fixed settings than {', '.join(f'{name}={value}' for name, value in fixed.items())}"


def _is_predictable(base: StepSetup, gpu: str | None = None) -> bool:
    """Return whether a GPU has GEMMs of the dtype, and a known network between so many."""
    try:
        predict(replace(base, gpu=gpu or base.gpu))
    except ConfigError:
        return False
    return True


def least_memory(base: StepSetup, fixed: Mapping[str, Any]) -> float:
    """Return the least bytes of any layout, with as much recompute as is allowed."""
    room = external_room(base)
    free = {name: value for name, value in fixed.items() if name not in ("recompute_layers", "offload_layers")}
    totals = (room.estimate(smallest_variant(setup, fixed)).total for setup in layout_space(base, free))
    return min(totals, default=math.inf)
