"""How well is our own engine predicted? Predictions beside the H200 figures of bench/RESULTS.md, without a GPU.

    python bench/native_accuracy.py [--rates probe.json] [--without-plans] [--json]

`--rates`: rates that `llmb-run probe --json` measured, in place of the known ones of an H200. Plans of the out-of-core
rows take about a minute; `--without-plans` leaves those rows out.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from outofcore.outofcore_rows import LORA_ROWS, Row, models, planned
from outofcore.outofcore_rows import ROWS as OUT_OF_CORE_ROWS
from prediction.native_serving import FIGURES, native_rows, predicted
from training.one_rank_rows import ROWS as ONE_RANK_ROWS
from training.train_rows import ROWS as TRAINING_ROWS
from training.train_rows import configuration

from llmb.config.model import MambaConfig, Model
from llmb.config.overrides import from_arguments
from llmb.config.recipe import load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import OneRankRequest, RunRequest
from llmb.config.serialization import build, convert
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.formats.yaml_file import load_yaml
from llmb.perfmodel.explain.run_prediction import predict_training
from llmb.perfmodel.offload.machine_rates import Rates, known_rates, read_rates
from llmb.perfmodel.offload.plan_candidate import PlanResult
from llmb.perfmodel.serving_time.serving_constants import calibrated_serving
from llmb.perfmodel.shards import rank_flops
from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.step_setup import setup_of
from llmb.report.table import render

AIM = 5.0  # percent
PER_STEP = ("optimizer", "overhead")  # terms that a micro-batch does not have
MICRO_BATCHES = 64  # of a step whose micro-batches are compared: what it does once is no part of them
HERE = Machine(gpu="h200", gpus=1, gpus_per_node=1)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A measured step or micro-batch and its prediction."""

    kind: str
    row: str
    pool: str
    measured_s: float
    predicted_s: float
    kernels: Constants = field(default_factory=dict)  # rates of kernels that have been replaced since

    @property
    def error(self) -> float:
        """Percent; above 0 the prediction is too slow."""
        return 100 * (self.predicted_s / self.measured_s - 1)


@cache
def _configuration(title: str, settings: tuple[str, ...]) -> RunConfig:
    return configuration(next(row for row in TRAINING_ROWS if row.title == title), "h200", list(settings))


def _title(name: str, figure: dict[str, Any]) -> str:
    return " ".join([name, *figure.get("set", ())])


def training(figures: dict[str, Any], rates: Rates | None) -> Iterator[Sample]:
    """Yield the rows of train_gpu.py: whole optimizer steps, proxies of true width among them."""
    for figure in figures["training"]:
        setup = setup_of(_configuration(figure["row"], tuple(figure.get("set", ()))), rates=rates)
        yield Sample(
            kind="training", row=_title(figure["row"], figure), pool=figure["pool"],
            measured_s=setup.gbs * setup.seqlen / figure["tokens_per_s"], predicted_s=predict(setup).step_time_s,
        )  # fmt: skip


def tuned(figures: dict[str, Any], rates: Rates | None) -> Iterator[Sample]:
    """Yield the recipe rows that `tune --measure` ran."""
    recipes = load_all([shipped()])
    for figure in figures["tuned"]:
        settings = tuple(from_arguments(figure.get("set", [])))
        size, dtype = figure["size"], figure["dtype"]
        request = RunRequest(size=size, dtype=dtype, gpus=1, gpu="h200", settings=settings)
        prediction = predict(setup_of(resolve(recipes[figure["workload"]], request), rates=rates))
        yield Sample(
            kind="tuned", row=_title(f"{figure['workload']} {size} {dtype}", figure), pool=figure["pool"],
            measured_s=figure["step_s"], predicted_s=prediction.step_time_s,
        )  # fmt: skip


def micro_batches(figures: dict[str, Any], rates: Rates | None) -> Iterator[Sample]:
    """Yield the peers of rank_gpu.py: forward and backward of a few layers, without an optimizer."""
    recipes = load_all([shipped()])
    for figure in figures["micro_batches"]:
        model = convert(Model, recipes[figure["workload"]].models[figure["size"]], figure["size"])
        shard = dict(figure.get("shard", {}))
        if "mamba" in shard:
            shard["mamba"] = build(MambaConfig, shard["mamba"], figure["row"])
        layers = figure["layers"]
        model = replace(model, layers=layers, pattern=model.pattern and model.pattern[:layers], **shard)
        for dtype in ("bf16", "fp8"):
            config = RunConfig(
                name="rank", target=figure["workload"], size=figure["size"], model=model, parallel=Parallel(),
                machine=Machine(gpu="h200", gpus=1, gpus_per_node=8), precision=Precision(dtype=dtype),
                workload=Training(
                    seqlen=figure.get("seqlen", 8192), mbs=1, gbs=MICRO_BATCHES, ga=MICRO_BATCHES, balanced_experts=True
                ),
            )  # fmt: skip
            terms = predict(setup_of(config, rates=rates)).terms
            seconds = sum(seconds for name, seconds in terms.items() if name not in PER_STEP) / MICRO_BATCHES
            yield Sample(
                kind="micro-batch", row=f"{figure['row']} {dtype}", pool=figure["pool"],
                measured_s=rank_flops(config) / MICRO_BATCHES / figure[dtype] / 1e12, predicted_s=seconds,
            )  # fmt: skip


