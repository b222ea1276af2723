"""Whole published models served on one H200, with random weights: output tokens/s, published figures and ceilings.

    python bench/models_gpu.py [--json FILE] [--row gpt-oss-20b,Qwen3-32B] [--row "gpt-oss-120b mxfp4 1000/1000"]
    python bench/models_gpu.py --row "Qwen3-32B" --fp8-recipe channelwise --budget 4096      # what if
    python bench/models_gpu.py --tiny       # very small models, with or without a GPU: shows only that it runs

All requests at once, EOS ignored, whole runs; weights in the published formats: fp8, or MXFP4 experts, which stay in 4
bits and are widened in the kernel (Hopper has no 4-bit tensor cores), with the rest in bf16. The KV cache is in fp8.
Ceilings as in `infer_gpu.py`, with GEMMs that have the scales of the row's fp8 recipe (Qwen3: blocks, as published).
The FLOPs of MXFP4 experts count at the bf16 rate. --help has the minutes of each row; weights and graphs of a model
take another.
"""

import argparse
import gc
import time
from typing import Any

import torch
from inference.infer_bench import Bench
from inference.infer_ceilings import steady_step, terms
from inference.infer_llama import Served
from inference.infer_rates import bandwidths
from inference.infer_serving import config_of, measure
from inference.model_rows import MODELS, ROWS, ModelRow, changed_row, tiny_model, tiny_row
from measure.device import describe_machine, release_memory
from measure.options import build_parser, parse_options, select_rows

from llmb.config.model import Model
from llmb.config.native.number_formats import FP8_RECIPES
from llmb.config.spec import Inference
from llmb.perfmodel.params import parameters
from llmb.runtime.rank_info import RankInfo
from llmb.serve.benchmark.engine_facts import reachable_objects, tensor_bytes
from llmb.serve.engine_builder import engine_for_model, num_cache_blocks, serving_dtypes, weight_source
from llmb.serve.layers.served_model import ServedModel, build_served_model
from llmb.serve.serve_layout import join_groups

PARTS = ("throughput",)
READ_BYTES = 8 << 30


def build_weights(model: Model, row: ModelRow, device: torch.device) -> ServedModel:
    """Return a model with random weights, without a cache: several rows share it."""
    release_memory(device)
    config = config_of(model, row, device)
    groups = join_groups(config, RankInfo(0, 1, device))
    return build_served_model(model, weight_source(config, device), serving_dtypes(config), groups)


def serve_row(bench: Bench, served_model: ServedModel, row: ModelRow, building_s: float) -> Served:
    """Measure one row in an engine of its own."""
    began = time.perf_counter()
    for mixer in served_model.mixers():  # the cache of the row before
        mixer.allocate(1, 1, 1, bench.device)
    release_memory(bench.device)
    config, longest = config_of(served_model.spec, row, bench.device), row.isl + row.osl
    work = config.workload
    assert isinstance(work, Inference)
    engine = engine_for_model(served_model, work, longest, num_cache_blocks(served_model, work, longest))
    opening_s = building_s + time.perf_counter() - began
    measured = measure(engine, config, bench.device)
    needed = terms(served_model.spec, row.precision, steady_step(row.isl, row.osl, measured.most_at_once))
    return Served(row, measured, opening_s, needed, bench.rates_of(row))


def run_model(bench: Bench, name: str, rows: list[ModelRow]) -> list[tuple[Any, ...]]:
    """Measure the rows of one model; return the lines of the table."""
    lines, began = [], time.perf_counter()
    model = tiny_model(MODELS[name]) if bench.tiny else MODELS[name]
    bench.llama = model
    bench.rate("bf16", model, rows[0].budget)  # attention and the router
    served_model = build_weights(model, rows[0], bench.device)
    weight_bytes = tensor_bytes(list(reachable_objects(served_model)))
    building_s = time.perf_counter() - began
    for row in rows:
        served = serve_row(bench, served_model, row, building_s)
        speed, limit = served.measured.whole, served.limit
        print(f"{row.title}: {speed:,.0f} output tokens/s in {served.measured.seconds:.1f} s, ceiling {limit:,.0f}")
        facts = {"parameters": parameters(model), "weight_bytes": weight_bytes, "ratio": speed / limit}
        bench.record("models", served.plain | facts | {"aim_ratio": row.aim_ratio, "floor_ratio": row.floor_ratio})
        lines.append(_line(row, served, weight_bytes))
        building_s = 0.0
    del served_model
    gc.collect()
    return lines


def _line(row: ModelRow, served: Served, weight_bytes: int) -> tuple[Any, ...]:
    measured, limit = served.measured, served.limit
    of_published = measured.whole / row.published if row.published else None
    seen = (row.title, row.requests, measured.most_at_once, measured.seconds, measured.whole, measured.steady)
    aims = (row.published, of_published, row.aim, row.floor, limit, measured.whole / limit, row.aim_ratio)
    return *seen, *aims, weight_bytes / 1e9, measured.energy.mean_power_w, served.opening_s


def run(options: argparse.Namespace) -> None:
    """Measure the rows, model by model, and print a table of each when it is complete."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = tuple(tiny_row(row) if options.tiny else row for row in select_rows(ROWS, options.row))
    rows = tuple(changed_row(row, options.budget, options.fp8_recipe) for row in rows)
    first = MODELS[rows[0].model]
    bench = Bench(device, first, first, rows, options.parts, options.tiny, json=options.json)
    print(describe_machine(device), flush=True)
    bench.bandwidth |= bandwidths(device, 1 << 24 if options.tiny else READ_BYTES, bench.seconds)
    bench.record("ceilings", {"bandwidth": bench.bandwidth})
    for name in dict.fromkeys(row.model for row in rows):
        lines = run_model(bench, name, [row for row in rows if row.model == name])
        bench.print_table(
            f"{name}, one GPU, random weights: output tokens/s",
            ("row", "requests", "concurrency", "s", "whole run", "steady", "TRT-LLM", "of it", "aim", "floor",
             "ceiling", "of ceiling", "aim", "weights GB", "W", "opening s"),
            lines,
            "whole run: ramp-up and drain included; steady: while the engine was full, none with a single wave",
            "TRT-LLM: 1.1, published for one H200, of Llama 3.3 70B per GPU of two",
            f"read bandwidth {bench.read / 1e12:.2f} TB/s, measured",
        )  # fmt: skip
    bench.record("rates", dict(bench.rates))


def row_times() -> str:
    """Return a line for each row: its output tokens, and the minutes that they take at the published rate."""
    lines = ["rows, their output tokens, and the minutes of these at the published rate (Qwen3: two to three):"]
    for row in ROWS:
        tokens = row.requests * row.osl
        minutes = f"{tokens / row.published / 60:.1f}" if row.published else "-"
        lines.append(f"  {row.title:30} {tokens:>9,} {minutes:>5}")
    return "\n".join(lines)


def main() -> None:
    parser = build_parser(__doc__, PARTS)
    parser.epilog = row_times()
    parser.add_argument("--budget", type=int, help="tokens of a step, at most, instead of each row's own")
    parser.add_argument("--fp8-recipe", choices=FP8_RECIPES["inference"], help="instead of the published scales")
    options = parse_options(parser, PARTS, ROWS)
    began = time.perf_counter()
    run(options)
    print(f"\n{time.perf_counter() - began:.0f} seconds in all")


if __name__ == "__main__":
    main()
