"""Accuracy of the serving predictor on published TTFT and TPOT. No GPU.

    python bench/serving_accuracy.py [../shared/data/published_serving.csv] [--out docs/serving_accuracy.md]
    python bench/serving_accuracy.py --fit      refit all constants and intervals, store them in serving_constants.yaml

Prints and writes: errors by model, GPU, dtype, engine and concurrency; of models and GPUs left out of the fit in turn;
coverage of the 80 % intervals; maximum throughput of TensorRT-LLM's tables and of the native engine, which the fit did
not see or sees apart; constants; rows left out, by rule. About a minute.
"""

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from accuracy import at_least, table
from prediction.native_serving import native_cells, with_native
from prediction.ratio_picture import ratio_svg
from prediction.serving_fit import METRICS, Predicted, Rows, Sample, fitted, sample
from prediction.serving_peers import offline_table, unseen_rows

from llmb.perfmodel.serving_time.row_rules import left_out_rows
from llmb.perfmodel.serving_time.serving_constants import (
    CONSTANTS_FILE,
    calibrated_serving,
    serving_constants,
)
from llmb.perfmodel.serving_time.serving_predictor import crowding, interval_kind, predict_serving
from llmb.perfmodel.serving_time.serving_rows import ServingRow, read_serving_rows
from llmb.perfmodel.step_time.fitted_constants import Constants

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
PICTURES = ROOT / "docs" / "pictures"
LEVEL = 80.0  # percent of rows inside the interval
FEW_ROWS = 20  # a percentage of fewer says nothing
FEW_GROUPS = 1.886 / 1.282  # 80 % of Student's t distribution of three groups over 80 % of a normal one


def usable(rows: Sequence[ServingRow]) -> tuple[list[Sample], dict[str, list[ServingRow]]]:
    """Return usable rows, and the others by reason."""
    left_out = left_out_rows(rows)
    numbers = {row.number for members in left_out.values() for row in members}
    return [sample(row) for row in rows if row.number not in numbers], left_out


def left_out_errors(samples: Sequence[Sample], key: Callable[[Sample], str]) -> Predicted:
    """Return the log errors of every row with constants refitted without its group."""
    errors = Predicted(*(np.empty(len(samples)) for _ in METRICS))
    for group in sorted({key(s) for s in samples}):
        inside = np.array([key(s) == group for s in samples])
        c = fitted([s for s, member in zip(samples, inside, strict=True) if not member])
        group_errors = Rows([s for s, member in zip(samples, inside, strict=True) if member]).log_errors(c)
        for name in METRICS:
            getattr(errors, name)[inside] = getattr(group_errors, name)
    return errors


def half_widths(samples: Sequence[Sample], errors: Sequence[Predicted]) -> dict[str, dict[str, float]]:
    """Return half the widths of the intervals by metric and kind of run, from left-out errors.

    TTFT of the native engine, of which no row was published, has the width of all engines together.
    """
    widths, crowds = {}, np.array([crowding(s.setup) for s in samples])
    for name in METRICS:
        kinds = np.array([interval_kind(s.setup, name) for s in samples])
        members = {kind: kinds == kind for kind in sorted(set(kinds))}
        members |= {"native": np.full(len(kinds), True)} if name == "ttft" else {}
        widths[name] = {
            kind: float(
                np.percentile(
                    np.concatenate([np.abs(getattr(e, name)[inside]) / crowds[inside] for e in errors]), LEVEL
                )
            )
            for kind, inside in members.items()
        }
    return widths


def unseen_half_widths(samples: Sequence[Sample], errors: Predicted) -> dict[str, dict[str, float]]:
    """Return half the widths for a GPU without published rows, from the errors of left-out GPUs.

    The widest of them, wider again because three GPUs say little about how far another may be off.
    """
    gpus = np.array([s.setup.gpu for s in samples])
    groups = [np.flatnonzero(gpus == gpu) for gpu in sorted(set(gpus))]
    widths = [
        half_widths([samples[i] for i in members], [Predicted(*(getattr(errors, name)[members] for name in METRICS))])
        for members in groups
    ]
    return {
        name: {
            kind: FEW_GROUPS * max(group[name][kind] for group in widths if kind in group[name])
            for kind in sorted({kind for group in widths for kind in group[name]})
        }
        for name in METRICS
    }


