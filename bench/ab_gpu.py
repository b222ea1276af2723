"""Does `llmb-run ab` call equal configurations different, and does it find 1 %? Its decision code on short runs here.

    python bench/ab_gpu.py [--trials 40] [--json FILE]        # under 9 minutes on an H200
    python bench/ab_gpu.py --tiny --trials 2                  # a tiny Llama on a CPU: shows only that it runs

A run builds a small Llama anew, as a process of `ab` does, and trains a few steps; its time is the median step. Process
starts are left out, which take most of the time of short runs and do not enter step times.

1. identical: trials of A against A, by `paired_test` with the default repeats    aim: at most 5 % called different
2. micro-batch: of all pairs of micro-batches with the same global batch, the one whose difference is nearest to 1 %, as
   longer runs of each measured it first; one trial                               aim: called different
"""

import argparse
import gc
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median

import torch
from measure.bench_report import BenchReport

from llmb.cli.compare.ab_command import REPEATS
from llmb.cli.run_options import load_recipes
from llmb.config.model import Model
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.results.compare.paired_test import PairedTest, paired_test
from llmb.train.loop import TrainJob, build_training, train_step
from llmb.train.parallel.mesh import Mesh

SOUGHT = 0.01  # relative difference of the micro-batch trial
WARMUP_STEPS = 2
SCREENING_RUNS = 5  # of each micro-batch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama and its batch."""

    layers: int
    hidden: int
    seqlen: int
    gbs: int
    steps: int  # measured in a run
    vocab: int = 32_000


# Wide enough that the host, whose times scatter by 10 %, never delays the GPU.
IDENTICAL = Shape(layers=2, hidden=4096, seqlen=2048, gbs=2, steps=8, vocab=8000)
MICRO_BATCHES = Shape(layers=8, hidden=2048, seqlen=2048, gbs=16, steps=8)
TINY = Shape(layers=2, hidden=64, seqlen=32, gbs=4, steps=4, vocab=128)


class ShortRuns:
    """Runs of one shape in this process."""

    def __init__(self, shape: Shape, device: torch.device):
        self.shape, self._mesh = shape, Mesh(0, 1, device)
        self.count = 0

    def step_s(self, mbs: int) -> float:
        """Build the model, train, and return the median time of a step."""
        config = run_config(self.shape, mbs, self._mesh.device)
        assert isinstance(config.workload, Training)
        job, parts, optimizer = build_training(TrainJob(config, config.workload, self._mesh))
        times = []
        for step in range(1, config.workload.steps + 1):
            start = time.perf_counter()
            train_step(job, parts, optimizer, step)  # ends with a synchronization
            times.append(time.perf_counter() - start)
        del job, parts, optimizer
        gc.collect()
        self.count += 1
        return median(times[WARMUP_STEPS:])


@cache
def run_config(shape: Shape, mbs: int, device: torch.device) -> RunConfig:
    """Return a configuration with this micro-batch."""
    full: Model = load_recipes()["pretrain_llama3.1"].model("8b")
    head_dim = min(128, shape.hidden // 4)
    model = replace(
        full, layers=shape.layers, hidden=shape.hidden, heads=shape.hidden // head_dim, head_dim=head_dim,
        kv_heads=max(1, shape.hidden // head_dim // 4), ffn=7 * shape.hidden // 2, vocab=shape.vocab,
    )  # fmt: skip
    steps = WARMUP_STEPS + shape.steps
    return RunConfig(
        name=f"ab_mbs{mbs}", target="pretrain_llama3.1", size="8b", proxy="small", model=model, parallel=Parallel(),
        machine=Machine(gpu="cpu" if device.type == "cpu" else "h200", gpus=1, gpus_per_node=1),
        precision=Precision(dtype="fp32" if device.type == "cpu" else "bf16"),
        workload=Training(seqlen=shape.seqlen, mbs=mbs, gbs=shape.gbs, ga=shape.gbs // mbs, steps=steps,
                          window=(WARMUP_STEPS + 1, steps), lr=1e-4),
    )  # fmt: skip


def identical(runs: ShortRuns, trials: int, limit_s: float) -> list[PairedTest]:
    """Return trials of A against A, as many as end within the limit."""
    mbs, began = runs.shape.gbs // 2, time.perf_counter()
    runs.step_s(mbs)  # kernels are compiled and chosen
    tests: list[PairedTest] = []
    while len(tests) < trials and time.perf_counter() - began < limit_s:
        tests.append(paired_test(lambda _: runs.step_s(mbs), REPEATS))
    return tests


def nearest_pair(times: dict[int, float]) -> tuple[int, int]:
    """Return the micro-batches whose speeds differ by about SOUGHT: the slower, then the faster."""
    pairs = [sorted(pair, key=lambda mbs: -times[mbs]) for pair in combinations(times, 2)]
    slow, fast = min(pairs, key=lambda pair: abs(times[pair[0]] / times[pair[1]] - 1 - SOUGHT))
    return slow, fast


def micro_batches(runs: ShortRuns) -> tuple[dict[int, float], tuple[int, int], PairedTest]:
    """Return the time of each micro-batch, the pair that was chosen, and its trial."""
    sizes = [mbs for mbs in (1, 2, 4, 8, 16) if mbs <= runs.shape.gbs]
    for mbs in sizes:
        runs.step_s(mbs)
    times = {mbs: median(runs.step_s(mbs) for _ in range(SCREENING_RUNS)) for mbs in sizes}
    slow, fast = nearest_pair(times)
    return times, (slow, fast), paired_test(lambda side: runs.step_s(slow if side == "A" else fast), REPEATS)


def line(test: PairedTest) -> str:
    """Return the outcome of a trial."""
    look = test.last
    interval = f"{look.low:.5f} to {look.high:.5f}"
    return f"{test.outcome}: B over A {look.ratio:.5f} ({interval}) after {look.pairs} pairs, floor {test.floor:.2%}"


def main() -> int:
    """Print both parts; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--limit-s", type=float, default=400.0, help="of the identical trials together; default: 400")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --tiny runs anywhere")
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    report = BenchReport(json=options.json)

    report.print_heading("identical configurations")
    runs = ShortRuns(TINY if options.tiny else IDENTICAL, device)
    tests = identical(runs, options.trials, options.limit_s)
    report.record("identical", *map(asdict, tests))
    for test in tests:
        print(line(test))
    different = sum(test.outcome == "different" for test in tests)
    print(f"{different} of {len(tests)} trials called different (aim: at most 5 %), {runs.count} runs", flush=True)

    report.print_heading("a changed micro-batch")
    times, (slow, fast), test = micro_batches(ShortRuns(TINY if options.tiny else MICRO_BATCHES, device))
    report.record("micro-batch", {"step_s": times, "mbs": [slow, fast]} | asdict(test))
    print("median step: " + ", ".join(f"mbs {mbs} {1e3 * seconds:.2f} ms" for mbs, seconds in times.items()))
    print(f"A mbs {slow}, B mbs {fast}, {times[slow] / times[fast] - 1:.2%} apart at first: {line(test)}", flush=True)
    report.print_heading("done")
    return 0 if options.tiny or (different <= 0.05 * len(tests) and test.outcome == "different") else 1


if __name__ == "__main__":
    sys.exit(main())
