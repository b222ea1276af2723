"""Resolve a recipe and a request into a complete, validated RunConfig.

    resolve(recipe, Request(size="8b", dtype="fp8", gpus=16, gpu="h100"))

Order, later wins: the recipe's defaults, its row, then each setting. All errors are found here, before a machine is
used.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmb.config.lr_schedule import LR_FIELDS, fill_lr_steps, with_default_lr
from llmb.config.model import Model
from llmb.config.native.departures import adapt_to_engine, check_engine_support
from llmb.config.native.number_formats import check_fp8_recipe
from llmb.config.native.one_rank import with_one_rank
from llmb.config.native.speculation import with_draft
from llmb.config.overrides import Setting
from llmb.config.parallel_layout import (
    accumulation_steps,
    check_has_experts,
    check_ranks,
    check_schedule,
    check_sequence,
    format_layout,
)
from llmb.config.proxy_layout import changed_layout, fit_to_ranks, scale_down
from llmb.config.recipe import Recipe, Row, per_gpus
from llmb.config.row_selection import RunRequest, choose_row, gpu_of, inference_selectors
from llmb.config.run_list import Task, out_of_core_target
from llmb.config.run_model import at_true_width, base_model, changed_model, check_heads, check_layout
from llmb.config.serialization import build, field_types
from llmb.config.serving_settings import check_settings, proxy_fp8_recipe, replace_fp8_cache, update_dependent
from llmb.config.settable_fields import apply_settings, check_row, settable_sections, settable_types
from llmb.config.spec import Limits, Machine, OutOfCore, Override, Parallel, Profile, Reference, RunConfig
from llmb.config.step_windows import fit_window, refuse_without_effect, shorten_trace
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import hardware

# A run that differs from its recipe row only in these is still compared with the published result.
COMPARABLE = {f.name for section in (Profile, Limits) for f in fields(section)}
COMPARABLE |= {"steps", "window", "seed", "weights", *LR_FIELDS}
COMPARABLE |= {"slo", "base_url", "served_model", "api_key_env"}
# Chosen by the plan of an out-of-core run, which is identified by model, sequence length and memory budgets.
PLAN_FIELDS = {
    "gbs", "chunk_tokens", "seqs_per_round", "resident_params", "resident_grads", "resident_states",
    "activation_slots", "full_saves", "attention_saves",
}  # fmt: skip
ENGINES = {
    "training": ("native", "megatron_bridge"),
    "inference": ("native", "trtllm", "openai"),
    "outofcore": ("native",),
}
REQUIRED = {
    "training": ("seqlen", "mbs", "gbs"),
    "inference": ("mode", "use_case", "isl", "osl", "concurrency", "max_batch_size", "num_requests"),
    "outofcore": ("seqlen",),
}
NOT_SETTINGS = {"gpu", "size", "gpus", "layers", "model", "true_width", "dp", "ga"}


def resolve_all(
    tasks: Iterable[Task], recipes: Mapping[str, Recipe], install: Path
) -> tuple[list[tuple[Task, RunConfig]], list[str]]:
    """Resolve each task to its RunConfig; collect one line for each that fails, without stopping the others."""
    resolved, errors = [], []
    for task in tasks:
        try:
            resolved.append((task, resolve(recipes[task.workload], task.request, install)))
        except ConfigError as error:
            errors.append(f"{error}{_out_of_core_hint(task, recipes)}")
    if errors and not resolved:
        raise ConfigError(errors[0])
    return resolved, list(dict.fromkeys(errors))


def _out_of_core_hint(task: Task, recipes: Mapping[str, Recipe]) -> str:
    """Return how one GPU trains a size that the recipe lists for several only."""
    request, recipe = task.request, recipes[task.workload]
    is_alone = recipe.kind == "training" and request.gpus == 1 and not request.uses_proxy
    if not is_alone or request.gpu in (None, *recipe.values("gpu", size=request.size, gpus=1)):
        return ""
    target = out_of_core_target(request.size, recipes)
    return f"; on one GPU it trains out of core: {target}" if target else ""


def resolve(recipe: Recipe, request: RunRequest, install: Path | None = None) -> RunConfig:
    """Return the RunConfig for a request; raise a one-line error that says what is wrong and what would be valid.

    `install`: folder with the measured rates of this machine; none: plans use the known rates of its GPU.
    """
    _refuse_true_width(recipe, request)
    settings = [s for s in request.settings if not s.field.startswith("model.") and s.field != "engine"]
    selectors = inference_selectors(recipe, settings)
    row, row_overrides = choose_row(recipe, request, selectors)
    gpu = request.gpu or ("cpu" if request.uses_proxy else gpu_of(row, recipe))
    values = _row_values(recipe, request, row, selectors)
    layout = scale_down(values, recipe, request, selectors)
    overrides = _override(values, recipe, request, gpu, settings, row_overrides)
    overridden = {o.field for o in overrides}
    layout = layout and changed_layout(layout, overridden)
    parallel = _parallel(values, recipe, request, layout, overridden)
    model, model_overrides, proxy_notes = _model(values, recipe, request, row, parallel, layout)
    if recipe.kind == "training":
        _check_batch(values, parallel, model)
    sections, notes = _sections(values, recipe, request, model, is_proxy=bool(proxy_notes))
    proxy_notes += notes
    if recipe.kind == "outofcore":
        sections["workload"] = _planned(sections, model, request.dtype, gpu, install)
    sections["workload"] = with_default_lr(sections["workload"], model, values)
    changed = (*overrides, *model_overrides)
    is_proxy = request.proxy is not None or bool(proxy_notes)
    config = RunConfig(
        engine=_engine(recipe, request, bool(proxy_notes)),
        name=_name(recipe, request, parallel, model.name, sections["workload"], is_proxy),
        target=recipe.workload,
        size=request.size,
        proxy="; ".join(proxy_notes) or None,
        flops_convention=recipe.flops_convention,  # type: ignore[arg-type]
        machine=Machine(
            gpu=gpu,
            gpus=request.gpus,
            gpus_per_node=hardware.gpu(gpu).gpus_per_node,
            gpu_memory_bytes=request.gpu_memory_bytes,
        ),
        model=model,
        parallel=parallel,
        environment=request.environment,
        recipe_row=row,
        overrides=changed,
        reference=None if proxy_notes else _reference(recipe, request, gpu, values, changed),
        **sections,
    )
    return _adapted(config, recipe, request, overridden)


def _row_values(recipe: Recipe, request: RunRequest, row: Row, selectors: dict[str, str]) -> Row:
    """Return the settings of a row over the recipe's defaults, before any override."""
    values = {**recipe.defaults, **{k: v for k, v in row.items() if k not in NOT_SETTINGS}, "dtype": request.dtype}
    values = {k: _first(v) if k in ("mode", "use_case") else v for k, v in values.items()} | selectors
    check_row(values, settable_types(recipe.kind), recipe)
    for name in REQUIRED.get(recipe.kind, ()):
        if values.get(name) is None:
            raise ConfigError(f"{recipe.workload}: its row for {request.size} {request.dtype} has no cell {name}")
    if request.proxy == "true-width":
        values |= {k: v for k, v in {"seqlen": recipe.defaults.get("seqlen"), "mbs": 1}.items() if k in values and v}
        values |= row.get("true_width", {})
    if values.get("gbs") is not None:
        values["gbs"] = per_gpus(values["gbs"], request.gpus, "gbs")
    return values