def inside(samples: Sequence[Sample], errors: Predicted, key: Callable[[Sample], str]) -> dict[str, np.ndarray]:
    """Return which rows are inside intervals whose widths come from other groups only, by metric."""
    held = {name: np.zeros(len(samples), dtype=bool) for name in METRICS}
    for group in {key(s) for s in samples}:
        others = [i for i, s in enumerate(samples) if key(s) != group]
        other_errors = Predicted(*(getattr(errors, name)[others] for name in METRICS))
        widths = half_widths([samples[i] for i in others], [other_errors])
        for i in (i for i, s in enumerate(samples) if key(s) == group):
            for name in METRICS:
                kind = interval_kind(samples[i].setup, name)
                width = widths[name].get(kind, max(widths[name].values())) * crowding(samples[i].setup)
                held[name][i] = abs(getattr(errors, name)[i]) <= width
    return held


def coverage(held: dict[str, np.ndarray], members: Sequence[int] | slice = slice(None)) -> list[str]:
    """Return the percentage of rows inside their intervals, by metric."""
    return [f"{100 * np.mean(held[name][members]):.0f}" for name in METRICS]


def coverage_table(samples: Sequence[Sample], *held: dict[str, np.ndarray]) -> str:
    """Return the percentage of rows inside their intervals by kind of run, a column for each metric of each `held`."""
    rows = []
    for title, key in GROUPS[:-1]:
        groups: dict[object, list[int]] = defaultdict(list)
        for index, s in enumerate(samples):
            groups[key(s)].append(index)
        rows += [
            (f"{title} {name}", len(members), *(cell for each in held for cell in coverage(each, members)))
            for name, members in sorted(groups.items(), key=str)
            if len(members) >= FEW_ROWS
        ]
    header = [f"{name.upper()}, {of} left out" for of in ("model", "GPU") for name in METRICS]
    return table(("kind of run", "rows", *header), rows)


def figures(errors: Predicted, members: Sequence[int] | slice = slice(None)) -> list[str]:
    """Return median and 90th percentile of the absolute error of every metric, and the median error of E2E."""
    cells = []
    for name in METRICS:
        absolute = 100 * np.abs(np.expm1(getattr(errors, name)[members]))
        cells += [f"{np.median(absolute):.1f}", f"{np.percentile(absolute, 90):.0f}"]
    return [*cells, f"{100 * np.expm1(np.median(errors.e2e[members])):+.1f}"]


HEADER = ("rows", "TTFT median %", "p90 %", "TPOT median %", "p90 %", "E2E median %", "p90 %", "E2E bias %")


