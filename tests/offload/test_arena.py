"""The arena: every buffer where it belongs, none over another, and never more than the budgets."""

from dataclasses import replace

import pytest
import torch
from ordinary_training import CPU, LEAST, UNTIED

from llmb.errors import ConfigError
from llmb.offload.arena import Arena, Budgets
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import KINDS, Units, piece_bytes
from llmb.perfmodel.offload.plan_memory import device_bytes, host_bytes
from llmb.perfmodel.offload.residency import Residency

PLAN = replace(LEAST, resident_params=2, inp_slots=3, levels="FAI")
HOMES = {"inp": 2, "rest": 1}


def test_buffers_and_homes_are_apart_and_as_many_as_the_plan_says() -> None:
    arena = Arena(UNTIED, PLAN, CPU, HOMES)
    counts = Residency(UNTIED, PLAN).buffers
    pieces = [arena.buffer(kind, number) for kind in KINDS for number in range(counts[kind])]
    pieces += [arena.home(kind, number) for kind in KINDS for number in range(arena.homes[kind])]
    for mark, piece in enumerate(pieces):
        piece.fill_(mark)
    assert all((piece == mark).all() for mark, piece in enumerate(pieces))
    sizes = piece_bytes(UNTIED, PLAN)
    assert all(arena.buffer(kind, 0).numel() == sizes[kind] for kind in KINDS)
    assert arena.homes["param"] == Units(UNTIED).count - 2
    assert arena.homes["inp"] == 2
    assert arena.homes["kv"] == 0


def test_it_takes_what_was_foreseen() -> None:
    arena = Arena(UNTIED, PLAN, CPU, HOMES)
    foreseen = device_bytes(UNTIED, PLAN, "cpu")
    assert arena.device_bytes == sum(foreseen[kind] for kind in KINDS)
    assert arena.host_bytes == sum(host_bytes(UNTIED, PLAN, HOMES).values())


def test_budgets_are_kept() -> None:
    host = sum(host_bytes(UNTIED, PLAN, HOMES).values()) / GIB
    device = sum(device_bytes(UNTIED, PLAN, "cpu").values()) / GIB
    Arena(UNTIED, PLAN, CPU, HOMES, Budgets(host_gib=host, device_gib=device))
    with pytest.raises(ConfigError, match=r"needs 0\.00 GiB on the host, more than host_gib="):
        Arena(UNTIED, PLAN, CPU, HOMES, Budgets(host_gib=host * 0.99, device_gib=device))
    with pytest.raises(ConfigError, match="on the device, more than device_gib="):
        Arena(UNTIED, PLAN, CPU, HOMES, Budgets(host_gib=host, device_gib=device * 0.99))


def test_a_host_slab_can_be_used_again_if_it_is_large_enough() -> None:
    needed = Arena(UNTIED, PLAN, CPU, HOMES).host_bytes
    slab = HostSlab(needed + 100, CPU)
    arena = Arena(UNTIED, PLAN, CPU, HOMES, host_slab=slab)
    arena.home("param", 0).fill_(7)
    assert slab.memory[0] == 7
    assert arena.host_bytes == needed
    with pytest.raises(ConfigError, match="the plan needs"):
        Arena(UNTIED, PLAN, CPU, HOMES, host_slab=HostSlab(needed - 1, CPU))


def test_memory_for_drawing_weights_lies_where_none_do() -> None:
    arena = Arena(UNTIED, PLAN, CPU, HOMES)
    arena.slab.zero_()
    arena.scratch(torch.Size((8, 8))).fill_(1.0)
    counts = Residency(UNTIED, PLAN).buffers
    weights = [arena.buffer("param", number) for number in range(counts["param"])]
    assert not any(unit.any() for unit in weights)
    assert arena.slab.any()
    assert arena.scratch(torch.Size((1 << 12, 1 << 10))).shape == (1 << 12, 1 << 10)
