"""Does fp8 learn what bf16 learns? Small Llamas on real text, from the same weights and batches in both formats.

    python bench/fp8_convergence.py [--data tokens.bin] [--steps 300] [--seeds 6] [--json FILE] [--plot FILE.png]
    python bench/fp8_convergence.py --layers 2 --hidden 128 --steps 60 --seeds 1 --at-once 1     # minutes on a CPU
    python bench/fp8_convergence.py --recipes --layers 4 --hidden 128 --seqlen 128 --batch 8 --steps 100 --lr 2e-3 \
        --seeds 2 --at-once 1 --plot docs/pictures/fp8_recipes.svg                               # minutes on a CPU

Each setup is trained from several seeds: even two runs that differ by rounding alone are 0.6 % apart after 300 steps,
so one run of each would be noise. Prints the mean loss of the last 20 steps, its standard error over
the seeds, and its ratio to bf16's, aim within 1 % of 1. `narrow` are weights, gradients and moments in bf16, as the
rows of `train_gpu.py` have them. With --recipes it is bf16 and every fp8 recipe of training instead (a width that is a
multiple of 128), and the difference from bf16 stands beside the spread of bf16's seeds.

The text is the shipped one (data/kjv.txt), tokenized on the spot; without a tokenizer library it is synthetic tokens,
and says so. Runs on the GPU where there is one and on the CPU otherwise.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from measure.bench_report import BenchReport
from training.train_process import ROOT, trained_steps
from training.train_rows import NARROW

from llmb.config.model import Model
from llmb.config.native.number_formats import FP8_RECIPES
from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.errors import LaunchError
from llmb.formats.token_file import read_header
from llmb.launch.local_machine import gpu_names
from llmb.perfmodel.hardware import identify_gpu

LAST = 20  # steps whose mean loss is compared
BF16, FP8 = Precision(dtype="bf16"), Precision(dtype="fp8")
Setup = tuple[Precision, dict[str, Any]]  # and other settings of a run
SETUPS: dict[str, Setup] = {  # the first is the baseline
    "bf16": (BF16, {}),
    "fp8": (FP8, {}),
    "bf16, narrow": (BF16, NARROW),
    "fp8, narrow, fast accumulation": (FP8, {**NARROW, "fp8_fast_accum": True}),
}
RECIPES: dict[str, Setup] = {
    "bf16": (BF16, {}),
    **{f"fp8 {name}": (replace(FP8, fp8_recipe=name), {}) for name in FP8_RECIPES["training"]},
}
Losses = dict[str, list[list[float]]]  # by setup, seed and step


def shipped_text(folder: Path) -> Path | None:
    """Return the shipped text as a token file, or None after printing why not."""
    target = folder / "kjv.bin"
    command = [sys.executable, "-m", "llmb.cli.llmb_run", "tokenize", str(ROOT / "data/kjv.txt")]
    command += ["--tokenizer", str(ROOT / "data/tokenizer.json"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 0:
        return target
    print(f"note: synthetic tokens, since the shipped text could not be tokenized: {done.stderr.strip()}")
    return None


def configuration(options: argparse.Namespace, data: Path | None) -> RunConfig:
    names = gpu_names()  # an unknown GPU runs too: no figure here depends on which it is
    width = options.hidden
    model = Model(
        name=f"llama {options.layers} x {width}",
        architecture="llama",
        layers=options.layers,
        hidden=width,
        ffn=3 * width,
        heads=width // 64,
        kv_heads=width // 64,
        head_dim=64,
        vocab=8192 if data is None else -(-read_header(data).vocab // 16) * 16,
    )
    work = Training(
        seqlen=options.seqlen,
        mbs=options.batch,
        gbs=options.batch,
        ga=1,
        steps=options.steps,
        window=(max(1, options.steps - LAST), options.steps),
        lr=options.lr,
        lr_warmup_steps=max(1, options.steps // 10),
        lr_decay_steps=options.steps,
        data=None if data is None else str(data),
    )
    return RunConfig(
        name="fp8_convergence",
        target="fp8_convergence",
        size=model.name,
        machine=Machine(gpu=(identify_gpu(names[0]) or "h100") if names else "cpu", gpus=1, gpus_per_node=1),
        model=model,
        parallel=Parallel(),
        precision=Precision(dtype="bf16"),
        workload=work,
    )


def losses_of(config: RunConfig, folder: Path) -> list[float]:
    """Train on all ranks of the configuration and return the loss of every step."""
    try:
        return [step.loss for step in trained_steps(config, folder) if step.loss is not None]
    except LaunchError as error:
        sys.exit(str(error))


def train_all(setups: dict[str, Setup], config: RunConfig, seeds: int, at_once: int, folder: Path) -> Losses:
    """Train all setups from all seeds."""

    def train_run(run: tuple[str, int]) -> list[float]:
        setup, seed = run
        precision, fields = setups[setup]
        work = replace(config.workload, seed=seed, **fields)
        return losses_of(replace(config, precision=precision, workload=work), folder / f"{setup} {seed}")

    runs = list(product(setups, range(1, seeds + 1)))
    all_losses: Losses = {setup: [] for setup in setups}
    with ThreadPoolExecutor(at_once) as pool:
        for (setup, seed), losses in zip(runs, pool.map(train_run, runs), strict=True):
            print(f"  {setup}, seed {seed}: {statistics.fmean(losses[-LAST:]):.4f}", flush=True)
            all_losses[setup].append(losses)
    return all_losses


def print_ends(report: BenchReport, losses: Losses) -> None:
    """Print how each setup ends; its difference from the first is that of runs with the same seed, in spreads of it."""
    rows: list[tuple[str | None, ...]] = []
    ends = {setup: [statistics.fmean(run[-LAST:]) for run in runs] for setup, runs in losses.items()}
    first = next(iter(ends.values()))
    unit = statistics.stdev(first) if len(first) > 1 else None
    for setup, values in ends.items():
        mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
        error = spread / len(values) ** 0.5 if spread is not None else None
        apart = mean - statistics.fmean(first)
        cells = mean, spread, error, mean / statistics.fmean(first), apart, apart / unit if unit else None
        rows.append((setup, *(None if x is None else f"{x:.4f}" for x in cells)))
        names = ("mean", "spread", "error", "ratio", "difference", "difference_in_spreads")
        report.record("ends", {"setup": setup, **dict(zip(names, cells, strict=True))})
    header = ("setup", "loss", "spread", "error", "x of bf16", "- bf16", "in spreads of bf16")
    report.print_table(f"mean loss of the last {LAST} steps", header, rows)


def plot(losses: Losses, title: str, path: Path) -> None:
    pyplot = import_pyplot(path)
    if pyplot is None:
        return
    means = {setup: [statistics.fmean(step) for step in zip(*runs, strict=True)] for setup, runs in losses.items()}
    base, *compared = means
    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="constrained"
    )
    colours = {setup: f"C{number}" for number, setup in enumerate(means)}
    for setup, values in means.items():
        upper.plot(range(1, len(values) + 1), values, label=setup, color=colours[setup], linewidth=1)
    upper.set_ylabel("loss")
    upper.legend()
    upper.set_title(title)
    for setup in compared:
        difference = [loss / base_loss - 1 for loss, base_loss in zip(means[setup], means[base], strict=True)]
        lower.plot(range(1, len(difference) + 1), difference, color=colours[setup], linewidth=1)
    by_step = zip(zip(*losses[base], strict=True), means[base], strict=True)
    seeds = [[loss / mean - 1 for loss in step] for step, mean in by_step]
    steps = range(1, len(seeds) + 1)
    lower.fill_between(steps, [min(step) for step in seeds], [max(step) for step in seeds], color="0.85", linewidth=0)
    lower.axhline(0, color="grey", linewidth=0.5)
    lower.set_ylabel(f"over {base} - 1\n(grey: its seeds)")
    lower.set_xlabel("step")
    save_plot(figure, path)


def import_pyplot(path: Path) -> Any | None:
    """Return pyplot without a display, set to write the same file each time; None where it is not installed."""
    if find_spec("matplotlib") is None:
        print("note: no plot, matplotlib is not installed")
        return None
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": path.name}
    from matplotlib import pyplot

    return pyplot


def save_plot(figure: Any, path: Path) -> None:
    """Save a figure, an SVG without its date."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a token file; default: the shipped text")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipes", action="store_true", help="compare the fp8 recipes of training")
    parser.add_argument("--seeds", type=int, default=6, help="runs of each setup")
    parser.add_argument("--at-once", type=int, default=8, help="concurrent runs")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    report = BenchReport(json=options.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration(options, options.data.resolve() if options.data else shipped_text(folder))
        title = f"{config.model.name}, {options.steps} steps of {options.batch} x {options.seqlen} tokens"
        report.print_heading(f"{title}, {options.seeds} seeds")
        report.record("config", to_plain(config))
        losses = train_all(
            RECIPES if options.recipes else SETUPS, config, options.seeds, options.at_once, folder
        )  # fmt: skip
    report.record("losses", losses)
    print_ends(report, losses)
    if options.plot:
        plot(losses, f"{title}, mean of {options.seeds} seeds", options.plot)


if __name__ == "__main__":
    main()
