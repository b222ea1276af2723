"""Dry run of every row of every training recipe without its hardware, against the closed forms; or against real runs.

    python bench/dry_run.py [--only llama] [--all-scales] [--json FILE]
    python bench/dry_run.py --measure h200 [--only llama] [--json FILE]         # on a GPU of this type

A line a row, at its smallest and largest scale: seconds of the dry run with the start of its process (aim: 20), the
peak of one rank, whether that fits its GPU, and the closed forms as a fraction of what the dry run counted: peak memory
and traffic (aim: within 2 %), parameters and FLOPs (exactly 1).

With --measure some runs take 3 steps on the GPU, each through `python -m llmb.train` in a process of its own: measured
is its torch.cuda.max_memory_allocated, predicted are the peaks of the dry run and of the closed form. Aim: within 5 %.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.train_process import trained_steps

from llmb.config.overrides import from_arguments
from llmb.config.recipe import expand_gpus, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig
from llmb.errors import LaunchError
from llmb.launch.torch_process import run_dry_run
from llmb.perfmodel.communication import step_traffic
from llmb.perfmodel.dry_run_summary import DryRunSummary
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.shards import rank_flops, rank_parameters
from llmb.report.table import render

HEADER = ("run", "gpu", "s", "peak GiB", "fits", "closed form", "parameters", "FLOPs", "traffic")
SMALL = 2**20  # bytes per call: collectives of scalars and counts have no formula


def rows(only: str, all_scales: bool) -> Iterator[RunConfig]:
    """Every row of the training recipes in each of its dtypes."""
    for recipe in load_all([shipped()]).values():
        for row in recipe.rows if recipe.kind == "training" and only in recipe.workload else ():
            scales = expand_gpus(row["gpus"])
            dtypes = row["dtype"] if isinstance(row["dtype"], list) else [row["dtype"]]
            for dtype in dtypes:
                for gpus in scales if all_scales else dict.fromkeys((scales[0], scales[-1])):
                    yield resolve(recipe, RunRequest(size=row["size"], dtype=dtype, gpus=gpus, gpu=row["gpu"]))


# workload, size, dtype, proxy, settings: gradients accumulate over 2 micro-batches, as in the recipes
MEASURED = [
    ("pretrain_llama3.1", "1b", "bf16", None, ["gbs=4"]),
    ("pretrain_llama3.1", "8b", "bf16", None, ["gbs=2"]),
    ("pretrain_llama3.1", "8b", "fp8", None, ["gbs=2"]),
    ("pretrain_nemotronh", "8b", "bf16", None, ["gbs=2"]),
    ("pretrain_grok1", "314b", "bf16", "true-width", ["gbs=2", "seqlen=4096"]),
    ("pretrain_deepseek-v3", "671b", "bf16", "true-width", ["gbs=2"]),
]
MEASURED_HEADER = ("run", "measured GiB", "dry run GiB", "ratio", "closed form GiB", "ratio")


def measured_runs(only: str, gpu: str) -> Iterator[RunConfig]:
    """Runs of three steps that fit one GPU."""
    for workload, size, dtype, proxy, settings in MEASURED:
        if only in workload:
            overrides = tuple(from_arguments([*settings, "steps=3"]))
            request = RunRequest(size=size, dtype=dtype, gpus=1, gpu=gpu, proxy=proxy, settings=overrides)
            yield resolve(load_all([shipped()])[workload], request)


def measured_line(config: RunConfig) -> tuple[Any, ...]:
    """Return the highest memory of a real run beside both predictions; null where it failed, and why in the output."""
    predicted = run_dry_run(config).peak_bytes, memory_estimate(config).total
    try:
        with tempfile.TemporaryDirectory() as folder:
            real = max(step.memory_bytes or 0 for step in trained_steps(config, Path(folder)))
    except LaunchError as error:
        print(f"{config.name}: {error}", flush=True)
        return config.name, None, predicted[0] / GIB, None, predicted[1] / GIB, None
    return config.name, real / GIB, *(each for peak in predicted for each in (peak / GIB, peak / real))


def stage(config: RunConfig, summary: DryRunSummary) -> int:
    """Return the pipeline stage of the rank of the dry run."""
    return summary.rank * config.parallel.pp // config.parallel.world_size


def worst_traffic(config: RunConfig, summary: DryRunSummary) -> float | None:
    """Return the worst ratio of bytes by closed form to bytes counted, over all collectives; None without any."""
    expected_bytes = {
        (collective.kind, collective.dimension): collective.bytes
        for collective in step_traffic(config, stage(config, summary))
    }
    large = [
        collective
        for collective in summary.collectives
        if collective.bytes >= SMALL * collective.count and collective.kind != "all-reduce"
    ]
    ratios = [expected_bytes.get((collective.kind, collective.dimension), 0) / collective.bytes for collective in large]
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--all-scales", action="store_true")
    parser.add_argument("--measure", metavar="GPU", help="run on this GPU what fits it, and compare its memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines, results = [], []
    if options.measure:
        for config in measured_runs(options.only, options.measure):
            lines.append(measured_line(config))
            print(render(MEASURED_HEADER, lines[-1:]), flush=True)
        print("\n" + render(MEASURED_HEADER, lines))
        if options.json:
            options.json.write_text(json.dumps(lines))
        return
    for config in rows(options.only, options.all_scales):
        began = time.perf_counter()
        summary = run_dry_run(config)
        seconds, estimate, pp_stage = time.perf_counter() - began, memory_estimate(config), stage(config, summary)
        fits = None if estimate.device_budget is None else summary.peak_bytes <= estimate.device_budget
        line = (
            config.name, config.machine.gpu, seconds, summary.peak_bytes / GIB, fits,
            estimate.total / summary.peak_bytes,
            rank_parameters(config, pp_stage) / summary.parameters, rank_flops(config, pp_stage) / summary.flops,
            worst_traffic(config, summary),
        )  # fmt: skip
        lines.append(line)
        results.append({**dict(zip(HEADER, line, strict=True)), "dry_run": to_plain(summary)})
        print(render(HEADER, [line]).splitlines()[-1], flush=True)
    print("\n" + render(HEADER, lines))
    farthest = max(lines, key=lambda line: abs(line[5] - 1))
    print(f"\nslowest {max(line[2] for line in lines):.1f} s; closed form farthest: {farthest[5]:.4f} ({farthest[0]})")
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
