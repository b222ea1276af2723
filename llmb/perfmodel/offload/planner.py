"""Plan and prediction of an out-of-core run, made while the run is resolved.

    workload = plan_workload(workload, model, "bf16", rates_of("h200", install))     # with plan and prediction

Both go into config.json: the engine only executes the plan, and whoever reads the run later finds what was predicted.
"""

from dataclasses import asdict, fields, replace
from functools import cache

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.native.lora_shapes import lora_of
from llmb.config.native.outofcore_support import check_outofcore_model
from llmb.config.offload_plan import PlanConstraints
from llmb.config.spec import OutOfCore, Prediction
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import hardware
from llmb.perfmodel.offload.machine_rates import Rates, nominal_rates
from llmb.perfmodel.offload.plan_candidate import PlanResult
from llmb.perfmodel.offload.plan_search import best_plan

DTYPES = ("bf16", "fp8", "fp32")


def plan_workload(
    workload: OutOfCore, model: Model, dtype: str, rates: Rates, fp8_recipe: str | None = None
) -> OutOfCore:
    """Return the workload with everything chosen that was left open; one line where no plan fits."""
    _check(workload, model, dtype, rates)
    is_timed = rates != nominal_rates(rates.gpu)
    rates = rates if workload.disk_gbs is None else rates.with_disk(workload.disk_gbs)
    lora = lora_of(workload, model, dtype)
    names = [field.name for field in fields(PlanConstraints) if field.name not in ("dtype", "fp8_recipe", "lora")]
    fixed = {name: getattr(workload, name) for name in names}
    constraints = PlanConstraints(dtype=dtype, fp8_recipe=fp8_recipe, lora=lora, **fixed)  # type: ignore[arg-type]
    result = _cached_best_plan(model, constraints, rates)
    if lora is not None:
        frozen = None if lora.frozen_weights == "fp32" else lora.frozen_weights
        workload = replace(workload, lora_alpha=lora.alpha, lora_targets=lora.targets, frozen_weights=frozen)
    return replace(workload, gbs=result.plan.gbs, plan=result.plan, prediction=_predict(result, rates, is_timed))


@cache
def _cached_best_plan(model: Model, constraints: PlanConstraints, rates: Rates) -> PlanResult:
    """Return the best plan; all runs of a sweep over learning rates share it."""
    return best_plan(model, constraints, rates)


def _predict(result: PlanResult, rates: Rates, is_timed: bool) -> Prediction:
    simulation = result.simulation
    is_timed = is_timed and (rates.disk_read_gbs is not None or not result.plan.uses_disk)
    return Prediction(
        rates=asdict(rates),
        step_s=simulation.step_s if is_timed else None,
        compute_s=simulation.compute_s if is_timed else None,
        inbound_s=simulation.inbound_s if is_timed else None,
        outbound_s=simulation.outbound_s if is_timed else None,
        inbound_bytes=simulation.inbound_bytes,
        outbound_bytes=simulation.outbound_bytes,
        disk_read_s=simulation.disk_read_s if is_timed else None,
        disk_write_s=simulation.disk_write_s if is_timed else None,
        disk_read_bytes=simulation.disk_read_bytes,
        disk_write_bytes=simulation.disk_write_bytes,
        hardware_flops=simulation.hardware_flops,
        host_slots=simulation.host_slots,
        host_bytes=result.host_bytes,
        device_bytes=result.device_bytes,
        disk_bytes=result.disk_bytes,
    )


def _has_fp8(rates: Rates) -> bool:
    """Return whether the GPU has fp8 GEMMs: by its published peaks, else by whether the probe could measure any."""
    published = hardware.gpu(rates.gpu).peak_flops
    return "fp8" in published if published else rates.fp8_tflops is not None


def _check(workload: OutOfCore, model: Model, dtype: str, rates: Rates) -> None:
    if dtype not in DTYPES:
        raise UnknownName("dtype of out-of-core training", dtype, DTYPES)
    check_outofcore_model(model, dtype)
    for name in ("full_saves", "activation_slots"):
        if getattr(workload, name) and not has_llama_layers(model):
            raise ConfigError(f"{name} has no effect on {model.name}: its layers recompute all but attention")
    if dtype == "fp8" and rates.gpu != "cpu" and not _has_fp8(rates):
        raise ConfigError(f"{hardware.gpu(rates.gpu).title} has no fp8 gemms; choose bf16")
    if dtype == "fp32" and workload.update != "stochastic":
        raise ConfigError(
            f"update={workload.update} has no effect with fp32, whose weights are not rounded; leave it out"
        )
    for name in ("disk_path", "disk_gbs"):
        if getattr(workload, name) is not None and not workload.disk_gib:
            raise ConfigError(f"{name} has no effect without a disk; also set disk_gib, the GiB that may be used of it")
    if workload.disk_gbs is not None and not workload.disk_gbs > 0:
        raise ConfigError(f"disk_gbs must be more than 0 GB/s, got {workload.disk_gbs:g}")
    for name in ("resident_grads", "resident_states"):
        if getattr(workload, name) is not None and workload.lora_rank:
            raise ConfigError(f"{name} has no effect with LoRA: frozen weights have none, and adapters stay resident")
    if workload.pack and workload.data is None:
        raise ConfigError("pack has no effect on synthetic tokens, which have no documents; also set data=FILE")
