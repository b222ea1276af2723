"""Accuracy of the step-time predictor on published training rows. No GPU.

    python bench/accuracy.py [../shared/data/published_training.csv] [--out docs/accuracy.md]
    python bench/accuracy.py --fit          refit all constants and the interval, and store them in step_constants.yaml

Prints and writes: errors of all rows by model, GPU, dtype, scale and engine; of models and GPUs left out of the fit in
turn; coverage of the 80 % interval; rows never fitted; ratios of two layouts; weak-scaling curves; constants; rows left
out, with reasons.
One to two minutes.
"""

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from prediction.layout_ranking import RANKING_HEADER, RANKING_MISSES, layout_pairs, ranking_introduction, ranking_rows
from prediction.ratio_picture import ratio_svg
from prediction.step_intervals import INSIDE, INSIDE_HEADER, coverage_rows, half_widths, rows_inside
from prediction.step_time_fit import ROUNDS, fit, log_errors
from prediction.unfitted_rows import unfitted_section

from llmb.perfmodel.hardware import GIB, GPUS
from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.predictor import interval_class, predict, step_memory
from llmb.perfmodel.step_time.published_rows import PublishedRow, is_possible, read_rows
from llmb.perfmodel.step_time.step_constants import CONSTANTS_FILE, calibrated, constants, interval_data
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.waterfall import StepWork, step_work

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT.parent / "shared" / "data" / "published_training.csv"
PICTURE, PICTURE_FILE = ROOT / "docs" / "pictures", "step_time_accuracy.svg"
PLENTY = 1000  # rows/s, of which 50 are the aim
CURVE_SCALES = 3  # least number of GPU counts of a weak-scaling curve


@dataclass(frozen=True)
class Sample:
    """A usable row with its description, work and measured step time."""

    row: PublishedRow
    setup: StepSetup
    work: StepWork
    seconds: float

    @property
    def model(self) -> str:
        """Name of the model; Llama 3 and 3.1 of one size have one shape."""
        return self.row.model.replace("llama3.1", "llama3")

    @property
    def source(self) -> str:
        """Table and release that the row comes from."""
        return self.row.cells["source"].split("@")[0]

    @property
    def series(self) -> tuple[str, ...]:
        """Rows that are not independent of one another."""
        return self.model, self.setup.gpu, self.setup.dtype, self.setup.engine

    @property
    def scale(self) -> str:
        bounds = (16, 64, 256, 1024, 4096)
        return next((f"up to {bound:>4} GPUs" for bound in bounds if self.setup.gpus <= bound), "more")


def usable(rows: Iterable[PublishedRow]) -> tuple[list[Sample], dict[str, list[PublishedRow]]]:
    """Return usable rows, and the others by reason."""
    samples, left_out = [], defaultdict(list)
    works: dict[StepSetup, StepWork] = {}
    for row in rows:
        if row.setup is None:
            left_out[re.sub(r" \(did you mean.*", "", row.reason or "")].append(row)
        elif row.step_time_s is None:
            left_out["no measured time"].append(row)
        elif not is_possible(row.setup, row.step_time_s):
            left_out["above the peak of the GPU"].append(row)
        else:
            work = works.setdefault(row.setup, step_work(row.setup))
            samples.append(Sample(row, row.setup, work, row.step_time_s))
    return samples, left_out


def errors_with(samples: Sequence[Sample], c: Constants) -> np.ndarray:
    """Return log(predicted / measured)."""
    return log_errors([s.work for s in samples], [s.seconds for s in samples], c)


def fitted(samples: Sequence[Sample], rounds: int = ROUNDS) -> Constants:
    """Return the constants fitted to samples, from their priors."""
    start = {name: constant.prior for name, constant in constants().items()}
    return fit([s.work for s in samples], [s.seconds for s in samples], [s.series for s in samples], start, rounds)


def left_out_errors(samples: Sequence[Sample], key: Callable[[Sample], str]) -> np.ndarray:
    """Return the log error of every row with constants refitted without its group."""
    errors = np.empty(len(samples))
    for group in sorted({key(s) for s in samples}):
        inside = np.array([key(s) == group for s in samples])
        c = fitted([s for s, member in zip(samples, inside, strict=True) if not member])
        errors[inside] = errors_with([s for s, member in zip(samples, inside, strict=True) if member], c)
    return errors


