"""What do checksums cost? A checkpoint of training is loaded with and without the check of its files. No GPU.

    python bench/checkpoint_load.py [--json FILE] [--rounds 5] [--warm]
    python bench/checkpoint_load.py --tiny      # a very small model: shows only that it runs

A Llama of 125 million parameters with fp32 weights and moments, 1.5 GB, from the disk, as after a failure; `--warm`:
from the page cache. Loads alternate; the cost is the difference of the medians, and below it that of the fastest ones,
which other programs on the machine disturb least. The aim: at most 5 %.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from bench_report import BenchReport

from llmb.config.spec import Machine, Model, Parallel, Precision, RunConfig, Training
from llmb.runtime.checkpoint_folder import complete_checkpoints
from llmb.train.loop import TrainJob, build_training
from llmb.train.parallel.mesh import Mesh
from llmb.train.train_checkpoint import Checkpointer


def config_of(tiny: bool) -> RunConfig:
    """Return the configuration of a run that writes a checkpoint after its first step."""
    hidden, layers, vocab = (64, 2, 256) if tiny else (768, 8, 32000)
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


def load_seconds(checkpointer: Checkpointer, checkpoint: Path, warm: bool) -> float:
    if not warm:
        for path in checkpoint.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    checkpointer.load(checkpoint)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    config = config_of(options.tiny)
    assert isinstance(config.workload, Training)
    job, parts, optimizer = build_training(TrainJob(config, config.workload, Mesh(0, 1, torch.device("cpu"))))
    with TemporaryDirectory() as name:
        folder = Path(name)
        with Checkpointer(folder, config, config.workload, None, job.mesh, parts, optimizer) as checkpointer:
            optimizer.init_state()
            checkpointer.after_step(1)
        (checkpoint,) = complete_checkpoints(folder / "checkpoints")
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        seconds: dict[str, list[float]] = {"without": [], "with": []}
        with Checkpointer(folder, config, config.workload, None, job.mesh, parts, optimizer) as checkpointer:
            checkpointer.load(checkpoint)
            for _ in range(options.rounds):
                with patch("llmb.train.train_checkpoint.CheckpointCheck", NoCheck):
                    seconds["without"].append(load_seconds(checkpointer, checkpoint, options.warm))
                seconds["with"].append(load_seconds(checkpointer, checkpoint, options.warm))
    costs, rows = {}, []
    for name, choose in (("median", statistics.median), ("fastest", min)):
        without, checked = choose(seconds["without"]), choose(seconds["with"])
        costs[name] = checked / without - 1
        rows.append((name, f"{without:.3f}", f"{checked:.3f}", f"{100 * costs[name]:+.1f} %", "5 %"))
    report = BenchReport(json=options.json)
    report.record("loads", {"bytes": size, "seconds": seconds, "cost": costs})
    title = f"Load of a checkpoint of {size / 1e9:.3f} GB"
    report.print_table(title, ("load", "s without check", "s with check", "cost", "at most"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
