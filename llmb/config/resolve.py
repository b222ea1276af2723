"""Resolve a recipe and a request into a complete, validated RunConfig.

    resolve(recipe, Request(size="8b", dtype="fp8", gpus=16, gpu="h100"))

Order, later wins: the recipe's defaults, its row, then each setting. All errors are found here, before a machine is
used.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llmb.config.overrides import Setting, parse_value
from llmb.config.parallel_layout import (
    accumulation_steps,
    check_has_experts,
    check_model,
    check_ranks,
    check_schedule,
    check_sequence,
    check_serving,
    format_layout,
)
from llmb.config.proxy import describe_change, small_proxy, true_width_proxy
from llmb.config.proxy_layout import fit_to_ranks, scale_down
from llmb.config.recipe import Recipe, Row, per_gpus
from llmb.config.row_selection import RunRequest, choose_row, gpu_of, inference_selectors
from llmb.config.run_list import Task
from llmb.config.serialization import RENAMED_FIELDS, build, convert, field_types, to_plain
from llmb.config.serving_settings import check_settings, drop_printed_lengths, proxy_fp8_scaling, update_dependent
from llmb.config.spec import (
    Inference,
    Limits,
    Machine,
    Model,
    OutOfCore,
    Override,
    Parallel,
    Precision,
    Profile,
    Reference,
    RunConfig,
    Training,
)
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import hardware
from llmb.perfmodel.memory_estimate import memory_estimate

WORKLOADS: dict[str, type] = {"training": Training, "inference": Inference, "outofcore": OutOfCore}
# A run that differs from its recipe row only in these is still compared with the published result.
COMPARABLE = {f.name for section in (Profile, Limits) for f in fields(section)}
COMPARABLE |= {"steps", "window", "seed", "lr", "weights"}
# Chosen by the plan of an out-of-core run, which is identified by model, sequence length and memory budgets.
PLAN_FIELDS = {
    "gbs", "chunk_tokens", "seqs_per_round", "resident_params", "resident_grads", "resident_states",
    "activation_slots", "full_saves", "attention_saves",
}  # fmt: skip
ENGINES = {"training": ("native", "megatron_bridge"), "inference": ("native", "trtllm"), "outofcore": ("native",)}
MEMORY_FRACTION = 0.9  # usable: the estimate leaves out the CUDA context, workspaces and fragmentation
PATHS = {"data", "resume", "dataset", "weights", "export"}
MAY_BE_ZERO = {
    "recompute_layers", "offload_layers", "profile_start", "seed", "lr_warmup_steps",
    "resident_params", "resident_grads", "resident_states", "activation_slots", "full_saves", "attention_saves",
    "isl_spread", "osl_spread", "temperature", "top_k", "warmup_requests",
}  # fmt: skip
FRACTIONS = {"kv_fraction", "top_p"}  # at most 1
NOT_SETTINGS = {"gpu", "size", "gpus", "layers", "model", "proxy", "true_width", "dp", "ga"}
PROFILE_DETAILS = ("profiler", "profile_start", "profile_stop", "profile_ranks", "gpu_metrics")
NCCL_TRACE_STEPS = 5  # its log grows by gigabytes
# Fields that cannot be set: those of a shared section without meaning for a kind of run, and computed ones.
WITHOUT_EFFECT = {
    "training": {"kv_dtype", "fp8_scaling"},
    "inference": {"fsdp", "cp", "etp", "vp", "overlap_gather", "overlap_reduce", "overlap_send"},
    "outofcore": {"kv_dtype", "fp8_scaling", "plan", "prediction", *(set(field_types(Parallel)) - {"dp"})},
}


def resolve_all(
    tasks: Iterable[Task], recipes: Mapping[str, Recipe], install: Path
) -> tuple[list[tuple[Task, RunConfig]], list[str]]:
    """Resolve each task to its RunConfig; collect one line for each that fails, without stopping the others."""
    resolved, errors = [], []
    for task in tasks:
        try:
            resolved.append((task, resolve(recipes[task.workload], task.request, install)))
        except ConfigError as error:
            errors.append(str(error))
    if errors and not resolved:
        raise ConfigError(errors[0])
    return resolved, list(dict.fromkeys(errors))


def resolve(recipe: Recipe, request: RunRequest, install: Path | None = None) -> RunConfig:
    """Return the RunConfig for a request; raise a one-line error that says what is wrong and what would be valid.

    `install`: folder with the measured rates of this machine; none: plans use the known rates of its GPU.
    """
    _refuse_true_width(recipe, request)
    settings = [s for s in request.settings if not s.field.startswith("model.") and s.field != "engine"]
    selectors = inference_selectors(recipe, settings)
    row, row_overrides = choose_row(recipe, request, selectors)
    if recipe.kind == "inference" and request.uses_proxy:
        settings = drop_printed_lengths(recipe, settings)
    gpu = request.gpu or ("cpu" if request.uses_proxy else gpu_of(row, recipe))
    types = _settable_types(recipe.kind)
    values = {**recipe.defaults, **{k: v for k, v in row.items() if k not in NOT_SETTINGS}, "dtype": request.dtype}
    values = {k: _first(v) if k in ("mode", "use_case") else v for k, v in values.items()} | selectors
    if request.proxy == "true-width":
        values |= {k: v for k, v in {"seqlen": recipe.defaults.get("seqlen"), "mbs": 1}.items() if k in values and v}
        values |= row.get("true_width", {})
    if values.get("gbs") is not None:
        values["gbs"] = per_gpus(values["gbs"], request.gpus, "gbs")
    layout = scale_down(values, recipe, request, selectors)
    as_printed = dict(values)
    overrides = [*row_overrides, *_apply(values, types, settings, recipe)]
    if recipe.kind == "inference":
        overrides += update_dependent(values, as_printed, {o.field for o in overrides})
    if recipe.kind == "outofcore" and request.uses_proxy:
        _leave_to_the_plan(values, {o.field for o in overrides})
    _shorten_trace(values, overrides)
    _fit_window(values, overrides)
    _refuse_without_effect(values, overrides, request.gpus)
    parallel = build(Parallel, {k: v for k, v in values.items() if k in field_types(Parallel)}, "parallel")
    check_has_experts(parallel, recipe.model(request.size))  # before a number for ep is proposed
    parallel = check_ranks(parallel, request.gpus)
    if layout is not None and recipe.kind == "training":
        fit_to_ranks(values, parallel, {o.field for o in overrides})
    base, proxy_notes = _base_model(recipe, request, row, parallel, values)
    model, model_overrides = _changed_model(base, request)
    _check_layout(parallel, model, values)
    proxy_notes += [f"{o.field}={o.value}" for o in model_overrides]
    proxy_notes += [f"{layout} {format_layout(parallel)}"] if layout is not None else []
    if recipe.kind == "training":
        check_sequence(values["seqlen"], parallel)
        values["ga"] = accumulation_steps(values["gbs"], values["mbs"], parallel.dp)
        check_schedule(values["ga"], parallel)
        for name in ("recompute_layers", "offload_layers"):
            if values.get(name, 0) > model.layers:
                raise ConfigError(f"{name}: {values[name]} is more than the {model.layers} layers of {model.name}")
    sections: dict[str, Any] = {
        name: build(kind, {k: v for k, v in values.items() if k in field_types(kind)}, name)
        for name, kind in _sections(recipe.kind).items()
        if name != "parallel"
    }
    if recipe.kind == "inference" and request.proxy != "true-width" and proxy_notes:
        sections["precision"], note = proxy_fp8_scaling(model, sections["precision"])
        proxy_notes += [note] if note else []
    if recipe.kind == "outofcore":
        from llmb.perfmodel.offload.machine_rates import known_rates, rates_of
        from llmb.perfmodel.offload.planner import (
            plan_workload,  # imported here: no other run needs the planner, which is slow to import
        )

        rates = known_rates(gpu) if install is None else rates_of(gpu, install)
        sections["workload"] = plan_workload(sections["workload"], model, request.dtype, rates)
    changed = tuple(overrides + model_overrides)
    config = RunConfig(
        engine=_engine(recipe, request, bool(proxy_notes)),
        name=_name(
            recipe, request, parallel, model.name, sections["workload"], request.uses_proxy or bool(proxy_notes)
        ),
        target=recipe.workload,
        size=request.size,
        proxy="; ".join(proxy_notes) or None,
        flops_convention=recipe.flops_convention,  # type: ignore[arg-type]
        machine=Machine(gpu=gpu, gpus=request.gpus, gpus_per_node=hardware.gpu(gpu).gpus_per_node),
        model=model,
        parallel=parallel,
        environment=request.environment,
        recipe_row=row,
        overrides=changed,
        reference=None if proxy_notes else _reference(recipe, request, gpu, values, changed),
        **sections,
    )
    if recipe.kind == "inference":
        check_settings(config, {o.field for o in overrides})
    return _at_true_width(config, request.memory_gib) if request.proxy == "true-width" else config


def _refuse_true_width(recipe: Recipe, request: RunRequest) -> None:
    if recipe.kind == "outofcore" and request.proxy == "true-width":
        raise ConfigError(
            f"{recipe.workload} needs no true-width proxy: it runs models that do not fit; leave out --proxy, or "
            "use fewer layers: --set model.layers=N"
        )


def _engine(recipe: Recipe, request: RunRequest, altered: bool) -> str:
    """Return the engine: the native one unless another is requested, which cannot run proxies."""
    setting = next((s for s in reversed(request.settings) if s.field == "engine"), None)
    if setting is None or setting.value == "native":
        return "native"
    if setting.value not in ENGINES[recipe.kind]:
        raise UnknownName(f"engine for {recipe.workload} ({setting.source})", str(setting.value), ENGINES[recipe.kind])
    if altered or request.uses_proxy:
        raise ConfigError(
            f"{setting.source} {setting.value} runs published models, not proxies; leave out --proxy or it"
        )
    return str(setting.value)


def _check_layout(parallel: Parallel, model: Model, values: Row) -> None:
    """Check that the layout divides the model, in training or in serving."""
    if "max_batch_size" in values:
        check_serving(parallel, model, values.get("attention_dp", False))
    else:
        check_model(parallel, model)


def _at_true_width(config: RunConfig, memory_gib: float | None) -> RunConfig:
    """Return the run with as many of the model's real layers as fit into memory."""
    budget = memory_gib * hardware.GIB if memory_gib else hardware.gpu(config.machine.gpu).memory_bytes
    if budget is None:
        raise ConfigError("a true-width proxy needs a memory budget; add --device-gb GIB")

    values = to_plain(config.workload)

    def fits(model: Model) -> bool:
        try:
            _check_layout(config.parallel, model, values)
        except ConfigError:
            return False
        return memory_estimate(replace(config, model=model)).total <= MEMORY_FRACTION * budget

    model = true_width_proxy(config.model, fits)
    note = f"true width, {describe_change(config.model, model)}"
    proxy = f"{config.proxy}; {note}" if config.proxy else note
    return replace(config, model=model, proxy=proxy, reference=None)