def summary(errors: np.ndarray) -> tuple[str, ...]:
    """Return count, median and 90th percentile of the absolute error, and the mean error, in percent."""
    absolute = 100 * np.abs(np.expm1(errors))
    return (
        f"{len(errors)}",
        f"{np.median(absolute):.1f}",
        f"{np.percentile(absolute, 90):.1f}",
        f"{100 * np.mean(errors):+.1f}",
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def at_least(rate: float) -> str:
    """Return a rate in text that is the same on a busy machine as on an idle one."""
    return f"at least {PLENTY:,}" if rate >= PLENTY else f"about {rate:.0f}"


def by_group(samples: Sequence[Sample], errors: np.ndarray, key: Callable[[Sample], str], title: str) -> str:
    """Return the table of errors by group."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[key(sample)].append(index)
    rows = [(name, *summary(errors[members])) for name, members in sorted(groups.items())]
    return table((title, "rows", "median %", "p90 %", "mean %"), rows)


def weak_scaling(samples: Sequence[Sample], is_same_release: bool) -> list[tuple[str, list[Sample]]]:
    """Return the weak-scaling curves, each with its name and rows, which differ in GPUs and batch only.

    Not of one release: in releases and the stages of an interleaved pipeline too.
    """
    curves: dict[tuple[object, ...], list[Sample]] = defaultdict(list)
    for s in samples:
        split = s.setup.parallel
        layout = (split.tp, split.pp, split.cp, split.ep, split.etp, split.fsdp, s.setup.mbs, s.setup.ga)
        release = (split.vp, s.source) if is_same_release else ()
        curves[(*s.series, s.setup.layer_count, *layout, s.setup.task, *release)].append(s)
    return [
        (" ".join(map(str, key[:3])), sorted(members, key=lambda s: s.setup.gpus))
        for key, members in curves.items()
        if len({s.setup.gpus for s in members}) >= CURVE_SCALES
    ]


def scaling_curves(samples: Sequence[Sample], c: Constants) -> list[tuple[str, ...]]:
    """Return each weak-scaling curve with the largest difference of its shape, in percent.

    The shape is the step time over the mean of the curve.
    """
    rows = []
    for name, members in weak_scaling(samples, is_same_release=True):
        errors = errors_with(members, c)
        deviation = 100 * np.max(np.abs(errors - errors.mean()))
        scales = f"{members[0].setup.gpus}-{members[-1].setup.gpus}"
        rows.append((name, scales, f"{len(members)}", f"{deviation:.1f}", members[0].source))
    return sorted(rows)


def release_differences(samples: Sequence[Sample]) -> list[tuple[str, ...]]:
    """Return the largest difference between the measured shapes of one curve in two releases, in percent."""
    rows = []
    for name, members in weak_scaling(samples, is_same_release=False):
        releases: dict[str, dict[int, float]] = defaultdict(dict)
        for s in members:
            releases[s.source].setdefault(s.setup.gpus, float(np.log(s.seconds)))
        for first, second in combinations(sorted(releases), 2):
            scales = sorted(set(releases[first]) & set(releases[second]))
            if len(scales) >= CURVE_SCALES:
                change = np.array([releases[second][gpus] - releases[first][gpus] for gpus in scales])
                largest = 100 * np.max(np.abs(change - change.mean()))
                between = " and ".join(source.split()[-1].split("..")[0] for source in (first, second))
                rows.append((name, f"{scales[0]}-{scales[-1]}", between, f"{largest:.1f}"))
    return sorted(rows)


def memory_misfits(samples: Sequence[Sample], recompute: bool) -> list[str]:
    """Return the configurations that ran and whose memory estimate exceeds the GPU, as described or all recomputed."""
    misfits = []
    for setup in dict.fromkeys(s.setup for s in samples):
        described = replace(setup, recompute="full", recompute_layers=None) if recompute else setup
        needed, capacity = step_memory(described).total, GPUS[setup.gpu].memory_bytes
        if capacity is not None and needed > capacity:
            name = f"{setup.shape.model.name} {setup.dtype} {setup.task} ({setup.engine}, mbs {setup.mbs})"
            misfits.append(f"{name} on {setup.gpus} {setup.gpu}: {needed / GIB:.0f} GiB")
    return misfits


def report(samples: Sequence[Sample], left_out: dict[str, list[PublishedRow]], c: Constants) -> str:
    """Return the document."""
    errors = errors_with(samples, c)
    models = left_out_errors(samples, lambda s: s.model)
    gpus = left_out_errors(samples, lambda s: s.setup.gpu)
    inside = rows_inside(samples, lambda s: s.model, models), rows_inside(samples, lambda s: s.setup.gpu, gpus)
    start = time.process_time()
    for sample in samples:
        predict(sample.setup)
    rate = len(samples) / (time.process_time() - start)
    aims = [
        ("all usable rows", *summary(errors)[:3], "6 / 15"),
        ("models left out in turn", *summary(models)[:3], "9 / 22"),
        ("GPUs left out in turn", *summary(gpus)[:3], "9 / 22"),
    ]
    parts = [
        INTRODUCTION,
        table(("rows", "count", "median %", "p90 %", "aim: median / p90 %"), aims),
        f"80 % interval, its width from other groups only: holds {100 * np.mean(inside[0]):.0f} % "
        f"of the rows of left-out models and {100 * np.mean(inside[1]):.0f} % of those of "
        "left-out GPUs (aim: 75 to 88 %). Half widths in log space: "
        + ", ".join(f"{kind} {width:.3f}" for kind, width in interval_data()["half_width"].items()) + ".",
        f"Speed: {at_least(rate)} rows/s on one core, memory estimate included (aim: 50).",
        f"![predicted against measured step time]({PICTURE.name}/{PICTURE_FILE})",
        "## All rows, constants fitted to all of them",
        by_group(samples, errors, lambda s: s.model, "model"),
        by_group(samples, errors, lambda s: s.setup.gpu, "GPU"),
        by_group(samples, errors, lambda s: s.setup.dtype, "dtype"),
        by_group(samples, errors, lambda s: s.scale, "scale"),
        by_group(samples, errors, lambda s: s.setup.engine, "engine"),
        by_group(samples, errors, lambda s: s.setup.task, "task"),
        "## Left-out models: constants refitted without any row of the model",
        by_group(samples, models, lambda s: s.model, "model"),
        by_group(samples, models, lambda s: interval_class(s.setup), "kind of run"),
        "## Left-out GPUs: constants refitted without any row of the GPU",
        by_group(samples, gpus, lambda s: s.setup.gpu, "GPU"),
        "## Rows inside the 80 % interval by kind of run",
        INSIDE,
        table(INSIDE_HEADER, coverage_rows(samples, *inside)),
        "## Rows that were never fitted",
        unfitted_section({s.setup for s in samples}, summary, table),
        "## Ratios of two layouts",
        ranking_introduction(samples),
        table(RANKING_HEADER, ranking_rows(layout_pairs(samples), errors, models)),
        RANKING_MISSES,
        "## Weak scaling\n\nLargest difference between the predicted and the measured shape of a curve "
        "(step time over the curve's mean; aim: 3 %).",
        table(("curve", "GPUs", "rows", "largest difference %", "source"), scaling_curves(samples, c)),
        CURVES,
        "### The same curve in two releases\n\nLargest difference between the two measured shapes. The prediction is "
        "the same for both, so it misses one of them by half of it or more.",
        table(("curve", "GPUs", "releases", "largest difference %"), release_differences(samples)),
        "## Memory",
        memory_section(samples),
        "## Largest errors",
        table(("line", "model", "GPUs", "dtype", "engine", "measured s", "error %"), worst(samples, errors)),
        MISSES,
        "## Rows left out, by rule",
        table(("reason", "rows", "lines of the file"), [
            (reason, len(rows), ", ".join(str(row.number) for row in rows)) for reason, rows in sorted(left_out.items())
        ]),
        "## Constants",
        CONSTANTS,
        table(("constant", "value", "prior", "unit", "meaning"), [
            (name, f"{c[name]:.3g}", f"{k.prior:.3g}", k.unit, k.meaning) for name, k in constants().items()
        ]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def memory_section(samples: Sequence[Sample]) -> str:
    """Return how many rows that ran are predicted not to fit."""
    described, recomputed = memory_misfits(samples, recompute=False), memory_misfits(samples, recompute=True)
    count = len(dict.fromkeys(s.setup for s in samples))
    head = (
        f"Of {count} different configurations that ran, {count - len(described)} are predicted to fit as described, "
        f"and {count - len(recomputed)} with recompute in every layer. Frozen weights have no gradients and no "
        "optimizer state; inputs of fp8 and fp4 GEMMs are saved in their dtype; recomputed modules save nothing; "
        "experts of the fullest rank have a quarter more tokens than on average, which balanced benchmarks do not; "
        "MaxText rematerializes."
    )
    lines = [head, "As described, these do not fit:\n\n- " + "\n- ".join(described), MEMORY_RULES]
    return "\n\n".join(lines if described else [head, MEMORY_RULES])


def worst(samples: Sequence[Sample], errors: np.ndarray, count: int = 15) -> list[tuple[object, ...]]:
    """Return the rows with the largest errors."""
    order = np.argsort(-np.abs(errors))[:count]
    return [
        (
            samples[i].row.number, samples[i].model, f"{samples[i].setup.gpus} {samples[i].setup.gpu}",
            samples[i].setup.dtype, samples[i].setup.engine, f"{samples[i].seconds:.3f}",
            f"{100 * np.expm1(errors[i]):+.0f}",
        )
        for i in order
    ]  # fmt: skip


def picture(samples: Sequence[Sample], errors: np.ndarray) -> str:
    """Return an SVG of predicted over measured step time, by GPU."""
    seconds, gpus = [s.seconds for s in samples], [s.setup.gpu for s in samples]
    return ratio_svg(seconds, list(errors), gpus, "measured step time in s")


def store(samples: Sequence[Sample], c: Constants) -> None:
    """Write fitted values and the widths of the interval into step_constants.yaml."""
    text = CONSTANTS_FILE.read_text()
    for name, value in c.items():
        text = re.sub(rf"^  {name}: {{(value: [^,]*, )?", f"  {name}: {{value: {value:.4g}, ", text, flags=re.M)
    models = left_out_errors(samples, lambda s: s.model)
    gpus = left_out_errors(samples, lambda s: s.setup.gpu)
    by_model, by_gpu = half_widths(samples, models), half_widths(samples, gpus)
    widths = ", ".join(f"{kind}: {max(width, by_gpu[kind]):.3f}" for kind, width in by_model.items())
    text = re.sub(r"^  half_width: .*$", f"  half_width: {{{widths}}}", text, flags=re.M)
    keys = ", ".join(key for key in GPUS if any(s.setup.gpu == key for s in samples))
    CONSTANTS_FILE.write_text(re.sub(r"^  gpus: .*$", f"  gpus: [{keys}]", text, flags=re.M))


INTRODUCTION = """# Accuracy of the step-time predictor

Written by `python bench/accuracy.py`, which needs no GPU. `llmb-run predict` computes the time of a training step from
the work of one rank (`llmb/perfmodel/step_time/`) with the constants of `step_constants.yaml`. Here its predictions
stand beside published results of NVIDIA's NeMo and Megatron Bridge recipes, torchtitan, and MaxText.
Errors are |predicted / measured - 1|; the mean is that of log(predicted / measured)."""

MISSES = """Likely causes:

- The same configuration differs between releases: Qwen3 30B on H100 takes 51 s a step in 26.02 and 29 s in 26.02.01
  (lines 526, 527), 25 s in 25.11 and 12 s, with tokens dropped, in 25.09 (lines 524, 525); Lightning on H100 improved
  by 11 % within a week (lines 448, 449). The description of such rows is the same, so the prediction is too.
- Tables of 25.11 differ from the configurations of that release (lines 11, 514, 525: ep 8 printed and 64 configured,
  mbs 4 and 8, mbs 2 and 1 with overlapped all-to-all): what ran is not certain.
- gpt-oss is slower by 10 to 20 % than its GEMMs, attention and traffic explain, on every GPU, in bf16 and in MXFP8,
  at 4,096 and at 8,192 tokens: neither its windows nor its small heads are the cause.
- Overlapped all-to-all helps Qwen3 and hardly gpt-oss (lines 17 to 21: 5.2 s without, 4.9 to 5.1 s with it).
- Nemotron 3 Super with tp 2 on GB200 takes as long in bf16, MXFP8 and NVFP4: it waits for the host, whose time per
  layer is the least certain constant.
- The first Blackwell releases (NeMo 25.05, Megatron Bridge 25.09 with MXFP8) ran fp8 slower than later ones; there is
  one constant for all of them.
- Qwen3.6 35B in MXFP8 on 8 GB200 takes 23.3 and 26.9 s in two versions of one card (lines 537, 538), at a tenth of the
  peak; in bf16 on H100 (line 539) its gated DeltaNet layers are predicted to 1 %.
- The example of Nemotron-H of v25.08 (line 405) is 23 % faster than the table of v25.05 for the same layout."""

CURVES = """A step grows with the scale by the slowest rank; by Megatron's last bucket of gradients, which nothing hides
and which holds a million weights for each replica (Nemotron-4 15b: 38 ms of 2.8 s on 2,048 GPUs); by a ring per bucket
or sharded layer, whose latency grows with its ranks; and by pipeline stages that leave their node. All curves of
Nemotron-H and Grok-1 are within the aim, and all of Llama but three. Every curve is of one table of one release, which
names neither cluster nor network. Curves above the aim, and why no model of the layout alone can follow them:

- GPT-3 175b fp8 of v24.11: 5.92, 5.96, 6.44, 6.72, 6.24 s from 128 to 2,048 GPUs: 1,024 GPUs are slower than 2,048.
  The same curve of v25.02 rises evenly by 6 %, and is followed.
- Llama 3.1 405b fp8 of v24.11: 11.24, 11.31, 12.35 s: 9 % more on 2,304 GPUs. In bf16 it is 2 %, and in v25.02 2 %.
- Llama 2 70b fp8 in MaxText of v24.11: 4.32 s on 64 GPUs, 4.96 on 256, 4.93 on 2,048. In bf16 the same bytes travel,
  and the step grows by 0.15 s, not by 0.7; Llama 3 70b in fp8 goes up and down by 4 % (9.07, 9.49, 9.24, 9.48, 9.34 s).
  MaxText shards among all GPUs up to 256, and among 128 beyond, which the predictor knows.
- Llama 3 70b LoRA fp8: 6.5, 6.7, 7.6 s on 8, 16 and 32 GPUs, printed to 0.1 s: 0.9 s more when all four stages are in
  nodes of their own, where bf16, with the same sends, takes 0.37 s more."""

MEMORY_RULES = """What their tables leave out is taken from the release's own configuration
(`llmb/perfmodel/step_time/recipe_settings.yaml`): Llama 3 70b and 405b with FSDP on GB200 offload 40 of 80 and 80 to 95
of 126 layers in 25.09 to 25.11; Llama 3 70b in MXFP8 has micro-batches of 1, as its printed ga says, not the 2 of the
other layout in its cell; gpt-oss on H100 has micro-batches of 1 and recomputes norms and activations, where the table
repeats the 4 of GPUs without a pipeline. Llama 4 Scout in torchtitan is described with micro-batches of 10 x 8,192
tokens without recompute, 520 to 650 GiB on 184; a measured run of more than twice the memory has recomputed every
layer."""

CONSTANTS = """Fitted together to all usable rows: Gauss-Newton on log step times, robust weights, every constant drawn
to its prior. None belongs to a model. Priors are data sheets, measurements on one H200 and estimates. The structure of
the model and some priors (scan, host and launch times) were chosen with these rows in view, so rows that nobody has
seen may be predicted a little worse than the left-out ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=PUBLISHED)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "accuracy.md")
    parser.add_argument("--fit", action="store_true", help="refit and store the constants, then stop")
    options = parser.parse_args()
    samples, left_out = usable(read_rows(options.csv))
    if options.fit:
        store(samples, fitted(samples))
        return
    text = report(samples, left_out, calibrated())
    PICTURE.joinpath(PICTURE_FILE).write_text(picture(samples, errors_with(samples, calibrated())))
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
