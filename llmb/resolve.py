"""From a recipe and what the user asked for to a complete, checked RunConfig.

    resolve(recipe, Request(size="8b", dtype="fp8", gpus=16, gpu="h100"))

Order, later wins: the recipe's defaults, its row, then each setting. Everything that can be wrong is found here, before
a machine is spent.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from llmb import hardware
from llmb.errors import ConfigError, UnknownName
from llmb.layout import check_layout, check_sequence, split_batch
from llmb.plain import build, hints
from llmb.recipes.recipe import Recipe, Row, per_gpus
from llmb.settings import Setting, typed
from llmb.spec import (
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

WORKLOADS: dict[str, type] = {"training": Training, "inference": Inference, "outofcore": OutOfCore}
# A run that differs from the recipe only in these may still be compared with its published result.
HARMLESS = {f.name for part in (Profile, Limits) for f in fields(part)} | {"steps", "window", "seed", "lr"}
MAY_BE_ZERO = {"recompute_layers", "offload_layers", "profile_start", "seed"}
NOT_SETTINGS = {"gpu", "size", "gpus", "layers", "model", "proxy", "dp", "ga"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for, before it is known to make sense."""

    size: str
    dtype: str
    gpus: int
    gpu: str | None = None  # null: unknown here, the recipe's choice
    proxy: bool = False
    force: bool = False  # accept a dtype or GPU count the recipe does not list
    settings: tuple[Setting, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def resolve(recipe: Recipe, request: Request) -> RunConfig:
    """The RunConfig for a request, or one line that says what is wrong and what would be right."""
    proxy = request.proxy or request.gpu == "cpu"
    wishes = [s for s in request.settings if not s.field.startswith("model.")]
    selectors = _inference_selectors(recipe, wishes)
    row, beyond = _choose_row(recipe, request, proxy, selectors)
    gpu = request.gpu or ("cpu" if proxy else row["gpu"])
    kinds = _field_types(recipe.kind)
    cells = {**recipe.defaults, **{k: v for k, v in row.items() if k not in NOT_SETTINGS}, "dtype": request.dtype}
    cells = {k: _first(v) if k in ("mode", "use_case") else v for k, v in cells.items()} | selectors
    if "gbs" in cells and cells["gbs"] is not None:
        cells["gbs"] = per_gpus(cells["gbs"], request.gpus, "gbs")
    overrides = [*beyond, *_apply(cells, kinds, wishes, recipe)]
    changes, model_overrides = _model_changes(recipe, request, row)
    model = recipe.model(request.size, changes)
    proxied = [row["proxy"]] if proxy else []
    proxied += [f"{o.field}={o.value}" for o in model_overrides]
    _fit_window(cells, overrides)
    _refuse_without_effect(cells, overrides)
    parallel = build(Parallel, {k: v for k, v in cells.items() if k in hints(Parallel)}, "parallel")
    parallel = check_layout(parallel, model, request.gpus)
    if recipe.kind == "training":
        check_sequence(cells["seqlen"], parallel.cp)
        cells["ga"] = split_batch(cells["gbs"], cells["mbs"], parallel.dp)
        for name in ("recompute_layers", "offload_layers"):
            if cells.get(name, 0) > model.layers:
                raise ConfigError(f"{name}: {cells[name]} is more than the {model.layers} layers of {model.name}")
    sections: dict[str, Any] = {
        name: build(kind, {k: v for k, v in cells.items() if k in hints(kind)}, name)
        for name, kind in _sections(recipe.kind).items()
        if name != "parallel"
    }
    changed = tuple(overrides + model_overrides)
    return RunConfig(
        name=_name(recipe, request, parallel, model.name, sections["workload"], bool(proxied)),
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
    del names["kind"]
    return names


def _inference_selectors(recipe: Recipe, wishes: list[Setting]) -> dict[str, str]:
    """Mode and use case choose the row of an inference recipe; they are wishes with a default."""
    if recipe.kind != "inference":
        return {}
    chosen = {"mode": "max_throughput", "use_case": "reasoning"}
    for wish in wishes:
        if wish.field in chosen:
            choices = recipe.values(wish.field)
            if wish.value not in choices:
                raise UnknownName(f"{wish.field} ({wish.source})", wish.value, choices)
            chosen[wish.field] = wish.value
    return chosen


def _choose_row(recipe: Recipe, request: Request, proxy: bool, selectors: dict[str, str]) -> tuple[Row, list[Override]]:
    """The one row that fits; walks size, GPU, dtype, use case and scale so that the error names the first misfit."""
    wanted: dict[str, Any] = {}
    if request.gpu is not None:
        hardware.gpu(request.gpu)
    gpu = None if proxy else request.gpu
    for selector, value in [("size", request.size), ("gpu", gpu), ("dtype", request.dtype), *selectors.items()]:
        if value is None or (request.force and selector == "dtype"):
            continue
        choices = recipe.values(selector, proxy, **wanted)
        if value not in choices:
            about = " ".join(str(v) for v in wanted.values())
            what = "stand-in " if proxy else ""
            raise UnknownName(f"{what}{selector} of {recipe.workload} {about}".rstrip(), value, choices)
        wanted[selector] = value
    rows = recipe.matching(proxy, **wanted, gpus=request.gpus)
    if rows:
        return _nearest(rows, recipe, request), []
    return _beyond_the_table(recipe, request, proxy, wanted)


def _nearest(rows: list[Row], recipe: Recipe, request: Request) -> Row:
    """Of several rows that fit: the recipe's own GPU first, then the one that agrees with most of the settings."""
    asked = {(s.field, str(s.value)) for s in request.settings}
    return max(
        rows, key=lambda row: (row.get("gpu") == recipe.default_gpu, len(asked & {(k, str(v)) for k, v in row.items()}))
    )


def _beyond_the_table(
    recipe: Recipe, request: Request, proxy: bool, wanted: dict[str, Any]
) -> tuple[Row, list[Override]]:
    """A GPU count no row lists: above a weak-scaling range it follows the rule, elsewhere only with force."""
    rows = recipe.matching(proxy, **wanted)
    ranged = [r for r in rows if "-" in str(r.get("gpus"))]
    counts = recipe.values("gpus", proxy, **wanted)
    if ranged and request.gpus > counts[-1]:
        row, source = _nearest(ranged, recipe, request), "--scale, above the recipe's range: weak scaling continued"
    elif request.force:
        row, source = _nearest(rows, recipe, request), "--force"
    else:
        more = f"; {counts[-1] * 2} and more continue the weak scaling" if ranged else ""
        listed = ", ".join(map(str, counts))
        about = f"{recipe.workload} {request.size} {request.dtype}"
        if request.gpu and not proxy:
            about += f" on {request.gpu}"
        elif proxy:
            about += " as a stand-in (--proxy)"
        raise ConfigError(f"scale {request.gpus} is not listed for {about}; choices are: {listed}{more}")
    return row, [Override(field="gpus", value=request.gpus, replaced=row.get("gpus"), source=source)]


def _apply(cells: Row, kinds: dict[str, Any], wishes: list[Setting], recipe: Recipe) -> list[Override]:
    """Put each wish into the cells and keep a record of it."""
    records = []
    for wish in wishes:
        if wish.field not in kinds or wish.field in ("dp", "ga"):
            _refuse_unknown(wish, kinds, recipe)
        where = f"{wish.field} ({wish.source})"
        value = typed(kinds[wish.field], wish.value, wish.field)
        if wish.field not in ("mode", "use_case"):
            records.append(Override(field=wish.field, value=value, replaced=cells.get(wish.field), source=wish.source))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(wish.field, value, where)
        cells[wish.field] = value
    return records


def _check_number(name: str, value: float, where: str) -> None:
    lowest = 0 if name in MAY_BE_ZERO else 1 if isinstance(value, int) else 1e-12
    highest = 1.0 if name == "kv_fraction" else 1e15
    if not lowest <= value <= highest:  # NaN fails too
        allowed = "more than 0" if lowest == 1e-12 else f"at least {lowest}"
        at_most = " and at most 1" if name == "kv_fraction" else ""
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


def _model_changes(recipe: Recipe, request: Request, row: Row) -> tuple[dict[str, Any], list[Override]]:
    """A stand-in row's model, then `--set model.layers=2`: a changed model is always a proxy."""
    changes = dict(row.get("model") or {})
    records = []
    for wish in request.settings:
        if wish.field.startswith("model."):
            name = wish.field.removeprefix("model.")
            if name not in hints(Model):
                raise UnknownName(f"model field ({wish.source}):", name, hints(Model))
            value = typed(hints(Model)[name], wish.value, name)
            replaced = changes.get(name, recipe.models[request.size].get(name))
            records.append(Override(field=wish.field, value=value, replaced=replaced, source=wish.source))
            changes[name] = value
    return changes, records


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


def _refuse_without_effect(cells: Row, overrides: list[Override]) -> None:
    for override in overrides:
        if override.field in ("profile_start", "profile_stop", "gpu_metrics") and not cells.get("profile"):
            name = override.source.removeprefix("environment ")
            raise ConfigError(
                f"{name}: {override.field} has no effect without profiling; add -p or ENABLE_PROFILE=true"
            )
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
    if any(o.value != o.replaced and o.field not in HARMLESS for o in changed):
        return None
    known = {**cells, "gpu": gpu, "size": request.size, "gpus": request.gpus}
    own = hints(Reference)
    for row in recipe.references:
        if all(known.get(k) == v for k, v in row.items() if k not in own):
            return build(Reference, {k: v for k, v in row.items() if k in own}, f"{recipe.workload} reference")
    return None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
