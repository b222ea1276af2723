"""What do checksums cost? A checkpoint of training is loaded with and without the check of its files. No GPU.

    python bench/checkpoint_load.py [--json FILE] [--rounds 5] [--warm] [--wide]
    python bench/checkpoint_load.py --tiny      # a very small model: shows only that it runs

A Llama of 125 million parameters with fp32 weights and moments, 300 tensors of 1.5 GB together, from the disk of
TMPDIR, as after a failure; `--warm`: from its page cache. `--wide`: fewer and larger tensors, 1.9 GB, so that less of
the load is headers, which one thread reads while other cores are idle. Three loads are compared: by torch's own reader,
which checks nothing; by ours without hashes; by ours. Torch's is timed in processes of its own: whether memory that was
freed is used again depends on all that a process did before, and changes its time several times over. The other two
alternate in one process; the cost of hashes is the median over pairs, with its 95 % interval, as loads of different
minutes differ by more. One OpenMP thread each, as torchrun gives a rank: waiting ones make copies take up to ten times
as long on a busy machine. CPU seconds are the fewest, of all threads. The aim: at most 5 % over a load without hashes.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from measure.bench_report import BenchReport

from llmb.config.model import Model
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.runtime.checkpoint_folder import complete_checkpoints
from llmb.train.loop import TrainJob, build_training
from llmb.train.parallel.mesh import Mesh
from llmb.train.train_checkpoint import Checkpointer

TINY, NARROW, WIDE = (64, 2, 256), (768, 8, 32000), (2048, 2, 6000)  # hidden size, layers, vocabulary


def config_of(hidden: int, layers: int, vocab: int) -> RunConfig:
    """Return the configuration of a run that writes a checkpoint after its first step."""
    model = Model(
        name="bench", architecture="llama", layers=layers, hidden=hidden, heads=hidden // 64, kv_heads=hidden // 64,
        head_dim=64, ffn=4 * hidden, vocab=vocab,
    )  # fmt: skip
    return RunConfig(
        name="bench", target="bench", size="bench", machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1), model=model,
        parallel=Parallel(), precision=Precision(dtype="fp32"),
        workload=Training(seqlen=8, mbs=1, gbs=1, ga=1, checkpoint_every=1),
    )  # fmt: skip


class NoCheck:
    """Stands in for the check of a checkpoint's files."""

    def __init__(self, *_arguments: object):
        pass

    def damage(self) -> None:
        return None


class Seconds(NamedTuple):
    """Time of one load."""

    wall: float
    cpu: float  # of all threads


LOADS_PER_PROCESS = 6
PROCESSES = (("torch's reader",), ("without hashes", "checked"))  # loads that alternate in each
CHECKPOINTER = "llmb.train.train_checkpoint"
CHECKSUMS = "llmb.runtime.checksums"
LOADS: dict[str, dict[str, Callable[..., object]]] = {  # what is replaced for each
    "torch's reader": {
        f"{CHECKPOINTER}.CheckpointCheck": NoCheck,
        f"{CHECKPOINTER}.CheckpointReader": lambda path, _check: dcp.FileSystemReader(path),
    },
    "without hashes": {
        f"{CHECKSUMS}.file_checksum.BlockHashes.partial_result": lambda *_arguments: (),
        f"{CHECKSUMS}.file_checksum.BlockHashes.add": lambda *_arguments: None,
        f"{CHECKSUMS}.checkpoint_checksums.CheckpointCheck._compare": lambda *_arguments: None,
    },
    "checked": {},
}


def time_loads(
    kinds: Sequence[str],
    checkpointer: Checkpointer,
    checkpoint: Path,
    warm: bool,
    queue: "SimpleQueue[dict[str, list[Seconds]]]",
) -> None:
    """Put the times of loads into the queue, after one of each kind that allocates what stays."""
    seconds: dict[str, list[Seconds]] = {kind: [] for kind in kinds}
    for number in range(1 + LOADS_PER_PROCESS):
        for kind in kinds if number % 2 else reversed(kinds):
            seconds[kind].append(time_load(kind, checkpointer, checkpoint, warm))
    queue.put({kind: times[1:] for kind, times in seconds.items()})


def time_load(kind: str, checkpointer: Checkpointer, checkpoint: Path, warm: bool) -> Seconds:
    """Return the time of a load."""
    with ExitStack() as stack:
        for replaced, by in LOADS[kind].items():
            stack.enter_context(patch(replaced, by))
        if not warm:
            drop_from_page_cache(checkpoint)
        began = time.perf_counter(), time.process_time()
        checkpointer.load(checkpoint)
        return Seconds(time.perf_counter() - began[0], time.process_time() - began[1])


def drop_from_page_cache(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each kind of load, with 6 loads each")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--wide", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = config_of(*(TINY if options.tiny else WIDE if options.wide else NARROW))
    assert isinstance(config.workload, Training)
    job, parts, optimizer = build_training(TrainJob(config, config.workload, Mesh(0, 1, torch.device("cpu"))))
    seconds: dict[str, list[Seconds]] = {name: [] for name in LOADS}
    processes = multiprocessing.get_context("fork")  # this process starts no threads that they would miss
    with TemporaryDirectory() as name:
        folder = Path(name)
        with Checkpointer(folder, config, config.workload, None, job.mesh, parts, optimizer) as checkpointer:
            optimizer.init_state()
            checkpointer.after_step(1)
        (checkpoint,) = complete_checkpoints(folder / "checkpoints")
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        for _ in range(options.rounds):
            for kinds in PROCESSES:
                queue = processes.SimpleQueue()
                arguments = (kinds, checkpointer, checkpoint, options.warm, queue)
                process = processes.Process(target=time_loads, args=arguments)
                process.start()
                for kind, times in queue.get().items():
                    seconds[kind] += times
                process.join()
    report = BenchReport(json=options.json)
    report.record("loads", {"bytes": size, "seconds": seconds})
    header = ("load", "median s", "quartiles", "fastest", "CPU s", "over torch's reader")
    report.print_table(f"Load of a checkpoint of {size / 1e9:.3f} GB", header, [row(kind, seconds) for kind in LOADS])
    print(f"\nCost of the hashes: {hash_cost(seconds['without hashes'], seconds['checked'])}")
    return 0


def row(kind: str, seconds: dict[str, list[Seconds]]) -> tuple[str, ...]:
    """Return the times of a kind of load."""
    wall = sorted(time.wall for time in seconds[kind])
    low, middle, high = statistics.quantiles(wall, n=4)
    over_torch = middle / statistics.median(time.wall for time in seconds["torch's reader"]) - 1
    cpu = min(time.cpu for time in seconds[kind])
    return (
        kind, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{wall[0]:.3f}", f"{cpu:.3f}", f"{100 * over_torch:+.0f} %"
    )  # fmt: skip


def hash_cost(unchecked: list[Seconds], checked: list[Seconds]) -> str:
    """Describe what hashes cost, over pairs of neighbouring loads: the ranks of its 95 % interval follow a binomial."""
    costs = sorted(100 * (load.wall / base.wall - 1) for base, load in zip(unchecked, checked, strict=True))
    rank = max(0, int(len(costs) / 2 - 0.98 * len(costs) ** 0.5))
    low, high = costs[rank], costs[-1 - rank]
    fastest = 100 * (min(load.wall for load in checked) / min(load.wall for load in unchecked) - 1)
    return f"{statistics.median(costs):+.1f} % ({low:+.1f} to {high:+.1f}), fastest loads {fastest:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