def one_rank(figures: dict[str, Any], rates: Rates | None) -> Iterator[Sample]:
    """Yield the rows of one_rank_gpu.py: whole steps of one rank of a layout, its collectives copies inside the GPU."""
    recipes, by_title = load_all([shipped()]), {row.title: row for row in ONE_RANK_ROWS}
    for figure in figures["one_rank"]:
        row, changes = by_title[figure["row"]], figure.get("set", [])
        settings = tuple(from_arguments([*row.settings, *changes]))
        request = RunRequest(
            size=row.size, dtype=row.dtype, gpus=row.scale, gpu="h100", settings=settings,
            one_rank=OneRankRequest(rank=None, machine=HERE),
        )  # fmt: skip
        config = resolve(recipes[row.workload], request)
        seconds = predict_training(config, rates, memory_gib=0.0).value
        assert seconds is not None
        yield Sample(
            kind="one rank", row=_title(figure["row"], figure), pool=figure["pool"],
            measured_s=rank_flops(config, config.pipeline_rank or 0) / figure["tflops"] / 1e12, predicted_s=seconds,
        )  # fmt: skip


def out_of_core(figures: dict[str, Any], rates: Rates | None) -> Iterator[Sample]:
    """Yield the rows of outofcore_gpu.py, by their plans."""
    by_title, sized = {row.title: row for row in (*OUT_OF_CORE_ROWS, *LORA_ROWS)}, models()
    plans: dict[Row, PlanResult] = {}
    for figure in figures["out_of_core"]:
        changed = {name: figure[name] for name in ("gbs", "host_gib") if name in figure}
        row = replace(by_title[figure["row"]], **changed)
        if row not in plans:
            plans[row] = planned(sized[row.size], row, rates or known_rates("h200"))
        plan, settings = plans[row], [f"{name}={value}" for name, value in changed.items()]
        yield Sample(
            kind="out of core", row=" ".join([figure["row"], *settings]), pool=figure["pool"],
            measured_s=plan.plan.step_tokens / figure["tokens_per_s"], predicted_s=plan.simulation.step_s,
        )  # fmt: skip


def serving(_: dict[str, Any], rates: Rates | None) -> Iterator[Sample]:
    """Yield served rows: TPOT of one request and of a sweep over HTTP, seconds per output token of whole runs."""
    c = calibrated_serving()
    for row in native_rows():
        seconds, _ttft = predicted(row, c, rates)
        yield Sample(
            kind="serving", row=row.title, pool=row.pool, measured_s=row.measured_s, predicted_s=seconds,
            kernels=row.kernels,
        )  # fmt: skip


def samples(rates: Rates | None = None, plans: bool = True) -> list[Sample]:
    """Return all rows with their predictions."""
    figures: dict[str, Any] = load_yaml(FIGURES, "sections training, tuned, micro_batches, one_rank, out_of_core")
    parts = [training, tuned, micro_batches, one_rank, serving, *([out_of_core] if plans else [])]
    return [sample for part in parts for sample in part(figures, rates)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, metavar="JSON")
    parser.add_argument("--without-plans", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rates = read_rates(options.rates) if options.rates else None
    rows = samples(rates, not options.without_plans)
    if options.json:
        print(json.dumps([asdict(row) | {"error_percent": row.error} for row in rows]))
        return 0
    cells = [(s.kind, s.row, s.pool, f"{s.measured_s:.4g}", f"{s.predicted_s:.4g}", f"{s.error:+.1f}") for s in rows]
    print(render(("kind", "row", "measured", "s", "predicted s", "error %"), cells))
    errors = [abs(row.error) for row in rows]
    within = sum(error <= AIM for error in errors)
    print(
        f"\n{within} of {len(rows)} rows within {AIM:g} %; median {median(errors):.1f} %, largest {max(errors):.1f} %"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