def by_group(samples: Sequence[Sample], errors: Predicted, key: Callable[[Sample], object], title: str) -> str:
    """Return the table of errors by group."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, s in enumerate(samples):
        groups[key(s)].append(index)
    rows = [(name, len(members), *figures(errors, members)) for name, members in sorted(groups.items(), key=str)]
    return table((title, *HEADER), rows)


def clients(s: Sample) -> str:
    """Return the class of concurrency of a row."""
    bounds = (4, 8, 16, 32, 64, 128, 256)
    return next((f"{bound:>3} or fewer" for bound in bounds if s.setup.concurrency <= bound), "more")


def layout(s: Sample) -> str:
    setup = s.setup
    names = [("tp", setup.tp), ("attention_dp", setup.attention_dp), ("ep", setup.ep)]
    return " ".join(f"{name} {size}" for name, size in names if size > 1) or "one GPU"


def report(rows: Sequence[ServingRow], c: Constants, data: Path) -> str:
    """Return the document; `data` is the folder of published_inference.csv."""
    samples, left_out = usable(rows)
    errors = Rows(samples).log_errors(c)
    models = left_out_errors(samples, lambda s: s.model)
    gpus = left_out_errors(samples, lambda s: s.setup.gpu)
    held = inside(samples, models, lambda s: s.model), inside(samples, gpus, lambda s: s.setup.gpu)
    everything = [row for row in rows if row.setup is not None and row.tpot_ms and row.ttft_ms]
    described = Rows([sample(row) for row in everything]).log_errors(c)
    start = time.process_time()
    for s in samples:
        predict_serving(s.setup)
    rate = len(samples) / (time.process_time() - start)
    parts = [
        INTRODUCTION,
        table(("", *HEADER), [
            ("all usable rows, fitted together", len(samples), *figures(errors)),
            ("left-out models, each in turn", len(samples), *figures(models)),
            ("left-out GPUs, each in turn", len(samples), *figures(gpus)),
            ("all described rows, also those left out by rule", len(everything), *figures(described)),
        ]),
        "Aims: TTFT 30, TPOT 10, E2E 10 (p90 30); left-out models E2E 13. NVIDIA's AIConfigurator 0.12 on 459 rows of "
        "the same file: TTFT 59, TPOT 11.5 (p90 47.5), E2E 11.0 (p90 46.5).",
        "80 % intervals whose widths come from the other models or GPUs hold, of TTFT, TPOT and E2E: "
        f"{', '.join(coverage(held[0]))} % of the rows of left-out models and "
        f"{', '.join(coverage(held[1]))} % of left-out GPUs (aim: 75 to 88).",
        f"Speed: {at_least(rate)} rows/s on one core (aim: 50).",
        "![predicted against measured TPOT](pictures/serving_tpot_accuracy.svg)",
        "![predicted against measured TTFT](pictures/serving_ttft_accuracy.svg)",
        "## All rows, constants fitted to all of them",
        *(by_group(samples, errors, key, title) for title, key in GROUPS),
        "## Left-out models: constants refitted without any row of the model",
        "DeepSeek-V3 and -R1 are one model: the same measurements stand under both names.",
        by_group(samples, models, lambda s: s.model, "model"),
        "## Left-out GPUs: constants refitted without any row of the GPU",
        by_group(samples, gpus, lambda s: s.setup.gpu, "GPU"),
        "## Rows inside the 80 % interval by kind of run",
        INSIDE,
        coverage_table(samples, *held),
        "## Maximum throughput of TensorRT-LLM's published tables",
        OFFLINE,
        offline_table(data / "published_inference.csv"),
        "## GB200",
        GB200,
        table(("model", "dtype", "rows", "median %", "inside the interval %"), unseen_rows(data, "gb200")),
        "## The native engine on one H200",
        NATIVE,
        table(("row", "measured on", "measured", "predicted", "error %", "TTFT ms", "predicted"), native_cells()),
        "## Largest errors of E2E",
        table(("line", "model", "GPUs", "dtype", "engine", "lengths", "clients", "measured s", "error %"),
              worst(samples, errors)),
        MISSES,
        "## Rows left out, by rule",
        RULES,
        table(("reason", "rows", "lines of the file"), [
            (reason, len(members), ", ".join(str(row.number) for row in members))
            for reason, members in sorted(_merged(left_out).items())
        ]),
        "## Constants",
        CONSTANTS,
        table(("constant", "value", "prior", "unit", "meaning"), [
            (name, f"{c[name]:.3g}", f"{k.prior:.3g}", k.unit, k.meaning) for name, k in serving_constants().items()
        ]),
    ]  # fmt: skip
    _draw(samples, errors)
    return "\n\n".join(parts) + "\n"


GROUPS: tuple[tuple[str, Callable[[Sample], object]], ...] = (
    ("model", lambda s: s.model),
    ("GPU", lambda s: s.setup.gpu),
    ("dtype", lambda s: s.setup.dtype),
    ("engine", lambda s: s.setup.generation),
    ("clients", clients),
    ("layout", layout),
    ("isl/osl", lambda s: f"{s.setup.isl}/{s.setup.osl}"),
)


def _merged(left_out: dict[str, list[ServingRow]]) -> dict[str, list[ServingRow]]:
    """Return rows by reason, without the numbers of GPUs in it."""
    merged: dict[str, list[ServingRow]] = defaultdict(list)
    for reason, members in left_out.items():
        merged[re.sub(r"^\d+ GPUs: ", "", reason)] += members
    return merged


def worst(samples: Sequence[Sample], errors: Predicted, count: int = 15) -> list[tuple[object, ...]]:
    """Return the rows with the largest errors of E2E."""
    order = np.argsort(-np.abs(errors.e2e))[:count]
    return [
        (
            s.row.number, s.model, f"{s.setup.gpus} {s.setup.gpu}", s.setup.dtype, s.setup.generation,
            f"{s.setup.isl}/{s.setup.osl}", s.setup.concurrency, f"{s.e2e:.2f}",
            f"{100 * np.expm1(errors.e2e[i]):+.0f}",
        )
        for i in order
        for s in [samples[i]]
    ]  # fmt: skip


def _draw(samples: Sequence[Sample], errors: Predicted) -> None:
    keys = [s.model for s in samples]
    for name in ("tpot", "ttft"):
        values = [1e3 * getattr(s, name) for s in samples]
        text = ratio_svg(values, getattr(errors, name).tolist(), keys, f"measured {name.upper()} in ms")
        PICTURES.joinpath(f"serving_{name}_accuracy.svg").write_text(text)


def yaml_number(value: float) -> str:
    """Return four digits, with the point that YAML wants in a number with an exponent."""
    return re.sub(r"^(\d+)e", r"\1.0e", f"{value:.4g}")


def store(samples: Sequence[Sample], c: Constants) -> None:
    """Write fitted values and the widths of the intervals into serving_constants.yaml."""
    text = CONSTANTS_FILE.read_text()
    for name, value in c.items():
        text = re.sub(
            rf"^  {name}: {{(value: [^,]*, )?", f"  {name}: {{value: {yaml_number(value)}, ", text, flags=re.M
        )
    errors = [left_out_errors(samples, lambda s: s.model), left_out_errors(samples, lambda s: s.setup.gpu)]
    text = _with_widths(text, "half_width", half_widths(samples, errors))
    text = _with_widths(text, "unseen_half_width", unseen_half_widths(samples, errors[1]))
    keys = ", ".join(sorted({s.setup.gpu for s in samples}))
    CONSTANTS_FILE.write_text(re.sub(r"^  gpus: .*$", f"  gpus: [{keys}]", text, flags=re.M))


def _with_widths(text: str, key: str, widths: dict[str, dict[str, float]]) -> str:
    kinds = ", ".join(
        f"{kind}: {{{', '.join(f'{name}: {width:.3f}' for name, width in metrics.items())}}}"
        for kind, metrics in widths.items()
    )
    return re.sub(rf"^  {key}: .*$", f"  {key}: {{{kinds}}}", text, flags=re.M)


INTRODUCTION = """# Accuracy of the serving predictor

