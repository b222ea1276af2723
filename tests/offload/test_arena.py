"""The arena: every buffer where it belongs, none over another, and never more than the budgets."""

from dataclasses import replace

import pytest
import torch
from reference_training import CPU, LEAST, UNTIED

from llmb.errors import ConfigError
from llmb.offload.arena import Arena, Budgets
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import KINDS, ParamBuckets, buffer_bytes
from llmb.perfmodel.offload.plan_memory import device_bytes, host_bytes
from llmb.perfmodel.offload.residency import Residency

PLAN = replace(LEAST, resident_params=2, inp_slots=3, levels="FAI")
HOMES = {"inp": 2, "rest": 1}


def test_buffers_and_host_slots_are_disjoint_and_match_the_plan() -> None:
    arena = Arena(UNTIED, PLAN, CPU, HOMES)
    counts = Residency(UNTIED, PLAN).buffers
    keys = [arena.buffer(kind, number) for kind in KINDS for number in range(counts[kind])]
    keys += [arena.host_slot(kind, number) for kind in KINDS for number in range(arena.host_slots[kind])]
    for mark, key in enumerate(keys):
        key.fill_(mark)
    assert all((key == mark).all() for mark, key in enumerate(keys))
    sizes = buffer_bytes(UNTIED, PLAN)
    assert all(arena.buffer(kind, 0).numel() == sizes[kind] for kind in KINDS)
    assert arena.host_slots["param"] == ParamBuckets(UNTIED).count - 2
    assert arena.host_slots["inp"] == 2
    assert arena.host_slots["kv"] == 0


def test_arena_allocates_what_was_planned() -> None:
    arena = Arena(UNTIED, PLAN, CPU, HOMES)
    foreseen = device_bytes(UNTIED, PLAN, "cpu")
    assert arena.device_bytes == sum(foreseen[kind] for kind in KINDS)
    assert arena.host_bytes == sum(host_bytes(UNTIED, PLAN, HOMES).values())


def test_plan_over_budget_is_refused() -> None:
    host = sum(host_bytes(UNTIED, PLAN, HOMES).values()) / GIB
    device = sum(device_bytes(UNTIED, PLAN, "cpu").values()) / GIB
    Arena(UNTIED, PLAN, CPU, HOMES, Budgets(host_gib=host, device_gib=device))
    with pytest.raises(ConfigError, match=r"needs 0\.00 GiB on the host, more than host_gib="):
        Arena(UNTIED, PLAN, CPU, HOMES, Budgets(host_gib=host * 0.99, device_gib=device))
    with pytest.raises(ConfigError, match="on the device, more than device_gib="):
        Arena(UNTIED, PLAN, CPU, HOMES, Budgets(host_gib=host, device_gib=device * 0.99))


def test_host_slab_is_reusable_if_large_enough() -> None:
    needed = Arena(UNTIED, PLAN, CPU, HOMES).host_bytes
    slab = HostSlab(needed + 100, CPU)
    arena = Arena(UNTIED, PLAN, CPU, HOMES, host_slab=slab)
    arena.host_slot("param", 0).fill_(7)
    assert slab.memory[0] == 7
    assert arena.host_bytes == needed
    with pytest.raises(ConfigError, match="the plan needs"):
        Arena(UNTIED, PLAN, CPU, HOMES, host_slab=HostSlab(needed - 1, CPU))


def test_scratch_does_not_overlap_weights() -> None:
    arena = Arena(UNTIED, PLAN, CPU, HOMES)
    arena.slab.zero_()
    arena.scratch(torch.Size((8, 8))).fill_(1.0)
    counts = Residency(UNTIED, PLAN).buffers
    weights = [arena.buffer("param", number) for number in range(counts["param"])]
    assert not any(bucket.any() for bucket in weights)
    assert arena.slab.any()
    assert arena.scratch(torch.Size((1 << 12, 1 << 10))).shape == (1 << 12, 1 << 10)
