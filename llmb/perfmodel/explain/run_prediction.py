"""Prediction of a resolved run, stored in its config.json: time with an interval, memory, terms.

    predict_run(config, install).value            seconds of a step
    with_prediction(config, install)              the configuration that is shown, and written when a run starts

Out-of-core runs take theirs from the plan. Where nothing can be predicted, a note says why.
"""

from dataclasses import replace
from pathlib import Path

from llmb.config.load_settings import LoadConfig
from llmb.config.spec import Inference, OutOfCore, Predicted, RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.offload.machine_rates import measured_rates
from llmb.perfmodel.serving_time.serving_fields import serving_setup_of
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, device
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.step_setup import setup_of

SERVING_ENGINES = {"native": "native", "trtllm": "trtllm"}  # engine of a run -> that of the serving predictor
BETWEEN_RANKS = ("tp", "cp", "ep", "pp", "dp", "fsdp", "bubble", "jitter")  # terms
ON_CPU = "the speed of a CPU is not predicted"


def with_prediction(config: RunConfig, install: Path | None = None) -> RunConfig:
    """Return the configuration with its prediction; a stored one stays, a load on an unknown server has none."""
    if config.predicted is not None or isinstance(config, LoadConfig):
        return config
    return replace(config, predicted=predict_run(config, install))


def predict_run(config: RunConfig, install: Path | None = None) -> Predicted:
    """Return the prediction of a run; `install`: folder with the measured rates of this machine."""
    memory_gib = memory_estimate(config).total / GIB
    match config.workload:
        case Training():
            return _training(config, memory_gib, install)
        case OutOfCore() as work:
            return _out_of_core(config, work, memory_gib)
        case Inference():
            return _serving(config, memory_gib)


def _training(config: RunConfig, memory_gib: float, install: Path | None) -> Predicted:
    note = unpredictable(config)
    if note is not None:
        return Predicted(metric="step_time_s", memory_gib=memory_gib, note=note)
    rates = measured_rates(config.launch_machine.gpu, install) if install and config.engine == "native" else None
    try:
        setup = setup_of(config, rates=rates)
    except ConfigError as error:  # a layout that the predictor does not describe
        return Predicted(metric="step_time_s", memory_gib=memory_gib, note=str(error))
    prediction = predict(setup, device(config.launch_machine.gpu), memory_gib=memory_gib)
    # A rank that runs alone, perhaps on another GPU than its layout is for, neither communicates nor waits for peers.
    absent = BETWEEN_RANKS if config.one_rank is not None else ()
    terms = {name: seconds for name, seconds in prediction.terms.items() if seconds and name not in absent}
    value = sum(terms.values())
    low, high = (value / prediction.step_time_s * bound for bound in prediction.interval_80)
    return Predicted(
        metric="step_time_s",
        value=value,
        interval_80=(low, high),
        memory_gib=memory_gib,
        terms=terms,
        source=f"constants of engine {setup.engine}" + (f", rates {rates.source}" if rates else ""),
    )


def _serving(config: RunConfig, memory_gib: float) -> Predicted:
    work, engine = config.workload, SERVING_ENGINES.get(config.engine)
    assert isinstance(work, Inference)
    note = unpredictable(config)
    if engine is None:
        note = "the engine behind the server is not known"
    elif work.rate is not None:
        note = "a request rate is not predicted, only a fixed concurrency"
    try:
        prediction = None if note or engine is None else predict_serving(serving_setup_of(config, engine))
    except ConfigError as error:
        prediction, note = None, str(error)
    if prediction is None:
        return Predicted(metric="output_tokens_per_s", memory_gib=memory_gib, note=note)
    terms = {
        f"{phase}_{name}": seconds
        for phase in ("decode_step", "prefill")
        for name, seconds in prediction.terms[phase].items()
        if seconds
    }
    return Predicted(
        metric="output_tokens_per_s",
        value=prediction.output_tokens_per_s,
        interval_80=prediction.interval_80["output_tokens_per_s"],
        ttft_ms=prediction.ttft_ms,
        tpot_ms=prediction.tpot_ms,
        memory_gib=memory_gib,
        terms=terms,
        source=f"constants of engine {engine}",
    )


def unpredictable(config: RunConfig) -> str | None:
    """Return why the time of a run is not predicted; None: it is."""
    gpu = config.launch_machine.gpu
    if gpu == "cpu":
        return ON_CPU
    for gpu_type in (gpu, config.machine.gpu):
        if gpu_type not in FABRICS:
            return f"the rates of {gpu_type} are not known"
    return "fp32 is not predicted" if config.precision.dtype == "fp32" else None


def _out_of_core(config: RunConfig, work: OutOfCore, memory_gib: float) -> Predicted:
    """Take the time that the plan was chosen for; no interval is known for it."""
    plan = work.prediction
    if plan is None or plan.step_s is None:
        note = ON_CPU if config.machine.gpu == "cpu" else f"the rates of {config.machine.gpu} are not known"
        return Predicted(metric="step_time_s", memory_gib=memory_gib, note=note)
    return Predicted(
        metric="step_time_s",
        value=plan.step_s,
        memory_gib=memory_gib,
        source=f"its plan, by rates {plan.rates['source']}",
    )