def _override(
    values: Row,
    recipe: Recipe,
    request: RunRequest,
    gpu: str,
    settings: list[Setting],
    row_overrides: list[Override],
) -> list[Override]:
    """Apply settings to the values of the row, and to those that depend on them; return every change made."""
    as_printed = dict(values)
    overrides = [*row_overrides, *apply_settings(values, settable_types(recipe.kind), settings, recipe)]
    if recipe.kind == "inference":
        overrides += update_dependent(values, as_printed, {o.field for o in overrides})
        overrides += replace_fp8_cache(values, gpu, {o.field for o in overrides})
    if recipe.kind == "outofcore" and request.uses_proxy:
        _leave_to_the_plan(values, {o.field for o in overrides})
    shorten_trace(values, overrides)
    fit_window(values, overrides)
    fill_lr_steps(values)
    refuse_without_effect(values, overrides, request.gpus)
    check_fp8_recipe(values.get("fp8_recipe"), recipe.kind, request.dtype)
    return overrides


def _parallel(values: Row, recipe: Recipe, request: RunRequest, layout: str | None, overridden: set[str]) -> Parallel:
    """Return the checked layout; a training proxy's batch is made to fit its ranks."""
    parallel = build(Parallel, {k: v for k, v in values.items() if k in field_types(Parallel)}, "parallel")
    check_has_experts(parallel, recipe.model(request.size))  # before a number for ep is proposed
    parallel = check_ranks(parallel, request.gpus)
    if layout is not None and recipe.kind == "training":
        fit_to_ranks(values, parallel, overridden)
    return parallel


