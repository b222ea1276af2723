"""From a recipe and what the user asked for to a complete, checked RunConfig.

    resolve(recipe, Request(size="8b", dtype="fp8", gpus=16, gpu="h100"))

Order, later wins: the recipe's defaults, its row, then each setting. Everything that can be wrong is found here, before
a machine is spent.
"""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llmb.config.overrides import Setting, typed
from llmb.config.parallel_layout import (
    check_has_experts,
    check_model,
    check_ranks,
    check_schedule,
    check_sequence,
    check_serving,
    spelled,
    split_batch,
)
from llmb.config.proxy import describe_change, small, true_width
from llmb.config.proxy_layout import fit_to_ranks, scale_down
from llmb.config.recipe import Recipe, Row, per_gpus
from llmb.config.row_selection import Request, choose_row, gpu_of, inference_selectors
from llmb.config.serialization import build, convert, hints, to_plain
from llmb.config.serving_settings import check_settings, follow, scaling_of_stand_in, without_printed_lengths
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
# A run that differs from the recipe only in these may still be compared with its published result.
HARMLESS = {f.name for part in (Profile, Limits) for f in fields(part)} | {"steps", "window", "seed", "lr", "weights"}
# What a plan chooses: an out-of-core run is what it is by its model, its sequences and its budgets.
CHOICES_OF_A_PLAN = {
    "gbs", "chunk_tokens", "seqs_per_round", "resident_params", "resident_grads", "resident_states",
    "activation_slots", "full_saves", "attention_saves",
}  # fmt: skip
ENGINES = {"training": ("native", "megatron_bridge"), "inference": ("native", "trtllm"), "outofcore": ("native",)}
FILL = 0.9  # of the memory: the estimate leaves out the driver's context, workspaces and fragmentation
PATHS = {"data", "resume", "dataset", "weights", "export"}
MAY_BE_ZERO = {
    "recompute_layers", "offload_layers", "profile_start", "seed", "lr_warmup_steps",
    "resident_params", "resident_grads", "resident_states", "activation_slots", "full_saves", "attention_saves",
    "isl_spread", "osl_spread", "temperature", "top_k", "warmup_requests",
}  # fmt: skip
SHARES = {"kv_fraction", "top_p"}  # at most 1
NOT_SETTINGS = {"gpu", "size", "gpus", "layers", "model", "proxy", "true_width", "dp", "ga"}
PROFILE_DETAILS = ("profiler", "profile_start", "profile_stop", "profile_ranks", "gpu_metrics")
TRACED_STEPS = 5  # of a run with ENABLE_NCCLTRACE, whose log grows by gigabytes
# Fields that nobody can set: those of a shared section that mean nothing to a kind of run, and what is worked out.
WITHOUT_EFFECT = {
    "training": {"kv_dtype", "fp8_scaling"},
    "inference": {"fsdp", "cp", "etp", "vp", "overlap_gather", "overlap_reduce", "overlap_send"},
    "outofcore": {"kv_dtype", "fp8_scaling", "plan", "prediction", *(set(hints(Parallel)) - {"dp"})},
}


