"""Does a run learn the same on 1, 2 and 4 ranks? A small Llama on the shipped text, on the CPU over gloo.

    OMP_NUM_THREADS=1 python bench/rank_curves.py [--json FILE] [--plot docs/pictures/rank_curves.svg]
    OMP_NUM_THREADS=1 python bench/rank_curves.py --seeds 4 --ranks-at-once 12    # on a machine with 12 free cores

One rank and every layout are trained from the same seeds, in bf16 and fp8. Batches are the same in all runs: a seed
changes the first weights alone. Losses are averaged over 10 steps and compared over the last half of the steps. The
distance of a layout to one rank with the same seed, as a mean over seeds, must be below that of two seeds of one rank,
as a mean over pairs of seeds; this holds for the largest distance of a curve and for the mean one. `bias` is the mean
difference with its sign: a layout that only rounds differently has none beyond its standard error. Ends with exit
code 1 if a layout is further away. Layouts round and add in another order, so that their distances are not 0.
"""

import argparse
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path

from fp8_convergence import configuration, import_pyplot, losses_of, save_plot, shipped_text
from measure.bench_report import BenchReport

from llmb.config.parallel_layout import format_layout
from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, Parallel, Precision, RunConfig

DTYPES = ("bf16", "fp8")
LAYOUTS = (
    Parallel(dp=2, fsdp=True),
    Parallel(tp=2),
    Parallel(dp=2, fsdp=True, tp=2),
    Parallel(pp=2, cp=2),
)
MBS = 4
SMOOTHED = 10  # steps of a moving average
# Colours that colour-blind readers can tell apart, and dashes for those who print.
LINES = (("#0072B2", "-"), ("#E69F00", "--"), ("#009E73", "-."), ("#CC79A7", ":"))
DRAWN_SEEDS = (1, 2)
SEED_LINES = (("black", "-"), ("#777777", (0, (6, 2, 1, 2, 1, 2))))


