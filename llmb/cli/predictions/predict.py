"""`llmb-run predict`: the time of a training step or of served requests before they run, with an interval."""

import argparse
import json
from pathlib import Path
from typing import Any

from llmb.cli.explain.cost_options import add_cost_options, check_prices, cost_of, energy_of
from llmb.cli.predictions.engine_option import ENGINE_HELP
from llmb.cli.run_options import complete_with
from llmb.cli.subcommand import command

EXAMPLES = (
    "llmb-run predict -w pretrain_grok1 -s 314b --dtype fp8 --scale 512 --gpu-type h100",
    "llmb-run predict -w pretrain_llama3.1 -s 70b --dtype fp8 --gpu-type h100 --scale 64..16384",
    "llmb-run predict --model llama3.1-405b --gpu-type h100 --scale 512 --dtype bf16 --set tp=8 --set pp=8 --set cp=2 "
    "--set vp=8 --set gbs=256 --set seqlen=8192",
    "llmb-run predict --model config.json --gpu-type gb200 --scale 64 --set fsdp=true --set mbs=2 --json",
    "llmb-run predict --model qwen3-32b --gpu-type b200 --scale 64 --set tp=2 --what-if gpu.hbm_bw=2x,network=0.5x",
    "llmb-run predict --model llama3.1-70b --task serve --engine vllm --gpu-type h200 --dtype fp8 --isl 1024 "
    "--osl 1024 --concurrency 1..256 --set tp=2",
    "llmb-run predict -w inference_llama3.1 -s 8b --dtype fp8 --gpu-type h200 --task serve --json",
    "llmb-run predict --model llama3.2-1b --scale 1 --gpu-type rtx-4090    # after `llmb-run probe` on that machine",
    "llmb-run predict -w pretrain_llama3.1 -s 405b --dtype fp8 --gpu-type h100 --scale 1024 --tokens 15e12 "
    "--gpu-cost-per-hour 2 --cost-per-kwh 0.1",
    "llmb-run predict --rows runs.csv --json    # columns: model size gpu dtype gpus seqlen gbs mbs tp pp cp vp ep ...",
)
TASKS = ("train", "serve")
SERVING = ("isl", "osl", "concurrency")  # options of --task serve
# Options that describe a run, as the columns of a file do, and those of energy and cost, which its rows do not have.
OF_ONE_RUN = (
    "size", "dtype", "scale", "gpu_type", "set", "engine", *SERVING, "watts", "gpu_cost_per_hour", "cost_per_kwh",
    "tokens",
)  # fmt: skip


def add_commands(commands: Any) -> None:
    """Register predict."""
    summary = "the time of a training step or of served requests before they run: terms, throughput, memory, interval"
    parser = command(commands, "predict", run, summary, *EXAMPLES)
    add = parser.add_argument
    add("-w", "--workload", metavar="W", help="a workload with recipe rows")
    add("-s", "--size", metavar="SIZE", help="its model size")
    complete_with(
        add("--model", metavar="M", help="instead: a name of the catalog, or a Hugging Face config.json"), _names
    )
    add("--rows", type=Path, metavar="CSV", help="instead: many runs, one per row")
    add("--task", default="train", help="train (default) or serve")
    add(
        "--dtype",
        help="bf16, fp8, nvfp4, to train also fp8-row, fp8-block, fp8-mx; default: that of the recipe or weights",
    )
    add("--scale", metavar="N", help="number of GPUs: 512, 8,64 or a curve 8..16384")
    add("--gpu-type", metavar="GPU", help="type of GPU")
    add(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="layout, batch, recompute, engine; repeatable"
    )
    add("--what-if", metavar="CHANGES", help="changed hardware: gpu.hbm_bw=2x,gpu.flops=2x,gpu.nvlink=2x,network=0.5x")
    add("--json", action="store_true", help="as JSON: step_time_s or ttft_ms and tpot_ms, interval_80, terms, ...")
    add("--engine", help=ENGINE_HELP)
    add("--isl", type=int, metavar="N", help="serve: input tokens of a request")
    add("--osl", type=int, metavar="N", help="serve: output tokens of a request")
    add("--concurrency", metavar="N", help="serve: clients, each with one request at a time: 64, 1,4,16 or 1..1024")
    add_cost_options(parser)


def _names() -> list[str]:
    from llmb.perfmodel.shapes.model_catalog import catalog_names

    return sorted(set(catalog_names().values()))