def resolve(recipe: Recipe, request: Request, install: Path | None = None) -> RunConfig:
    """The RunConfig for a request, or one line that says what is wrong and what would be right.

    `install`: where measured rates of this machine are looked for; none: plans use the known ones of its GPU.
    """
    _refuse_true_width(recipe, request)
    wishes = [s for s in request.settings if not s.field.startswith("model.") and s.field != "engine"]
    selectors = inference_selectors(recipe, wishes)
    row, beyond = choose_row(recipe, request, selectors)
    if recipe.kind == "inference" and request.stands_in:
        wishes = without_printed_lengths(recipe, wishes)
    gpu = request.gpu or ("cpu" if request.stands_in else gpu_of(row, recipe))
    kinds = _field_types(recipe.kind)
    cells = {**recipe.defaults, **{k: v for k, v in row.items() if k not in NOT_SETTINGS}, "dtype": request.dtype}
    cells = {k: _first(v) if k in ("mode", "use_case") else v for k, v in cells.items()} | selectors
    if request.proxy == "true-width":
        cells |= {k: v for k, v in {"seqlen": recipe.defaults.get("seqlen"), "mbs": 1}.items() if k in cells and v}
        cells |= row.get("true_width", {})
    if cells.get("gbs") is not None:
        cells["gbs"] = per_gpus(cells["gbs"], request.gpus, "gbs")
    layout = scale_down(cells, recipe, request, selectors)
    as_printed = dict(cells)
    overrides = [*beyond, *_apply(cells, kinds, wishes, recipe)]
    if recipe.kind == "inference":
        overrides += follow(cells, as_printed, {o.field for o in overrides})
    if recipe.kind == "outofcore" and request.stands_in:
        _leave_to_the_plan(cells, {o.field for o in overrides})
    _shorten_trace(cells, overrides)
    _fit_window(cells, overrides)
    _refuse_without_effect(cells, overrides, request.gpus)
    parallel = build(Parallel, {k: v for k, v in cells.items() if k in hints(Parallel)}, "parallel")
    check_has_experts(parallel, recipe.model(request.size))  # before a number for ep is proposed
    parallel = check_ranks(parallel, request.gpus)
    if layout is not None and recipe.kind == "training":
        fit_to_ranks(cells, parallel, {o.field for o in overrides})
    base, proxied = _base_model(recipe, request, row, parallel, cells)
    model, model_overrides = _changed_model(base, request)
    _check_layout(parallel, model, cells)
    proxied += [f"{o.field}={o.value}" for o in model_overrides]
    proxied += [f"{layout} {spelled(parallel)}"] if layout is not None else []
    if recipe.kind == "training":
        check_sequence(cells["seqlen"], parallel)
        cells["ga"] = split_batch(cells["gbs"], cells["mbs"], parallel.dp)
        check_schedule(cells["ga"], parallel)
        for name in ("recompute_layers", "offload_layers"):
            if cells.get(name, 0) > model.layers:
                raise ConfigError(f"{name}: {cells[name]} is more than the {model.layers} layers of {model.name}")
    sections: dict[str, Any] = {
        name: build(kind, {k: v for k, v in cells.items() if k in hints(kind)}, name)
        for name, kind in _sections(recipe.kind).items()
        if name != "parallel"
    }
    if recipe.kind == "inference" and request.proxy != "true-width" and proxied:
        sections["precision"], said = scaling_of_stand_in(model, sections["precision"])
        proxied += [said] if said else []
    if recipe.kind == "outofcore":
        from llmb.perfmodel.offload.machine_rates import known_rates, rates_of
        from llmb.perfmodel.offload.planner import (
            planned,  # here, since no other run needs the planner, which takes long to import
        )

        rates = known_rates(gpu) if install is None else rates_of(gpu, install)
        sections["workload"] = planned(sections["workload"], model, request.dtype, rates)
    changed = tuple(overrides + model_overrides)
    config = RunConfig(
        engine=_engine(recipe, request, bool(proxied)),
        name=_name(recipe, request, parallel, model.name, sections["workload"], request.stands_in or bool(proxied)),
        target=recipe.workload,
        size=request.size,
        proxy="; ".join(proxied) or None,
        flops_convention=recipe.flops_convention,  # type: ignore[arg-type]
        machine=Machine(gpu=gpu, gpus=request.gpus, gpus_per_node=hardware.gpu(gpu).gpus_per_node),
        model=model,
        parallel=parallel,
        environment=request.environment,
        recipe_row=row,
        overrides=changed,
        reference=None if proxied else _reference(recipe, request, gpu, cells, changed),
        **sections,
    )
    if recipe.kind == "inference":
        check_settings(config, {o.field for o in overrides})
    return _at_true_width(config, request.memory_gib) if request.proxy == "true-width" else config


def _refuse_true_width(recipe: Recipe, request: Request) -> None:
    if recipe.kind == "outofcore" and request.proxy == "true-width":
        raise ConfigError(
            f"{recipe.workload} needs no stand-in of true width: it runs models that do not fit; leave out --proxy, or "
            "take fewer layers: --set model.layers=N"
        )


def _engine(recipe: Recipe, request: Request, altered: bool) -> str:
    """Who runs it: this repository unless another engine is asked for, which knows no stand-ins."""
    wish = next((s for s in reversed(request.settings) if s.field == "engine"), None)
    if wish is None or wish.value == "native":
        return "native"
    if wish.value not in ENGINES[recipe.kind]:
        raise UnknownName(f"engine for {recipe.workload} ({wish.source})", str(wish.value), ENGINES[recipe.kind])
    if altered or request.stands_in:
        raise ConfigError(f"{wish.source} {wish.value} runs published models, not stand-ins; leave out --proxy or it")
    return str(wish.value)


def _check_layout(parallel: Parallel, model: Model, cells: Row) -> None:
    """Whether the layout divides the model, in training or, where there are requests, in serving."""
    if "max_batch_size" in cells:
        check_serving(parallel, model, cells.get("attention_dp", False))
    else:
        check_model(parallel, model)


