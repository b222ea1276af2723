"""A GPU without fitted efficiencies, described by what `llmb-run probe` measured on it.

Predictors multiply peaks with fractions that were measured on an H200. Peaks are therefore chosen so that the fractions
give the measured rates: they are not those of a data sheet, and no MFU may be computed from them.
"""

from dataclasses import replace

from llmb.perfmodel.hardware import GPUS, gpu
from llmb.perfmodel.offload.machine_rates import H200, Rates
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, Device


def measured_device(rates: Rates) -> Device:
    """Return a single GPU with the measured rates; nothing is known of its links to others."""
    h200, row = GPUS["h200"], gpu(rates.gpu)
    assert h200.memory_bandwidth is not None
    assert h200.host_bandwidth is not None
    peaks = {"bf16": h200.peak_flops["bf16"] * rates.matmul_tflops / H200.matmul_tflops}
    if rates.fp8_tflops is not None and H200.fp8_tflops is not None:
        peaks["fp8"] = h200.peak_flops["fp8"] * rates.fp8_tflops / H200.fp8_tflops
    fabric = row.fabric or FABRICS["h200"]
    return Device(
        key=rates.gpu,
        gpu=replace(
            row,
            peak_flops=peaks,
            memory_bandwidth=h200.memory_bandwidth * rates.memory_gbs / H200.memory_gbs,
            link_bandwidth=h200.link_bandwidth,  # of collectives, of which a single GPU has none
            host_bandwidth=h200.host_bandwidth * rates.link_in_gbs / H200.link_in_gbs,
            source=rates.source,
        ),
        fabric=replace(fabric, family="hopper", link_domain=1, network=None, clock=1.0),
    )