Written by `python bench/serving_accuracy.py`, which needs no GPU. `llmb-run predict --task serve` computes TTFT and
TPOT from the work of an engine step (`llmb/perfmodel/serving_time/`) with the constants of `serving_constants.yaml`.
Here its predictions stand beside published measurements of vLLM, SGLang and TensorRT-LLM. Errors are |predicted /
measured - 1|; E2E is TTFT + (osl - 1) x TPOT; the bias is the median of predicted / measured - 1."""

INSIDE = """Widths from the other models or GPUs only, as above; kinds of at least 20 rows. TTFT has a width by engine:
those of SGLang, with its looks at new requests and kernels compiled in first runs, vary four times as much as vLLM's.
Every width grows with the clients, by a fifth of itself for each doubling beyond 16: without, 39 to 64 % of the rows of
more than 256 clients were inside, and the interval score of every metric (the mean of the width plus ten times what a
row is outside), of left-out models and of left-out GPUs, was larger. Parts of a decode step do not tell its error
(correlations of at most 0.15), nor does that of prefill below 0.4 of TPOT, so TPOT and E2E have no more kinds than
dense models and mixtures."""

OFFLINE = """Output tokens/s with all requests at once, from `published_inference.csv`: none of these rows was fitted.
The predictor takes 3,000 clients, the largest batch that fits, and the newest TensorRT-LLM of the year. Rows of
mixtures that say TP8 (release 1.0) have the throughput of attention data parallelism, which their table does not
name; of Llama 4 no serving row was fitted."""

GB200 = """TTFT and TPOT of GB200 are unproven: of its 56 rows in `published_serving.csv` 55 are of disaggregated
prefill and decode, whose split no column tells, and one has no concurrency. Its constants are those of B200 at its own
peaks, and `predict` says so. The 80 % interval is that of a GPU that nobody measured: of the left-out GPUs above the
one with the largest errors, and 1.47 times as wide, as three GPUs say little about a fourth (Student's t against the
normal distribution). The only check is the maximum throughput of TensorRT-LLM's tables, which no fit has seen:"""