def run(options: argparse.Namespace) -> int:
    """Predict one run, a scaling curve or a file of runs."""
    from llmb.errors import ConfigError, UnknownName

    if options.task not in TASKS:
        raise UnknownName("value of --task", options.task, TASKS)
    if sum(source is not None for source in (options.workload, options.model, options.rows)) != 1:
        raise ConfigError("predict: name the run with one of -w WORKLOAD, --model NAME|config.json or --rows FILE.csv")
    check_prices(options)
    if options.rows and (unused := [name for name in OF_ONE_RUN if getattr(options, name) not in (None, [])]):
        raise ConfigError(f"--{unused[0].replace('_', '-')} has no effect with --rows, whose columns describe each run")
    if options.task == "serve":
        from llmb.cli.predictions.predict_serving import run_serving

        return run_serving(options)
    if unused := [name for name in SERVING if getattr(options, name) is not None]:
        raise ConfigError(f"--{unused[0]} is for serving; add --task serve")
    return _predict_rows(options) if options.rows else _predict_setups(options)


def _predict_setups(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from llmb.cli.predictions.engine_option import other_engine_note, print_note
    from llmb.cli.predictions.stored_rates import stored_rates
    from llmb.perfmodel.step_time.measured_device import device_of
    from llmb.perfmodel.step_time.predictor import predict
    from llmb.perfmodel.step_time.run_description import NATIVE
    from llmb.perfmodel.step_time.setup_fields import changed_device
    from llmb.report.predictions.prediction_text import describe_curve, describe_prediction
    from llmb.report.terminal.colour import print_report

    setups = _recipe_setups(options) if options.workload else _model_setups(options)
    rates = stored_rates(setups[0].gpu, setups[0].engine == "native", setups[0].dtype)
    setups = [replace(setup, watts=options.watts, rates=rates) for setup in setups]
    on = changed_device(device_of(setups[0].gpu, rates), options.what_if) if options.what_if else None
    points = [(setup, predict(setup, on)) for setup in setups]
    if options.json:
        data = [
            _as_data(setup, prediction) | _energy_data(options, *_rate(setup, prediction))
            for setup, prediction in points
        ]
        print(json.dumps(data[0] if len(data) == 1 else data))
        return 0
    if len(points) > 1:
        print_report(describe_curve(points, [cost_of(options, *_rate(*point)) for point in points]))
    else:
        print_report(describe_prediction(*points[0], predict(setups[0]) if on else None))
        _print_energy(options, *points[0])
    first = setups[0]
    print_note(first.shape.context_note(first.seqlen))

    def native_time() -> str:
        native = _native_setup(options, first) if options.workload else replace(first, engine=NATIVE)
        seconds = predict(native, on).step_time_s
        return f"{seconds:.3f} s on {first.gpus} GPU{'s' if first.gpus > 1 else ''}"

    print_note(other_engine_note(options, first.engine, native_time))
    return 0


def _rate(setup: Any, prediction: Any) -> tuple[str, int, float]:
    return setup.gpu, setup.gpus, prediction.tokens_per_s_per_gpu * setup.gpus


def _energy_data(options: argparse.Namespace, gpu: str, gpus: int, tokens_per_s: float) -> dict[str, Any]:
    from dataclasses import asdict

    energy = energy_of(options, gpu, gpus, tokens_per_s)
    return {"energy": None if energy is None else asdict(energy)}


def _print_energy(options: argparse.Namespace, setup: Any, prediction: Any) -> None:
    """Print energy at the power limit, and costs as far as prices are given."""
    from llmb.report.predictions.energy_lines import energy_lines
    from llmb.report.terminal.colour import print_report

    energy = energy_of(options, *_rate(setup, prediction))
    if energy is None:
        return
    joules_per_step = setup.gpus * energy.watts_per_gpu * prediction.step_time_s
    print_report("\n".join(energy_lines(energy, joules_per_step)))


def _model_setups(options: argparse.Namespace) -> list[Any]:
    """Return the descriptions of any model at each scale; the batch grows with the number of GPUs."""
    from llmb.cli.predictions.engine_option import settings_with_engine
    from llmb.cli.predictions.stored_rates import gpu_name, stored_rates
    from llmb.errors import ConfigError
    from llmb.perfmodel.shapes.hf_shape import find_or_read_shape
    from llmb.perfmodel.step_time.cluster_fabric import FABRICS
    from llmb.perfmodel.step_time.setup_fields import build_setup, layout_gpus, parse_scales, parse_settings

    if options.size:
        raise ConfigError("-s names a size of -w; with --model write the whole name, such as llama3.1-8b")
    if options.gpu_type is None or options.scale is None:
        raise ConfigError(f"--model needs --gpu-type ({', '.join(FABRICS)}) and --scale, a number of GPUs")
    shape = find_or_read_shape(options.model)
    gpu, values = gpu_name(options.gpu_type), parse_settings(settings_with_engine(options))
    stored_rates(gpu, native=False)
    scales, dtype = parse_scales(options.scale), (options.dtype or "bf16").lower()
    if len(scales) == 1:
        return [build_setup(shape, gpu, scales[0], dtype, values)]
    ranks = layout_gpus(*(values.get(name, 1) for name in ("tp", "pp", "cp", "ep", "etp")))
    usable = _usable(options.scale, scales, ranks)
    return _curve(build_setup(shape, gpu, usable[0], dtype, values), usable)


def _curve(base: Any, scales: list[int]) -> list[Any]:
    from llmb.perfmodel.step_time.setup_fields import scaled

    return [scaled(base, scale) for scale in scales]


def _recipe_setups(options: argparse.Namespace) -> list[Any]:
    """Return the descriptions of a recipe row, at its own scale or with its layout at others (weak scaling)."""
    from dataclasses import replace

    from llmb.cli.predictions.engine_option import settings_with_engine
    from llmb.cli.recipe_row import native_row, published_row, split_engine
    from llmb.perfmodel.step_time.setup_fields import layout_gpus
    from llmb.perfmodel.step_time.step_setup import setup_of

    engine, settings = split_engine(settings_with_engine(options))
    config, scales = (native_row if engine == "native" else published_row)(options, settings)
    setup = setup_of(config)
    setup = replace(setup, engine=engine or setup.engine)
    split = setup.parallel
    ranks = layout_gpus(split.tp, split.pp, split.cp, split.ep, split.etp)
    return _curve(setup, _usable(options.scale or "the recipe", scales, ranks))


def _native_setup(options: argparse.Namespace, published: Any) -> Any:
    """Return the description of a recipe row as `submit` runs it, at the scale of the published one."""
    from dataclasses import replace

    from llmb.cli.recipe_row import native_row
    from llmb.perfmodel.step_time.step_setup import setup_of

    setup = setup_of(native_row(options, options.set)[0])
    return _curve(replace(setup, watts=published.watts, rates=published.rates), [published.gpus])[0]


def _usable(text: str, scales: list[int], ranks: int) -> list[int]:
    """Return the scales of a range that a layout of so many ranks can have; a list must have no others."""
    from llmb.errors import ConfigError

    usable = [scale for scale in scales if scale % ranks == 0]
    if not usable:
        raise ConfigError(f"no scale of {text} is a multiple of {ranks}, the GPUs that the layout takes")
    skipped = [str(scale) for scale in scales if scale % ranks]
    if skipped and ".." not in text:
        raise ConfigError(f"--scale {', '.join(skipped)}: the layout takes a multiple of {ranks} GPUs")
    return usable


def _predict_rows(options: argparse.Namespace) -> int:
    """Predict every row of a CSV file; a row that cannot be predicted says why."""
    from llmb.cli.predictions.row_predictions import print_row_predictions
    from llmb.perfmodel.step_time.predictor import predict
    from llmb.perfmodel.step_time.published_rows import COLUMNS, read_rows

    return print_row_predictions(
        read_rows(options.rows),
        COLUMNS,
        lambda setup, on: _as_data(setup, predict(setup, on)),
        options.what_if,
        options.json,
        {
            "step s": lambda item: f"{item['step_time_s']:.3f}",
            "tokens/s/GPU": lambda item: f"{item['tokens_per_s_per_gpu']:.0f}",
            "TFLOP/s/GPU": lambda item: f"{item['tflops_per_gpu']:.0f}",
            "GiB": lambda item: f"{item['memory_gib']:.0f}",
        },
    )


def _as_data(setup: Any, prediction: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from llmb.perfmodel.hardware import GIB
    from llmb.perfmodel.step_time.measured_device import ceilings_source

    capacity = setup.gpu_memory_bytes
    return {
        "ceilings": ceilings_source(setup.gpu, setup.rates),
        "model": setup.shape.model.name, "gpu": setup.gpu, "gpus": setup.gpus, "dtype": setup.dtype,
        "seqlen": setup.seqlen, "mbs": setup.mbs, "gbs": setup.gbs, "engine": setup.engine,
        "gpu_memory_gib": None if capacity is None else capacity / GIB,
        "note": setup.shape.context_note(setup.seqlen), **asdict(prediction),
    }  # fmt: skip
