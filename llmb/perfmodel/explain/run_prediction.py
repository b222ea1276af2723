"""Prediction of a resolved run, stored in its config.json: time with an interval, memory, terms.

    predict_run(config, install).value            seconds of a step
    with_prediction(config, install)              the configuration that is shown, and written when a run starts

Out-of-core runs take theirs from the plan. Where nothing can be predicted, a note says why.
"""

from dataclasses import replace
from pathlib import Path

from llmb.config.load_settings import LoadConfig
from llmb.config.spec import Inference, OutOfCore, Predicted, Prediction, RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.offload.machine_rates import Rates, measured_ceilings, measured_rates
from llmb.perfmodel.serving_time.serving_fields import serving_setup_of
from llmb.perfmodel.serving_time.serving_predictor import predict_serving, predict_speculation
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, Device, device
from llmb.perfmodel.step_time.measured_device import measured_device
from llmb.perfmodel.step_time.one_rank_time import rank_setup
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.step_setup import StepSetup, setup_of

SERVING_ENGINES = {"native": "native", "trtllm": "trtllm"}  # engine of a run -> that of the serving predictor
ON_CPU = "the speed of a CPU is not predicted"


def with_prediction(config: RunConfig, install: Path | None = None) -> RunConfig:
    """Return the configuration with its prediction and measured ceilings.

    A stored prediction stays; a load on an unknown server has none.
    """
    if config.predicted is not None or isinstance(config, LoadConfig):
        return config
    ceilings = None if install is None else measured_ceilings(config.launch_machine.gpu, install)
    return replace(config, predicted=predict_run(config, install), ceilings=ceilings)


def predict_run(config: RunConfig, install: Path | None = None) -> Predicted:
    """Return the prediction of a run; `install`: folder with the measured rates of this machine."""
    memory_gib = memory_estimate(config).total / GIB
    match config.workload:
        case Training():
            return _training(config, memory_gib, install)
        case OutOfCore() as work:
            return _out_of_core(config, work, memory_gib)
        case Inference():
            return _serving(config, memory_gib, install)


def _training(config: RunConfig, memory_gib: float, install: Path | None) -> Predicted:
    rates = measured_rates(config.launch_machine.gpu, install) if install and config.engine == "native" else None
    return predict_training(config, rates, memory_gib)


def predict_training(config: RunConfig, rates: Rates | None, memory_gib: float) -> Predicted:
    """Return the prediction of a training run on a GPU with these rates; none: those that its type is known to have."""
    note = unpredictable(config, rates)
    if note is not None:
        return Predicted(metric="step_time_s", memory_gib=memory_gib, note=note)
    try:
        setup = setup_of(config, rates=rates)
        setup, on = _device_of(setup, config.launch_machine.gpu, rates)
        if config.one_rank is not None:
            setup = rank_setup(config, setup)
        prediction = predict(setup, on, memory_gib=memory_gib)
    except ConfigError as error:  # a layout or a network that the predictor does not describe
        return Predicted(metric="step_time_s", memory_gib=memory_gib, note=str(error))
    # A rank that runs alone does not wait for its peers.
    absent = ("jitter",) if config.one_rank is not None else ()
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


def _serving(config: RunConfig, memory_gib: float, install: Path | None) -> Predicted:
    work, engine = config.workload, SERVING_ENGINES.get(config.engine)
    assert isinstance(work, Inference)
    measurable = install is not None and (engine == "native" or _is_unfitted(config))
    rates = measured_rates(config.launch_machine.gpu, install) if install and measurable else None
    note = unpredictable(config, rates)
    if engine is None:
        note = "the engine behind the server is not known"
    elif work.rate is not None:
        note = "a request rate is not predicted, only a fixed concurrency"
    elif work.dataset is not None:
        note = "requests of a dataset are not predicted, as they have lengths of their own"
    elif work.speculative_tokens and work.draft_acceptance is None:
        note = "how many drafts are accepted is not predicted; state it with draft_acceptance=FILE"
    speedup = None
    try:
        setup = None if note or engine is None else serving_setup_of(config, engine, rates)
        prediction = None if setup is None else predict_serving(setup)
        if setup is not None and work.draft_acceptance is not None:
            speedup = predict_speculation(setup, work.draft_acceptance).speedup
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
        speculative_speedup=speedup,
        memory_gib=memory_gib,
        terms=terms,
        source=f"constants of engine {engine}" + (f", rates {rates.source}" if rates else ""),
    )


def unpredictable(config: RunConfig, rates: Rates | None = None) -> str | None:
    """Return why the time of a run is not predicted; None: it is. `rates`: measured on the GPU that it runs on."""
    gpu = config.launch_machine.gpu
    if gpu == "cpu":
        return ON_CPU
    if _is_unfitted(config):
        if rates is None:
            return f"the rates of {gpu} are not known; `llmb-run probe` measures them for runs on one GPU"
        if config.machine.gpus > 1 or config.engine != "native":
            return f"rates measured on {gpu} predict runs of the native engine on one GPU"
        if config.precision.dtype not in ("fp8", "bf16") or (config.precision.dtype == "fp8" and not rates.fp8_tflops):
            return f"the rate of {config.precision.dtype} GEMMs was not measured on {gpu}"
        return None
    if config.machine.gpu not in FABRICS:
        return f"the rates of {config.machine.gpu} are not known"
    return "fp32 is not predicted" if config.precision.dtype == "fp32" else None


def _is_unfitted(config: RunConfig) -> bool:
    """Return whether a run is on a GPU of which only measured rates say how fast it is."""
    return config.launch_machine.gpu not in FABRICS and config.launch_machine.gpu != "cpu"


def _device_of(setup: StepSetup, launched: str, rates: Rates | None) -> tuple[StepSetup, Device]:
    """Return the GPU of a run: a row whose rates the measured ones scale, or one that consists of these."""
    if launched in FABRICS or rates is None:
        return setup, device(launched)
    return replace(setup, rates=None), measured_device(rates)


def _out_of_core(config: RunConfig, work: OutOfCore, memory_gib: float) -> Predicted:
    """Take the time that the plan was chosen for; no interval is known for it."""
    plan = work.prediction
    if plan is None or plan.step_s is None:
        return Predicted(metric="step_time_s", memory_gib=memory_gib, note=_untimed_plan(config, plan))
    return Predicted(
        metric="step_time_s",
        value=plan.step_s,
        memory_gib=memory_gib,
        source=f"its plan, by rates {plan.rates['source']}",
    )


def _untimed_plan(config: RunConfig, plan: Prediction | None) -> str:
    """Return why a plan has no time: nothing says how fast the machine, or the disk that it uses, is."""
    if config.machine.gpu == "cpu":
        return ON_CPU
    if plan is not None and plan.disk_bytes and plan.rates.get("disk_read_gbs") is None:
        return "the rates of the disk are not known; `llmb-run probe --disk-path FOLDER` measures them"
    return f"the rates of {config.machine.gpu} are not known; `llmb-run probe` measures them"
