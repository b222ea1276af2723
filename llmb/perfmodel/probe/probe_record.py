"""Record of `llmb-run probe` on a machine: the rates that plans use, and beside them every figure with its spread.

    $LLMB_INSTALL/.llmb/rates/h200.json          of the last machine with this GPU that was measured
    $LLMB_INSTALL/.llmb/rates/h200@n1.json       of the machine n1

A file holds the fields of machine_rates.Rates and `details`; files of older versions have no details.
"""

import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.config.serialization import build, read_json
from llmb.perfmodel.metrics import percentile
from llmb.perfmodel.offload.machine_rates import DETAILS, Rates, machine_path, rates_path, read_rates
from llmb.perfmodel.probe.bus_bandwidth import ALL_GATHER, REDUCE_SCATTER


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Repeated measurements: the middle, and where nine of ten lie."""

    median: float
    p5: float
    p95: float
    n: int


@dataclass(frozen=True, kw_only=True)
class CollectiveRate:
    """One collective of one size; bandwidths by the definitions of NCCL-tests, at the median time."""

    operation: str
    bytes: int
    seconds: Spread
    algbw_gbs: float
    busbw_gbs: float


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Collectives among all ranks."""

    backend: str  # nccl, gloo
    ranks: int
    nodes: int
    rates: tuple[CollectiveRate, ...]


@dataclass(frozen=True, kw_only=True)
class ProbeDetails:
    """Every figure with its spread, and the machine. Null: not measured."""

    host: str
    gpu_name: str
    gpu_uuid: str | None = None
    measured_at: str
    device: dict[str, Any] = field(default_factory=dict)  # power limit, clocks, ...: fields of DeviceFacts
    model: str | None = None  # whose shapes the GEMMs have
    gemm_tflops: dict[str, Spread] = field(default_factory=dict)  # at these shapes, by dtype
    rates: dict[str, Spread] = field(default_factory=dict)  # by the names of Rates
    launch_us: Spread | None = None  # of one of many small kernels, back to back
    launch_and_wait_us: Spread | None = None  # of one, until the host knows that it is done
    host_memory_gbs: Spread | None = None  # read and written, by all cores of this process
    collectives: Collectives | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeRecord:
    """One file."""

    rates: Rates
    details: ProbeDetails | None = None


def spread(samples: Iterable[float]) -> Spread | None:
    """Return the spread of repeated measurements; None without any."""
    values = list(samples)
    median, p5, p95 = (percentile(values, q) for q in (50, 5, 95))
    if median is None or p5 is None or p95 is None:
        return None
    return Spread(median=median, p5=p5, p95=p95, n=len(values))


def bus_gbs(collectives: Collectives | None) -> float | None:
    """Return the bus bandwidth of large messages among the GPUs of a node, which training depends on.

    Of all-gather and reduce-scatter, the slower: switches that add up make an all-reduce look faster than its links.
    """
    if collectives is None or collectives.nodes > 1 or collectives.ranks < 2 or collectives.backend != "nccl":
        return None
    rates = [rate for rate in collectives.rates if rate.operation in (ALL_GATHER, REDUCE_SCATTER)]
    largest = max((rate.bytes for rate in rates), default=0)
    return min((rate.busbw_gbs for rate in rates if rate.bytes == largest), default=None)


def read_probe(path: Path) -> ProbeRecord:
    """Read a file of this or an older version; a ConfigError says what is wrong with it."""
    rates, data = read_rates(path), read_json(path).get(DETAILS)
    return ProbeRecord(rates=rates, details=None if data is None else build(ProbeDetails, data, f"{path}: {DETAILS}"))


def stored_probe(gpu: str, install: Path, host: str | None = None) -> ProbeRecord | None:
    """Return what was measured on a host, else on the last machine with this GPU; None: nothing was."""
    paths = (machine_path(install, gpu, host or socket.gethostname()), rates_path(install, gpu))
    return next((read_probe(path) for path in paths if path.exists()), None)