def _sections(kind: str) -> dict[str, type]:
    """Return the sections of a RunConfig that settings may change."""
    if kind not in WORKLOADS:
        raise UnknownName("recipe kind", kind, WORKLOADS)
    return {
        "parallel": Parallel,
        "precision": Precision,
        "workload": WORKLOADS[kind],
        "profile": Profile,
        "limits": Limits,
    }


def _settable_types(kind: str) -> dict[str, Any]:
    """Return the types of all fields that can be set for a kind of run."""
    types: dict[str, Any] = {}
    for section in _sections(kind).values():
        types.update(field_types(section))
    return {name: type_ for name, type_ in types.items() if name != "kind" and name not in WITHOUT_EFFECT[kind]}


def _apply(values: Row, types: dict[str, Any], settings: list[Setting], recipe: Recipe) -> list[Override]:
    """Apply each setting to the values and return the overrides."""
    records = []
    for setting in settings:
        if setting.field not in types or setting.field in ("dp", "ga"):
            _refuse_unknown(setting, types, recipe)
        where = f"{setting.field} ({setting.source})"
        value = parse_value(types[setting.field], setting.value, setting.field)
        if setting.field in PATHS and value is not None:
            value = os.path.abspath(os.path.expanduser(value))  # the engine runs in its run folder
        if setting.field not in ("mode", "use_case"):
            records.append(
                Override(field=setting.field, value=value, replaced=values.get(setting.field), source=setting.source)
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(setting.field, value, where)
        values[setting.field] = value
    return records


def _check_number(name: str, value: float, where: str) -> None:
    lowest = 0 if name in MAY_BE_ZERO else 1 if isinstance(value, int) else 1e-12
    highest = 1.0 if name in FRACTIONS else 1e15
    if not lowest <= value <= highest:  # NaN fails too
        minimum = "more than 0" if lowest == 1e-12 else f"at least {lowest}"
        at_most = " and at most 1" if name in FRACTIONS else ""
        raise ConfigError(f"{where}: {value} is out of range; it must be {minimum}{at_most}")


def _refuse_unknown(setting: Setting, types: dict[str, Any], recipe: Recipe) -> None:
    if setting.source.startswith("environment"):
        variable = setting.source.split()[1]
        raise ConfigError(
            f"{variable} is set but has no effect on {recipe.workload} ({recipe.kind}); unset it: env -u {variable} ..."
        )
    if setting.field in ("dp", "ga"):
        raise ConfigError(f"{setting.field} follows from the other settings; change tp, pp, cp, mbs or gbs instead")
    renamed = RENAMED_FIELDS.get(WORKLOADS[recipe.kind].__name__, {}).get(setting.field)
    choices = sorted(set(types) - {"dp", "ga"})
    raise UnknownName(f"field ({setting.source}) for {recipe.workload}:", setting.field, choices, renamed)


def _base_model(
    recipe: Recipe, request: RunRequest, row: Row, parallel: Parallel, values: Row
) -> tuple[Model, list[str]]:
    """Return the model or its small proxy, with notes on the difference; a proxy row may define its own model."""
    real = recipe.model(request.size)
    if not request.uses_proxy or request.proxy == "true-width":
        return real, []
    if "model" in row:
        proxy = recipe.model(request.size, row["model"])
    else:
        _check_layout(parallel, _changed_model(real, request)[0], values)  # the proxy itself is enlarged for any layout
        proxy = small_proxy(real, parallel)
    shorter = [f"sequences of {values['seqlen']} tokens"] if "seqlen" in values else []
    words = [describe_change(real, proxy), *shorter, *([row["proxy"]] if "proxy" in row else [])]
    return proxy, [", ".join(words)]


def _changed_model(model: Model, request: RunRequest) -> tuple[Model, list[Override]]:
    """Apply `--set model.layers=2`; a changed model is always a proxy."""
    records = []
    for setting in request.settings:
        if setting.field.startswith("model."):
            name = setting.field.removeprefix("model.")
            if name not in field_types(Model):
                renamed = RENAMED_FIELDS["Model"].get(name)
                raise UnknownName(f"model field ({setting.source}):", name, field_types(Model), renamed)
            value = convert(field_types(Model)[name], parse_value(field_types(Model)[name], setting.value, name), name)
            replaced = getattr(model, name)
            records.append(Override(field=setting.field, value=value, replaced=replaced, source=setting.source))
            model = replace(model, **{name: value})
    return model, records


def _leave_to_the_plan(values: Row, overridden: set[str]) -> None:
    """Drop the chunking of a proxy row if the user sets shorter sequences: the plan then chooses it."""
    if "seqlen" in overridden and "chunk_tokens" in values and values["seqlen"] <= values["chunk_tokens"]:
        for choice in PLAN_FIELDS - overridden - {"gbs"}:
            values.pop(choice, None)


def _shorten_trace(values: Row, overrides: list[Override]) -> None:
    """Limit a run that traces every collective to a few steps, unless the user sets `steps`."""
    steps = values.get("steps", 0)
    if values.get("nccl_trace") and steps > NCCL_TRACE_STEPS and "steps" not in {o.field for o in overrides}:
        overrides.append(Override(field="steps", value=NCCL_TRACE_STEPS, replaced=steps, source="ENABLE_NCCLTRACE"))
        values["steps"] = NCCL_TRACE_STEPS


def _fit_window(values: Row, overrides: list[Override]) -> None:
    """With fewer steps than the recipe's windows, measure the second half and profile the last steps."""
    if "steps" not in values:
        return
    steps, overridden = values["steps"], {o.field for o in overrides}
    if steps < 1:
        raise ConfigError("steps: at least 1 is needed")
    if len(values["window"]) != 2:
        raise ConfigError("window: expected the first and last step that count, such as 35-44")
    first, last = values["window"]
    if not 1 <= first <= last:
        raise ConfigError(f"window: {first}-{last} is not a range of steps, first to last")
    if last > steps and "window" in overridden:
        raise ConfigError(f"window: {first}-{last} ends after the last step, {steps}")
    if last > steps:
        window = [steps // 2 + 1, steps]
        overrides.append(Override(field="window", value=window, replaced=[first, last], source="fewer steps"))
        values["window"] = window
    if values.get("profile_stop", 0) > steps and not overridden & {"profile_start", "profile_stop"}:
        values["profile_start"], values["profile_stop"] = max(1, steps - 5), steps


def _refuse_without_effect(values: Row, overrides: list[Override], ranks: int) -> None:
    for override in overrides:
        if override.field in PROFILE_DETAILS and not values.get("profile"):
            name = override.source.removeprefix("environment ")
            raise ConfigError(
                f"{name}: {override.field} has no effect without profiling; add -p or ENABLE_PROFILE=true"
            )
    if absent := [rank for rank in values.get("profile_ranks", ()) if not 0 <= rank < ranks]:
        raise ConfigError(f"profile_ranks: there is no rank {absent[0]}; the run has ranks 0 to {ranks - 1}")
    if values.get("profile") and values.get("nccl_trace"):
        raise ConfigError("profiling and the NCCL trace exclude each other; choose -p or ENABLE_NCCLTRACE=true")
    if values.get("profile") and values.get("profile_start", 0) > values.get("profile_stop", 0):
        raise ConfigError(f"profile_start {values['profile_start']} is after profile_stop {values['profile_stop']}")


def _name(recipe: Recipe, request: RunRequest, parallel: Parallel, model: str, workload: Any, proxy: bool) -> str:
    """Return the name of the run, which describes its configuration like the names in NVIDIA's recipes."""
    p = parallel
    if recipe.kind == "inference":
        name = f"{model}_{workload.mode}_TP{p.tp}_EP{p.ep}_PP{p.pp}_CON{workload.concurrency}_{workload.use_case}"
    elif recipe.kind == "outofcore":
        budget = f"seq{workload.seqlen}_host{workload.host_gib:g}_dev{workload.device_gib:g}"
        name = f"{recipe.workload}_{request.size}_{request.dtype}_{budget}"
    else:
        layout = f"gpus{request.gpus}_tp{p.tp}_pp{p.pp}_cp{p.cp}_vp{p.vp}_ep{p.ep}"
        batch = f"mbs{workload.mbs}_gbs{workload.gbs}"
        name = f"{recipe.workload}_{request.size}_{request.dtype}_{layout}_{batch}"
    return name + ("_proxy" if proxy else "")


def _reference(
    recipe: Recipe, request: RunRequest, gpu: str, values: Row, changed: tuple[Override, ...]
) -> Reference | None:
    """Return the published result of exactly this configuration, if there is one."""
    comparable = COMPARABLE | PLAN_FIELDS if recipe.kind == "outofcore" else COMPARABLE
    if any(o.value != o.replaced and o.field not in comparable for o in changed):
        return None
    run = {**values, "gpu": gpu, "size": request.size, "gpus": request.gpus}
    columns = field_types(Reference)
    for row in recipe.references:
        if all(run.get(k) == v for k, v in row.items() if k not in columns):
            return build(Reference, {k: v for k, v in row.items() if k in columns}, f"{recipe.workload} reference")
    return None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
