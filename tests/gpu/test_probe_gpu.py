"""The probe on a GPU: GEMMs of a model in every dtype, launch latency, collectives of one rank over NCCL."""

from dataclasses import replace

import torch
from cuda_checks import GPU, NEEDS_GPU

from llmb.formats.device_facts import device_facts
from llmb.offload import machine_probe
from llmb.perfmodel.probe.bus_bandwidth import OPERATIONS
from llmb.runtime.probe.collective_probe import measure_collectives
from llmb.runtime.provenance import device_uuid

pytestmark = NEEDS_GPU


@torch.no_grad()
def test_every_figure_has_a_spread():
    sizes = replace(machine_probe.ON_GPU, tokens=2048, past=2048, copied=1 << 26, seconds=0.3)
    measured = machine_probe.measure(GPU, sizes, [(2048, 4096, 4096)])
    details = measured.pop("details")
    assert all(rate > 0 for name, rate in measured.items() if name != "fp8_tflops")
    assert details["gemm_tflops"].keys() >= {"fp32", "fp16"}
    for spread in (*details["gemm_tflops"].values(), details["launch_us"], details["host_memory_gbs"]):
        assert 0 < spread["p5"] <= spread["median"] <= spread["p95"]
    assert details["launch_us"]["median"] <= details["launch_and_wait_us"]["median"]


def test_collectives_over_nccl(nccl: None):
    measured = measure_collectives(GPU, (1 << 16,))
    assert (measured.backend, measured.ranks, measured.nodes) == ("nccl", 1, 1)
    assert [rate.operation for rate in measured.rates] == list(OPERATIONS)


def test_driver_reports_the_power_limit_of_this_gpu():
    facts = device_facts(device_uuid(GPU))
    assert facts.driver is not None
    assert facts.power_limit_w is None or facts.power_limit_w > 0
