"""Probe of the links between ranks: all-reduce, all-gather, reduce-scatter and all-to-all by size.

    torchrun --nproc-per-node 8 -m llmb.runtime.probe.collective_probe cuda     # or cpu: gloo
    srun ... bash -c "$RANK_WRAPPER" rank python -m llmb.runtime.probe.collective_probe cuda

Progress on stderr, one line of JSON on stdout, both of rank 0. As in NCCL-tests, a repetition is several calls back to
back, and its time is the mean over ranks.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from llmb.perfmodel.probe.bus_bandwidth import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    OPERATIONS,
    REDUCE_SCATTER,
    bandwidths_gbs,
)
from llmb.perfmodel.probe.probe_record import CollectiveRate, Collectives, spread
from llmb.runtime.flat_collectives import all_gather_flat, reduce_scatter_flat
from llmb.runtime.probe.repeated_calls import finish

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "cuda": (4 * KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB, 1024 * MIB),
    "cpu": (4 * KIB, 64 * KIB, MIB, 8 * MIB),
}
REPETITIONS = {"cuda": 20, "cpu": 7}
SMALL = 16 * MIB  # up to this size a repetition is several calls, so that launching does not dominate
CALLS = {"cuda": 20, "cpu": 3}  # of such a repetition
WARM_UP = 2  # repetitions: connections are set up by the first calls
ELEMENT = 4  # bytes: fp32, which gloo can reduce too


def measure_collectives(device: torch.device, sizes: tuple[int, ...]) -> Collectives:
    """Measure every collective at every size among all ranks of the default group."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    hosts: list[str | None] = [None] * ranks
    dist.all_gather_object(hosts, os.environ.get("LLMB_HOST") or socket.gethostname())
    rates = []
    for operation in OPERATIONS:
        for size in sizes:
            rate = _measure(operation, size, device)
            rates.append(rate)
            if rank == 0:
                _say(f"{operation.replace('_', '-')} of {size >> 10} KiB, {ranks} ranks: {rate.busbw_gbs:.3g} GB/s bus")
    return Collectives(backend=dist.get_backend(), ranks=ranks, nodes=len(set(hosts)), rates=tuple(rates))


def _measure(operation: str, size: int, device: torch.device) -> CollectiveRate:
    ranks = dist.get_world_size()
    size = max(1, size // (ELEMENT * ranks)) * ELEMENT * ranks  # equal shards
    action = _collective(operation, size // ELEMENT, device)
    calls = CALLS[device.type] if size <= SMALL else 1
    local = []
    for repetition in range(WARM_UP + REPETITIONS[device.type]):
        dist.barrier()
        finish(device)
        start = time.perf_counter()
        for _ in range(calls):
            action()
        finish(device)
        if repetition >= WARM_UP:
            local.append((time.perf_counter() - start) / calls)
    by_rank: list[list[float]] = [[] for _ in range(ranks)]
    dist.all_gather_object(by_rank, local)
    seconds = spread(sum(times) / ranks for times in zip(*by_rank, strict=True))
    assert seconds is not None
    algorithm, bus = bandwidths_gbs(operation, ranks, size, seconds.median)
    return CollectiveRate(operation=operation, bytes=size, seconds=seconds, algbw_gbs=algorithm, busbw_gbs=bus)


def _collective(operation: str, numel: int, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(numel, dtype=torch.float32, device=device)
    shard = torch.zeros(numel // dist.get_world_size(), dtype=torch.float32, device=device)
    if operation == ALL_REDUCE:
        return lambda: dist.all_reduce(whole)
    if operation == ALL_GATHER:
        return lambda: all_gather_flat(whole, shard)
    if operation == REDUCE_SCATTER:
        return lambda: reduce_scatter_flat(shard, whole)
    assert operation == ALL_TO_ALL
    sent = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(whole, sent)


def _say(line: str) -> None:
    print(f"probe: {line}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Measure among the ranks that a launcher started; a failure is one line."""
    kind = arguments[0] if arguments else "cpu"
    try:
        if kind == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            device = torch.device("cpu")
            dist.init_process_group("gloo")
        measured = measure_collectives(device, SIZES[kind])
    except (RuntimeError, ValueError) as error:  # NCCL, no driver, out of memory, no launcher
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    if dist.get_rank() == 0:
        print(json.dumps(asdict(measured)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
