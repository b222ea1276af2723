"""Collectives among two real ranks over gloo, and repeated calls of a device that is slow at first."""

import itertools

import pytest
import torch
import torch.distributed as dist
from forked_ranks import on_ranks

from llmb.perfmodel.probe.bus_bandwidth import OPERATIONS, bandwidths_gbs
from llmb.runtime.probe import collective_probe, host_probe
from llmb.runtime.probe.repeated_calls import Measurement, repeat_calls

CPU = torch.device("cpu")
SIZES = (1000, 1 << 16)


def measured_on(rank: int):
    dist.init_process_group("gloo")
    return collective_probe.measure_collectives(CPU, SIZES)


def test_every_collective_is_measured_at_every_size(monkeypatch):
    monkeypatch.setattr(collective_probe, "REPETITIONS", {"cpu": 3})
    first, second = on_ranks(2, measured_on)
    assert first == second  # times are means over ranks
    assert (first.backend, first.ranks, first.nodes) == ("gloo", 2, 1)
    assert [rate.operation for rate in first.rates] == [name for name in OPERATIONS for _ in SIZES]
    assert {rate.bytes for rate in first.rates} == {1000, 1 << 16}
    for rate in first.rates:
        assert rate.seconds.n == 3
        assert (rate.algbw_gbs, rate.busbw_gbs) == bandwidths_gbs(rate.operation, 2, rate.bytes, rate.seconds.median)


def test_calls_before_the_device_has_settled_are_discarded(monkeypatch):
    """A clock that says 1 s for each of the first calls, 3 s for those after a third of the duration."""
    stamps = itertools.accumulate(itertools.chain([0.0], [1.0] * 4, itertools.repeat(3.0)))
    monkeypatch.setattr("llmb.runtime.probe.repeated_calls.time.perf_counter", lambda: next(stamps))
    measured = repeat_calls(lambda: None, CPU, 12.0, amount=6.0)
    assert measured == Measurement(6.0, (3.0, 3.0, 3.0))
    assert measured.rate == 2.0
    assert measured.rates(1.0).median == 2.0


def test_latency_is_that_of_one_launch():
    measured = Measurement(1000, (0.004, 0.006, 0.005))
    assert measured.times(1e-6).median == pytest.approx(5.0)
    assert host_probe.launches(CPU, 0.01).amount == host_probe.LAUNCHES