@dataclass(frozen=True)
class Curve:
    """A run."""

    dtype: str
    parallel: Parallel
    seed: int

    @property
    def title(self) -> str:
        return f"{self.dtype}, {format_layout(self.parallel)}, seed {self.seed}"

    def config(self, base: RunConfig) -> RunConfig:
        ranks, batch = self.parallel.world_size, base.workload.gbs
        return replace(
            base,
            machine=Machine(gpu="cpu", gpus=ranks, gpus_per_node=ranks),
            parallel=self.parallel,
            precision=Precision(dtype=self.dtype),
            workload=replace(base.workload, mbs=MBS, ga=batch // MBS // self.parallel.dp, seed=self.seed),
        )


Losses = dict[Curve, list[float]]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Distances of a layout to one rank with the same seed, beside those of pairs of seeds; means over curves."""

    largest: float
    mean: float
    bias: float  # mean of layout minus one rank, over the last half of the steps and over seeds
    bias_error: float  # its standard error over seeds
    seeds_largest: float
    seeds_mean: float

    @property
    def is_within(self) -> bool:
        return self.largest < self.seeds_largest and self.mean < self.seeds_mean


def smoothed(losses: list[float]) -> list[float]:
    """Return the mean of each step and those before it that the moving average has."""
    return [statistics.fmean(losses[max(0, end - SMOOTHED) : end]) for end in range(1, len(losses) + 1)]


def distances(first: list[float], second: list[float]) -> list[float]:
    """Return the distance of two smoothed curves at each step."""
    return [abs(a - b) for a, b in zip(smoothed(first), smoothed(second), strict=True)]


def last_half(values: list[float]) -> list[float]:
    return values[len(values) // 2 :]


def compare(losses: "Losses", dtype: str, layout: Parallel, seeds: range) -> Distance:
    """Compare a layout with one rank of the same seeds, over the last half of the steps."""
    one_rank = {seed: losses[Curve(dtype, Parallel(), seed)] for seed in seeds}
    curves = {seed: losses[Curve(dtype, layout, seed)] for seed in seeds}
    to_one_rank = [last_half(distances(curves[seed], one_rank[seed])) for seed in seeds]
    pairs = [last_half(distances(one_rank[a], one_rank[b])) for a, b in combinations(seeds, 2)]
    biases = [statistics.fmean(last_half(curves[s])) - statistics.fmean(last_half(one_rank[s])) for s in seeds]
    return Distance(
        largest=statistics.fmean(map(max, to_one_rank)),
        mean=statistics.fmean(map(statistics.fmean, to_one_rank)),
        bias=statistics.fmean(biases),
        bias_error=statistics.stdev(biases) / len(biases) ** 0.5,
        seeds_largest=statistics.fmean(map(max, pairs)),
        seeds_mean=statistics.fmean(map(statistics.fmean, pairs)),
    )


def train_all(base: RunConfig, folder: Path, seeds: range, ranks_at_once: int, report: BenchReport) -> Losses:
    """Train every curve, as many at once as there may be ranks; each is recorded when it ends."""
    layouts = (Parallel(), *LAYOUTS)
    curves = [Curve(dtype, layout, seed) for layout in layouts for dtype in DTYPES for seed in seeds]
    all_losses: Losses = {}
    for ranks, group in groupby(curves, lambda curve: curve.parallel.world_size):
        same_size = list(group)
        with ThreadPoolExecutor(max(1, ranks_at_once // ranks)) as pool:
            runs = pool.map(lambda curve: losses_of(curve.config(base), folder / curve.title), same_size)
            for curve, losses in zip(same_size, runs, strict=True):
                print(f"  {curve.title}: {statistics.fmean(losses[-SMOOTHED:]):.4f}", flush=True)
                report.record("losses", {"curve": to_plain(curve), "losses": losses})
                all_losses[curve] = losses
    return all_losses


def plot(losses: Losses, title: str, path: Path) -> None:
    """Draw the losses and, below, the distances to one rank with the first seed."""
    pyplot = import_pyplot(path)
    if pyplot is None:
        return
    pyplot.rcParams["font.size"] = 9
    figure, axes = pyplot.subplots(2, len(DTYPES), sharex=True, sharey="row", figsize=(9, 6), layout="constrained")
    for (upper, lower), dtype in zip(axes.T, DTYPES, strict=True):
        first, second = (losses[Curve(dtype, Parallel(), seed)] for seed in DRAWN_SEEDS)
        steps = range(1, len(first) + 1)
        for curve, seed, (colour, dashes) in zip((first, second), DRAWN_SEEDS, SEED_LINES, strict=True):
            upper.plot(steps, curve, color=colour, linestyle=dashes, linewidth=1, label=f"one rank, seed {seed}")
        seeds = distances(first, second)
        lower.fill_between(steps, seeds, color="#e8e8e8")
        lower.plot(steps, seeds, color=SEED_LINES[1][0], linestyle=SEED_LINES[1][1], linewidth=1.5)
        for layout, (colour, dashes) in zip(LAYOUTS, LINES, strict=True):
            curve = losses[Curve(dtype, layout, DRAWN_SEEDS[0])]
            name = f"{layout.world_size} ranks, {format_layout(layout)}, seed {DRAWN_SEEDS[0]}"
            upper.plot(steps, curve, color=colour, linestyle=dashes, linewidth=1.5, label=name)
            lower.plot(steps, distances(curve, first), color=colour, linestyle=dashes, linewidth=1.5)
        upper.set_title(dtype)
        lower.set_xlabel("step")
    axes[0][0].set_ylabel("loss")
    axes[0][0].legend()
    axes[1][0].set_ylim(bottom=0)
    axes[1][0].set_ylabel(f"distance to one rank, seed {DRAWN_SEEDS[0]}\n(means of {SMOOTHED} steps)")
    figure.suptitle(title)
    save_plot(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help=f"sequences a step, a multiple of {2 * MBS}")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=2, help="at least 2")
    parser.add_argument("--ranks-at-once", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    report = BenchReport(json=options.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration(options, shipped_text(folder))
        config = replace(config, model=replace(config.model, heads=4, kv_heads=2, head_dim=options.hidden // 4))
        title = f"{config.model.name}, {options.steps} steps of {options.batch} x {options.seqlen} tokens"
        report.print_heading(title)
        report.record("config", to_plain(config))
        seeds = range(1, options.seeds + 1)
        losses = train_all(config, folder, seeds, options.ranks_at_once, report)
    rows, is_within = [], True
    for dtype in DTYPES:
        for layout in LAYOUTS:
            distance = compare(losses, dtype, layout, seeds)
            is_within = is_within and distance.is_within
            figures = (distance.largest, distance.seeds_largest, distance.mean, distance.seeds_mean)
            bias = f"{distance.bias:+.4f} +- {distance.bias_error:.4f}"
            rows.append((dtype, layout.world_size, format_layout(layout), *(f"{x:.4f}" for x in figures), bias))
            report.record("distances", {"dtype": dtype, "layout": format_layout(layout), **to_plain(distance)})
    header = ("dtype", "ranks", "layout", "largest", "seeds: largest", "mean", "seeds: mean", "bias")
    report.print_table(f"distance to one rank, {options.seeds} seeds", header, rows)
    if options.plot:
        plot(losses, title, options.plot)
    print("all layouts are within the spread of seeds" if is_within else "a layout is outside the spread of seeds")
    sys.exit(0 if is_within else 1)


if __name__ == "__main__":
    main()