def _model(
    values: Row, recipe: Recipe, request: RunRequest, row: Row, parallel: Parallel, layout: str | None
) -> tuple[Model, list[Override], list[str]]:
    """Return the model, its overrides, and what makes it a proxy."""
    base, proxy_notes = base_model(recipe, request, row, parallel, values)
    model, overrides = changed_model(base, request)
    check_heads(model)
    check_layout(parallel, model, values)
    proxy_notes += [f"{o.field}={o.value}" for o in overrides]
    proxy_notes += [f"{layout} {format_layout(parallel)}"] if layout is not None else []
    return model, overrides, proxy_notes


def _check_batch(values: Row, parallel: Parallel, model: Model) -> None:
    """Check sequence, batch and schedule of a training run, and set its accumulation steps."""
    check_sequence(values["seqlen"], parallel)
    values["ga"] = accumulation_steps(values["gbs"], values["mbs"], parallel.dp)
    check_schedule(values["ga"], parallel)
    for name in ("recompute_layers", "offload_layers"):
        if values.get(name, 0) > model.layers:
            raise ConfigError(f"{name}: {values[name]} is more than the {model.layers} layers of {model.name}")


def _sections(
    values: Row, recipe: Recipe, request: RunRequest, model: Model, *, is_proxy: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the sections of the RunConfig that settings fill, but for its layout; and a note of a proxy's scales."""
    sections: dict[str, Any] = {
        name: build(kind, {k: v for k, v in values.items() if k in field_types(kind)}, name)
        for name, kind in settable_sections(recipe.kind).items()
        if name != "parallel"
    }
    if recipe.kind != "inference" or request.proxy == "true-width" or not is_proxy:
        return sections, []
    sections["precision"], note = proxy_fp8_recipe(model, sections["precision"])
    return sections, [note] if note else []


def _planned(sections: dict[str, Any], model: Model, dtype: str, gpu: str, install: Path | None) -> OutOfCore:
    """Return an out-of-core workload with its plan."""
    from llmb.perfmodel.offload.machine_rates import known_rates, rates_of
    from llmb.perfmodel.offload.planner import plan_workload  # no other run needs the planner, which is slow to import

    rates = known_rates(gpu) if install is None else rates_of(gpu, install)
    return plan_workload(sections["workload"], model, dtype, rates, sections["precision"].fp8_recipe)


def _adapted(config: RunConfig, recipe: Recipe, request: RunRequest, overridden: set[str]) -> RunConfig:
    """Return the configuration as its engine runs it; refuse what the engine cannot."""
    if recipe.kind == "inference":
        check_settings(config, overridden)
    if request.one_rank is not None:
        config = with_one_rank(config, request.one_rank, request.uses_proxy)
    config = adapt_to_engine(config, overridden)
    if request.proxy == "true-width":
        config = at_true_width(config, request.memory_gib)
    config = with_draft(config)
    check_engine_support(config)
    return config


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


def _leave_to_the_plan(values: Row, overridden: set[str]) -> None:
    """Drop choices of a proxy row that the user's settings leave no room for: shorter sequences its chunking, LoRA the
    residency of gradients and state."""
    if values.get("lora_rank"):
        for choice in {"resident_grads", "resident_states"} - overridden:
            values.pop(choice, None)
    if "seqlen" in overridden and "chunk_tokens" in values and values["seqlen"] <= values["chunk_tokens"]:
        for choice in PLAN_FIELDS - overridden - {"gbs"}:
            values.pop(choice, None)


def _name(recipe: Recipe, request: RunRequest, parallel: Parallel, model: str, workload: Any, proxy: bool) -> str:
    """Return the name of the run, which describes its configuration like the names in NVIDIA's recipes."""
    p = parallel
    if recipe.kind == "inference":
        name = f"{model}_{workload.mode}_TP{p.tp}_EP{p.ep}_PP{p.pp}_CON{workload.concurrency}_{workload.use_case}"
    elif recipe.kind == "outofcore":
        budget = f"seq{workload.seqlen}_host{workload.host_gib:g}_dev{workload.device_gib:g}"
        name = f"{recipe.workload}_{request.size}_{request.dtype}_{budget}"
        name += f"_lora{workload.lora_rank}" if workload.lora_rank else ""
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
