"""Predicted against measured peak memory of training runs on this GPU.

    python bench/memory_gpu.py [--json FILE] [--only llama]

Each run takes 3 steps through `python -m llmb.train` in a process of its own; measured is its
torch.cuda.max_memory_allocated, predicted are the peaks of the dry run and of the closed form. Aim: within 5 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from llmb.config.overrides import from_arguments
from llmb.config.recipe import load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import to_json
from llmb.config.spec import RunConfig
from llmb.events import StepDone, read
from llmb.launch.command import engine_environment
from llmb.launch.torch_process import run_dry_run
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.report.table import render

# workload, size, dtype, proxy, settings: gradients accumulate over 2 micro-batches, as in the recipes
RUNS = [
    ("pretrain_llama3.1", "1b", "bf16", None, ["gbs=4"]),
    ("pretrain_llama3.1", "8b", "bf16", None, ["gbs=2"]),
    ("pretrain_llama3.1", "8b", "fp8", None, ["gbs=2"]),
    ("pretrain_nemotronh", "8b", "bf16", None, ["gbs=2"]),
    ("pretrain_grok1", "314b", "bf16", "true-width", ["gbs=2", "seqlen=4096"]),
    ("pretrain_deepseek-v3", "671b", "bf16", "true-width", ["gbs=2"]),
]
STEPS = 3
HEADER = ("run", "measured GiB", "dry run GiB", "ratio", "closed form GiB", "ratio")


def configuration(workload: str, size: str, dtype: str, proxy: str | None, settings: list[str], gpu: str) -> RunConfig:
    """One of the runs for this GPU."""
    overrides = tuple(from_arguments([*settings, f"steps={STEPS}"]))
    request = RunRequest(size=size, dtype=dtype, gpus=1, gpu=gpu, proxy=proxy, settings=overrides)
    return resolve(load_all([shipped()])[workload], request)


def measured(config: RunConfig) -> float | None:
    """The highest memory of a real run in bytes; null where it failed, and why in the output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(to_json(config))
        environment = {**os.environ, **engine_environment(config, os.environ, {})}
        done = subprocess.run([sys.executable, "-m", "llmb.train", str(path)], env=environment, cwd=folder,
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            print(f"{config.name} failed:\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}", flush=True)
            return None
        steps = [event for event in read(Path(folder, "events.rank0.jsonl")) if isinstance(event, StepDone)]
        return max(step.memory_bytes for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--gpu-type", default="h200")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = []
    for workload, size, dtype, proxy, settings in RUNS:
        if options.only not in workload:
            continue
        config = configuration(workload, size, dtype, proxy, settings, options.gpu_type)
        dry_run_bytes, estimate_bytes, real = (
            run_dry_run(config).peak_bytes,
            memory_estimate(config).total,
            measured(config),
        )
        ratios = (None, None) if real is None else (dry_run_bytes / real, estimate_bytes / real)
        real_gib = None if real is None else real / GIB
        lines.append((config.name, real_gib, dry_run_bytes / GIB, ratios[0], estimate_bytes / GIB, ratios[1]))
        print(render(HEADER, lines[-1:]), flush=True)
    print("\n" + render(HEADER, lines))
    if options.json:
        options.json.write_text(json.dumps([dict(zip(("run", "measured_gib", "dry_run_gib", "dry_run_ratio",
                                           "closed_form_gib", "closed_form_ratio"), line, strict=True))
                                            for line in lines]))  # fmt: skip


if __name__ == "__main__":
    main()
