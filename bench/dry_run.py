"""Dry run of every row of every training recipe without its hardware, against the closed forms.

    python bench/dry_run.py [--only llama] [--all-scales] [--json FILE]

A line a row, at its smallest and largest scale: seconds of the dry run with the start of its process (aim: 20), the
peak of one rank, whether that fits its GPU, and the closed forms as a fraction of what the dry run counted: peak memory
and traffic (aim: within 2 %), parameters and FLOPs (exactly 1).
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from llmb.config.recipe import expand_gpus, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines, results = [], []
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
