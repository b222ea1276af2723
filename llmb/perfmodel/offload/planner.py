"""An out-of-core run's plan and what it is expected to take, made while the run is resolved.

    work = planned(work, model, "bf16", rates_of("h200", install))     # with plan, prediction and global batch

Both go into config.json: the engine only follows, and whoever reads the run later finds what was expected of it.
"""

from dataclasses import asdict, fields, replace
from functools import cache

from llmb.config.llama_layer_shapes import check_fp8_widths, check_plain_llama
from llmb.config.spec import Model, OutOfCore, Prediction
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import hardware
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU, Rates
from llmb.perfmodel.offload.plan_candidate import Planned, Wishes
from llmb.perfmodel.offload.plan_search import best_plan

DTYPES = ("bf16", "fp8", "fp32")


def planned(work: OutOfCore, model: Model, dtype: str, rates: Rates) -> OutOfCore:
    """The run with everything chosen that was left open; one line where it cannot be done."""
    _check(work, model, dtype, rates.gpu)
    asked = {field.name: getattr(work, field.name) for field in fields(Wishes) if field.name != "dtype"}
    found = _best(model, Wishes(dtype=dtype, **asked), rates)  # type: ignore[arg-type]
    return replace(work, gbs=found.plan.gbs, plan=found.plan, prediction=_prediction(found, rates))


@cache
def _best(model: Model, wishes: Wishes, rates: Rates) -> Planned:
    """A sweep over learning rates has one plan."""
    return best_plan(model, wishes, rates)


def _prediction(found: Planned, rates: Rates) -> Prediction:
    simulated, timed = found.simulated, rates != NOMINAL_CPU
    return Prediction(
        rates=asdict(rates),
        step_s=simulated.step_s if timed else None,
        compute_s=simulated.compute_s if timed else None,
        inbound_s=simulated.inbound_s if timed else None,
        outbound_s=simulated.outbound_s if timed else None,
        inbound_bytes=simulated.inbound_bytes,
        outbound_bytes=simulated.outbound_bytes,
        hardware_flops=simulated.hardware_flops,
        home_slots=simulated.home_slots,
        host_bytes=found.host_bytes,
        device_bytes=found.device_bytes,
    )


def _check(work: OutOfCore, model: Model, dtype: str, gpu: str) -> None:
    check_plain_llama(model)
    if dtype not in DTYPES:
        raise UnknownName("dtype of out-of-core training", dtype, DTYPES)
    if dtype == "fp8" and gpu != "cpu" and hardware.peak_flops(gpu, dtype) is None:
        raise ConfigError(f"{hardware.gpu(gpu).title} has no products in fp8; choose bf16")
    if dtype == "fp8":
        check_fp8_widths(model)
    if dtype == "fp32" and work.update != "stochastic":
        raise ConfigError(f"update={work.update} has no effect with fp32, whose weights need no rounding; leave it out")
    if work.pack and work.data is None:
        raise ConfigError("pack has no effect on synthetic tokens, which have no documents; set data=FILE, too")
    if work.lr_decay_steps is not None and work.lr_decay_steps <= work.lr_warmup_steps:
        raise ConfigError(
            f"lr_decay_steps {work.lr_decay_steps} must be more than lr_warmup_steps {work.lr_warmup_steps}"
        )