def _at_true_width(config: RunConfig, memory_gib: float | None) -> RunConfig:
    """The run with as many of its model's real layers as the memory holds."""
    budget = memory_gib * hardware.GIB if memory_gib else hardware.gpu(config.machine.gpu).memory_bytes
    if budget is None:
        raise ConfigError("a stand-in of true width needs to know the memory it may fill; add --device-gb GIB")

    cells = to_plain(config.workload)

    def fits(model: Model) -> bool:
        try:
            _check_layout(config.parallel, model, cells)
        except ConfigError:
            return False
        return memory_estimate(replace(config, model=model)).total <= FILL * budget

    model = true_width(config.model, fits)
    said = f"true width, {describe_change(config.model, model)}"
    proxy = f"{config.proxy}; {said}" if config.proxy else said
    return replace(config, model=model, proxy=proxy, reference=None)


def _sections(kind: str) -> dict[str, type]:
    """The parts of a RunConfig that settings may change."""
    if kind not in WORKLOADS:
        raise UnknownName("recipe kind", kind, WORKLOADS)
    return {
        "parallel": Parallel,
        "precision": Precision,
        "workload": WORKLOADS[kind],
        "profile": Profile,
        "limits": Limits,
    }


def _field_types(kind: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for part in _sections(kind).values():
        names.update(hints(part))
    return {name: kind_of for name, kind_of in names.items() if name != "kind" and name not in WITHOUT_EFFECT[kind]}


def _apply(cells: Row, kinds: dict[str, Any], wishes: list[Setting], recipe: Recipe) -> list[Override]:
    """Put each wish into the cells and keep a record of it."""
    records = []
    for wish in wishes:
        if wish.field not in kinds or wish.field in ("dp", "ga"):
            _refuse_unknown(wish, kinds, recipe)
        where = f"{wish.field} ({wish.source})"
        value = typed(kinds[wish.field], wish.value, wish.field)
        if wish.field in PATHS and value is not None:
            value = os.path.abspath(os.path.expanduser(value))  # the engine works in its run folder
        if wish.field not in ("mode", "use_case"):
            records.append(Override(field=wish.field, value=value, replaced=cells.get(wish.field), source=wish.source))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(wish.field, value, where)
        cells[wish.field] = value
    return records


def _check_number(name: str, value: float, where: str) -> None:
    lowest = 0 if name in MAY_BE_ZERO else 1 if isinstance(value, int) else 1e-12
    highest = 1.0 if name in SHARES else 1e15
    if not lowest <= value <= highest:  # NaN fails too
        allowed = "more than 0" if lowest == 1e-12 else f"at least {lowest}"
        at_most = " and at most 1" if name in SHARES else ""
        raise ConfigError(f"{where}: {value} is out of range; it must be {allowed}{at_most}")


def _refuse_unknown(wish: Setting, kinds: dict[str, Any], recipe: Recipe) -> None:
    if wish.source.startswith("environment"):
        variable = wish.source.split()[1]
        raise ConfigError(
            f"{variable} is set but has no effect on {recipe.workload} ({recipe.kind}); unset it: env -u {variable} ..."
        )
    if wish.field in ("dp", "ga"):
        raise ConfigError(f"{wish.field} follows from the other settings; change tp, pp, cp, mbs or gbs instead")
    raise UnknownName(f"field ({wish.source}) for {recipe.workload}:", wish.field, sorted(set(kinds) - {"dp", "ga"}))


def _base_model(recipe: Recipe, request: Request, row: Row, parallel: Parallel, cells: Row) -> tuple[Model, list[str]]:
    """The model of the size or its small stand-in, with what that leaves out; a recipe's row may shape its own."""
    real = recipe.model(request.size)
    if not request.stands_in or request.proxy == "true-width":
        return real, []
    if "model" in row:
        made = recipe.model(request.size, row["model"])
    else:
        _check_layout(parallel, _changed_model(real, request)[0], cells)  # its stand-in grows into any layout
        made = small(real, parallel)
    shorter = [f"sequences of {cells['seqlen']} tokens"] if "seqlen" in cells else []
    words = [describe_change(real, made), *shorter, *([row["proxy"]] if "proxy" in row else [])]
    return made, [", ".join(words)]


def _changed_model(model: Model, request: Request) -> tuple[Model, list[Override]]:
    """`--set model.layers=2`: a changed model is always a proxy."""
    records = []
    for wish in request.settings:
        if wish.field.startswith("model."):
            name = wish.field.removeprefix("model.")
            if name not in hints(Model):
                raise UnknownName(f"model field ({wish.source}):", name, hints(Model))
            value = convert(hints(Model)[name], typed(hints(Model)[name], wish.value, name), name)
            replaced = getattr(model, name)
            records.append(Override(field=wish.field, value=value, replaced=replaced, source=wish.source))
            model = replace(model, **{name: value})
    return model, records


def _leave_to_the_plan(cells: Row, asked: set[str]) -> None:
    """A stand-in's row says how its own sequences are cut; of shorter ones that is for the plan to say."""
    if "seqlen" in asked and "chunk_tokens" in cells and cells["seqlen"] <= cells["chunk_tokens"]:
        for choice in CHOICES_OF_A_PLAN - asked - {"gbs"}:
            cells.pop(choice, None)


def _shorten_trace(cells: Row, overrides: list[Override]) -> None:
    """A run that traces every collective is a few steps long, unless its length was asked for."""
    steps = cells.get("steps", 0)
    if cells.get("nccl_trace") and steps > TRACED_STEPS and "steps" not in {o.field for o in overrides}:
        overrides.append(Override(field="steps", value=TRACED_STEPS, replaced=steps, source="ENABLE_NCCLTRACE"))
        cells["steps"] = TRACED_STEPS


def _fit_window(cells: Row, overrides: list[Override]) -> None:
    """Fewer steps than the recipe's windows reach: measure the second half and profile the last steps instead."""
    if "steps" not in cells:
        return
    steps, asked = cells["steps"], {o.field for o in overrides}
    if steps < 1:
        raise ConfigError("steps: at least 1 is needed")
    if len(cells["window"]) != 2:
        raise ConfigError("window: expected the first and last step that count, such as 35-44")
    first, last = cells["window"]
    if not 1 <= first <= last:
        raise ConfigError(f"window: {first}-{last} is not a range of steps, first to last")
    if last > steps and "window" in asked:
        raise ConfigError(f"window: {first}-{last} ends after the last step, {steps}")
    if last > steps:
        fitted = [steps // 2 + 1, steps]
        overrides.append(Override(field="window", value=fitted, replaced=[first, last], source="fewer steps"))
        cells["window"] = fitted
    if cells.get("profile_stop", 0) > steps and not asked & {"profile_start", "profile_stop"}:
        cells["profile_start"], cells["profile_stop"] = max(1, steps - 5), steps


def _refuse_without_effect(cells: Row, overrides: list[Override], ranks: int) -> None:
    for override in overrides:
        if override.field in PROFILE_DETAILS and not cells.get("profile"):
            name = override.source.removeprefix("environment ")
            raise ConfigError(
                f"{name}: {override.field} has no effect without profiling; add -p or ENABLE_PROFILE=true"
            )
    if absent := [rank for rank in cells.get("profile_ranks", ()) if not 0 <= rank < ranks]:
        raise ConfigError(f"profile_ranks: there is no rank {absent[0]}; the run has ranks 0 to {ranks - 1}")
    if cells.get("profile") and cells.get("nccl_trace"):
        raise ConfigError("profiling and the NCCL trace exclude each other; choose -p or ENABLE_NCCLTRACE=true")
    if cells.get("profile") and cells.get("profile_start", 0) > cells.get("profile_stop", 0):
        raise ConfigError(f"profile_start {cells['profile_start']} is after profile_stop {cells['profile_stop']}")


def _name(recipe: Recipe, request: Request, parallel: Parallel, model: str, workload: Any, proxy: bool) -> str:
    """The run's name spells its configuration, as readers of the documents know it."""
    p = parallel
    if recipe.kind == "inference":
        spelled = f"{model}_{workload.mode}_TP{p.tp}_EP{p.ep}_PP{p.pp}_CON{workload.concurrency}_{workload.use_case}"
    elif recipe.kind == "outofcore":
        budget = f"seq{workload.seqlen}_host{workload.host_gib:g}_dev{workload.device_gib:g}"
        spelled = f"{recipe.workload}_{request.size}_{request.dtype}_{budget}"
    else:
        layout = f"gpus{request.gpus}_tp{p.tp}_pp{p.pp}_cp{p.cp}_vp{p.vp}_ep{p.ep}"
        batch = f"mbs{workload.mbs}_gbs{workload.gbs}"
        spelled = f"{recipe.workload}_{request.size}_{request.dtype}_{layout}_{batch}"
    return spelled + ("_proxy" if proxy else "")


def _reference(
    recipe: Recipe, request: Request, gpu: str, cells: Row, changed: tuple[Override, ...]
) -> Reference | None:
    """The published result of exactly this configuration, if there is one."""
    harmless = HARMLESS | CHOICES_OF_A_PLAN if recipe.kind == "outofcore" else HARMLESS
    if any(o.value != o.replaced and o.field not in harmless for o in changed):
        return None
    known = {**cells, "gpu": gpu, "size": request.size, "gpus": request.gpus}
    own = hints(Reference)
    for row in recipe.references:
        if all(known.get(k) == v for k, v in row.items() if k not in own):
            return build(Reference, {k: v for k, v in row.items() if k in own}, f"{recipe.workload} reference")
    return None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
