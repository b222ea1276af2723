"""`llmb-run predict --task serve`: TTFT, TPOT and throughput of a serving engine before it runs."""

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from llmb.cli.explain.cost_options import cost_of, energy_of
from llmb.cli.predictions.engine_option import other_engine_note, print_note
from llmb.cli.predictions.stored_rates import gpu_name, stored_rates
from llmb.config.spec import Inference
from llmb.errors import ConfigError
from llmb.perfmodel.explain.energy_cost import EnergyCost
from llmb.perfmodel.serving_time.serving_constants import parse_engine
from llmb.perfmodel.serving_time.serving_predictor import (
    ServingPrediction,
    predict_serving,
    serving_device,
    unproven_note,
)
from llmb.perfmodel.serving_time.serving_setup import WAVES, ServingSetup
from llmb.perfmodel.shapes.hf_shape import find_or_read_shape
from llmb.perfmodel.step_time.cluster_fabric import FABRICS
from llmb.perfmodel.step_time.measured_device import ceilings_source
from llmb.perfmodel.step_time.run_description import NATIVE
from llmb.perfmodel.step_time.setup_fields import changed_device


def run_serving(options: argparse.Namespace) -> int:
    """Predict one load, a curve over concurrency or a file of loads."""
    from llmb.report.predictions.energy_lines import energy_lines
    from llmb.report.predictions.serving_text import describe_serving, describe_serving_curve
    from llmb.report.terminal.colour import print_report

    if options.rows:
        return _predict_rows(options)
    setups = _recipe_setups(options) if options.workload else _model_setups(options)
    on = changed_device(serving_device(setups[0]), options.what_if) if options.what_if else None
    points = [(setup, predict_serving(setup, on)) for setup in setups]
    if options.json:
        data = [serving_data(setup, p) | {"energy": _energy_data(options, setup, p)} for setup, p in points]
        print(json.dumps(data[0] if len(data) == 1 else data))
        return 0
    if len(points) > 1:
        costs = [cost_of(options, setup.gpu, setup.gpus, p.output_tokens_per_s) for setup, p in points]
        print_report(describe_serving_curve(points, costs))
    else:
        print_report(describe_serving(*points[0], predict_serving(setups[0]) if on else None))
        if (energy := _energy(options, *points[0])) is not None:
            print_report("\n".join(energy_lines(energy, unit="output tokens")))
    first = setups[0]
    print_note(first.shape.context_note(first.isl + first.osl))

    def native_time() -> str:
        e2e_ms = predict_serving(replace(first, engine=NATIVE), on).e2e_ms
        return f"E2E {e2e_ms:,.1f} ms at concurrency {first.concurrency}"

    print_note(other_engine_note(options, first.engine, native_time))
    return 0


def _energy(options: argparse.Namespace, setup: ServingSetup, prediction: ServingPrediction) -> EnergyCost | None:
    """Return energy and cost of a million output tokens; None: the power of the GPU is not known."""
    energy: EnergyCost | None = energy_of(options, setup.gpu, setup.gpus, prediction.output_tokens_per_s)
    return energy


def _energy_data(options: argparse.Namespace, setup: ServingSetup, p: ServingPrediction) -> dict[str, Any] | None:
    energy = _energy(options, setup, p)
    return None if energy is None else asdict(energy)


def _model_setups(options: argparse.Namespace) -> list[ServingSetup]:
    from llmb.perfmodel.serving_time.serving_fields import (
        build_serving_setup,
        parse_concurrencies,
        parse_serving_settings,
    )

    missing = [name for name in ("gpu_type", "isl", "osl", "concurrency") if getattr(options, name) is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(
            f"--model with --task serve needs {flags}; GPU types are: {', '.join(FABRICS)}; "
            "lengths and concurrency such as --isl 1024 --osl 1024 --concurrency 64"
        )
    if options.scale is not None:
        raise ConfigError("--scale is for training; the layout gives the GPUs of an engine: --set tp=2")
    gpu, values = gpu_name(options.gpu_type), parse_serving_settings(options.set)
    shape, engine = find_or_read_shape(options.model), parse_engine(options.engine or "vllm")
    dtype = (options.dtype or shape.checkpoint or "bf16").lower()
    rates = stored_rates(gpu, engine == "native", dtype)
    return [
        build_serving_setup(shape, gpu, dtype, engine, (options.isl, options.osl), clients, values, rates)
        for clients in parse_concurrencies(options.concurrency)
    ]


def _recipe_setups(options: argparse.Namespace) -> list[ServingSetup]:
    """Return the description of an inference row, at its own concurrency and lengths or at others."""
    from llmb.cli.recipe_row import resolve_row
    from llmb.perfmodel.serving_time.serving_fields import parse_concurrencies, serving_setup_of

    config, engine = resolve_row(options)[0], parse_engine(options.engine or "native")
    lengths = {name: getattr(options, name) for name in ("isl", "osl") if getattr(options, name) is not None}
    if lengths and isinstance(config.workload, Inference):
        config = replace(config, workload=replace(config.workload, **lengths))
    rates = stored_rates(config.machine.gpu, engine == "native", config.precision.dtype)
    setup = serving_setup_of(config, engine, rates)
    if not options.concurrency:
        return [setup]
    requests = setup.concurrency * setup.waves  # of the row, which other numbers of clients send too
    clients = parse_concurrencies(options.concurrency)
    return [replace(setup, concurrency=n, waves=max(1, min(WAVES, requests // n))) for n in clients]


def _predict_rows(options: argparse.Namespace) -> int:
    """Predict every row of a CSV file; a row that cannot be predicted says why."""
    from llmb.cli.predictions.row_predictions import print_row_predictions
    from llmb.perfmodel.serving_time.serving_rows import COLUMNS, read_serving_rows

    return print_row_predictions(
        read_serving_rows(options.rows),
        COLUMNS,
        lambda setup, on: serving_data(setup, predict_serving(setup, on)),
        options.what_if,
        options.json,
        {
            "isl": lambda item: item["isl"],
            "osl": lambda item: item["osl"],
            "concurrency": lambda item: item["concurrency"],
            "TTFT ms": lambda item: f"{item['ttft_ms']:.0f}",
            "TPOT ms": lambda item: "-" if item["tpot_ms"] is None else f"{item['tpot_ms']:.2f}",
            "output tokens/s": lambda item: f"{item['output_tokens_per_s']:.0f}",
        },
    )


def serving_data(setup: ServingSetup, prediction: ServingPrediction) -> dict[str, Any]:
    """Return a prediction with what it is of, as JSON shows it."""
    return {
        "model": setup.shape.model.name, "engine": setup.engine, "gpu": setup.gpu, "gpus": setup.gpus,
        "dtype": setup.dtype, "kv_dtype": setup.kv_dtype, "isl": setup.isl, "osl": setup.osl,
        "concurrency": setup.concurrency, "ceilings": ceilings_source(setup.gpu, setup.rates),
        "unproven": unproven_note(setup), "note": setup.shape.context_note(setup.isl + setup.osl),
        **asdict(prediction),
    }  # fmt: skip
