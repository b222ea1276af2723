"""A GPU described by what `llmb-run probe` measured on it, with or without fitted efficiencies.

    measured_device(rates)                  of one file
    device_of("h200", None)                 of the table

Predictors multiply peaks with fractions of them: of a fitted GPU they are scaled by its measured rates over the known
ones, of any other chosen so that the fractions of an H200 give the measured rates. They are then not those of a data
sheet, and no MFU may be computed from them.
"""

from dataclasses import replace

from llmb.perfmodel.hardware import GPUS, gpu, with_article
from llmb.perfmodel.offload.machine_rates import H200, Rates, known_rates
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, Device, device


def measured_device(rates: Rates) -> Device:
    """Return a GPU with the measured rates; of one without fitted efficiencies, nothing is known of its links."""
    if rates.gpu in FABRICS:
        return _scaled(device(rates.gpu), rates)
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


def _scaled(on: Device, rates: Rates) -> Device:
    """Return a GPU of the table whose chip is faster or slower than usual."""
    usual = known_rates(on.key)
    compute, memory = rates.matmul_tflops / usual.matmul_tflops, rates.memory_gbs / usual.memory_gbs
    peaks = {dtype: peak * compute for dtype, peak in on.gpu.peak_flops.items()}
    if rates.fp8_tflops is not None and usual.fp8_tflops is not None:
        peaks["fp8"] = on.gpu.peak_flops["fp8"] * rates.fp8_tflops / usual.fp8_tflops
    bandwidth = on.memory_bandwidth * memory
    return replace(on, gpu=replace(on.gpu, peak_flops=peaks, memory_bandwidth=bandwidth, source=rates.source))


def device_of(gpu_type: str, rates: Rates | None) -> Device:
    """Return a GPU of the table; one without fitted efficiencies as it was measured."""
    return measured_device(rates) if rates is not None and gpu_type not in FABRICS else device(gpu_type)


def ceilings_source(gpu_type: str, rates: Rates | None) -> str:
    """Return where the rates of a prediction come from."""
    if rates is None:
        return f"fractions of peaks fitted to published rows; peaks: {gpu(gpu_type).source}"
    if gpu_type in FABRICS:
        return f"fitted to published rows, scaled to this chip: {rates.source}"
    return f"`llmb-run probe`, {rates.source}; no published row of {with_article(gpu_type)} was fitted"
