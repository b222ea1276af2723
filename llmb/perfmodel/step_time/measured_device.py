"""A GPU described by what `llmb-run probe` measured on it, with or without fitted efficiencies.

    measured_device(rates)                  of one file
    stored_device("tesla-t4", install)      of this machine, or of the last one with this GPU; none: not measured

Predictors multiply peaks with fractions of them: of a fitted GPU they are scaled by its measured rates over the known
ones, of any other chosen so that the fractions of an H200 give the measured rates. They are then not those of a data
sheet, and no MFU may be computed from them.
"""

from dataclasses import replace
from pathlib import Path

from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GPUS, gpu
from llmb.perfmodel.offload.machine_rates import H200, Rates, known_rates, measured_rates
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


def stored_device(key: str, install: Path) -> Device | None:
    """Return the GPU as `probe` measured it here; None: it did not."""
    rates = measured_rates(key, install)
    return None if rates is None else measured_device(rates)


def unfitted_device(key: str, install: Path, gpus: int, dtype: str) -> Device:
    """Return a GPU without fitted efficiencies, which only a probe describes; an error says what is missing.

    On several of them the links would have to be known, and of a dtype its GEMMs.
    """
    on = stored_device(key, install)
    if on is None:
        return device(key)  # which names the fitted ones, and the probe
    if gpus > 1:
        raise ConfigError(f"rates measured on {key} predict runs on one GPU, as nothing is known of its links")
    if dtype not in on.gpu.peak_flops and dtype != "nvfp4":
        raise ConfigError(f"the rate of {dtype} GEMMs was not measured on {key}; use bf16")
    return on