NATIVE = """Whole runs with all requests at once, one request alone, and a sweep over HTTP of two requests per client
(`bench/prediction/native_rows.yaml`; aim: 5 %). Its scheduler is followed step by step (`scheduled_run.py`); the
constants named `..._native` are fitted to rows of Llama 8B alone, but for those of block scales, experts and fp8
attention, which are measured times of their kernels, and for decode attention of MLA, which is the rest of one step of
DeepSeek-R1 layers. GEMM rates and kernel times are those of the published rows. Rows of gpt-oss were measured with
kernels that have been replaced since, and are predicted with the rates of those, timed alone. With 8 and with 64
clients a few prompts of the sweep waited several times as long as the others, which the prediction does not explain."""

MISSES = """Likely causes:

- Rows that speculate where no release and no slower row of the same description shows it.
- SGLang's first runs with nvfp4 on B200 have TTFTs of 7 s from 32 clients on: kernels are compiled during the run.
- TensorRT-LLM with Llama 70B at 1024/1024 and tp below 8 has a TTFT 20 decode steps longer than at 1024/8192, an
  engine setting that no column tells; so has SGLang with 512 clients of Llama 8B (a batch limit).
- TensorRT-LLM 1.0 with Llama 8B, tp 4 and 8 and 128 clients: TTFTs of 1 to 2 s at 10 ms a token; the client or the
  HTTP server is the limit.
- DeepSeek fp8 on B200 with TensorRT-LLM of 2025 is slower than the same weights with later kernels.
- gpt-oss fp8 on H100 with TensorRT-LLM 1.3 (5 rows of another benchmark) is twice as slow as all its other rows."""

RULES = """The published file holds the same measurement up to four times: DeepSeek-R1 also as DeepSeek-V3, and
layouts of expert parallelism also with the product of moe_tp and moe_ep as tp. One of each counts."""

CONSTANTS = """Fitted together to all usable rows: Gauss-Newton on the logarithms of TPOT and TTFT (assumed noise 7 %
and 30 %), robust weights, every constant drawn to its prior. None belongs to a model. Priors are data sheets,
measurements on one H200 and estimates. The structure of the model and some priors were chosen with these rows in
view, so rows that nobody has seen may be predicted a little worse than the left-out ones. Engine settings that the
file does not give (token budgets, KV dtype, lengths drawn from 0.8 to 1 of the nominal ones, SGLang's interval
between looks at new requests) are those of the benchmark recipes as far as known; `serving_rows.py` lists them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=DATA / "published_serving.csv")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "serving_accuracy.md")
    parser.add_argument("--fit", action="store_true", help="refit and store the constants, then stop")
    options = parser.parse_args()
    rows = read_serving_rows(options.csv)
    if options.fit:
        samples, _ = usable(rows)
        store(samples, with_native(fitted(samples)))
        return
    text = report(rows, calibrated_serving(), options.csv.parent)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
