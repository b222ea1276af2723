"""Departures of the native engine from a recipe row, and the check that it runs a configuration.

    config = adapt_to_engine(config, explicit={"cuda_graphs"})      at the desk, before anything is submitted
    departures(config)                                              one line per departure

A setting of a row that this engine does not support is left out, and recorded as an Override in config.json and in the
result. A setting of the user is never left out: it is refused.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from llmb.config.native.number_formats import with_number_formats
from llmb.config.native.outofcore_support import supported_outofcore
from llmb.config.native.serving_support import check_serving_layout, supported_serving
from llmb.config.native.training_support import runs_fp8_experts, supported_training
from llmb.config.overrides import typed_value
from llmb.config.row_selection import NO_ROW
from llmb.config.spec import Inference, Override, RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.memory_fit import recomputed_layers_to_fit
from llmb.perfmodel.serving_capacity import cache_capacity, free_bytes
from llmb.perfmodel.serving_time.request_waves import balanced_batch

SOURCE = "native engine: "  # how the source of a departure begins
ONE_RANK = f"{SOURCE}CUDA graphs of serving do not capture collectives, so they need a single GPU"
PIPELINE = f"{SOURCE}the pipeline schedule launches from the host, so CUDA graphs need pp=1"
MEMORY = f"{SOURCE}not all activations fit beside its master weights, gradients and moments"
MEMORY_SETTINGS = {  # a row in which the user has changed one of these is not changed further: it is refused
    "mbs", "gbs", "seqlen", "tp", "pp", "cp", "ep", "etp", "vp", "fsdp", "recompute_layers", "offload_layers",
}  # fmt: skip
HOPPER = f"{SOURCE}fp8 GEMMs of experts need a Hopper GPU; theirs are in bf16"


def adapt_to_engine(config: RunConfig, explicit: Collection[str]) -> RunConfig:
    """Return the configuration as the native engine runs it; `explicit`: the fields that the user has set."""
    if config.engine != "native":
        return config
    config = with_number_formats(config)
    work = config.workload
    if isinstance(work, Inference) and work.cuda_graphs and config.machine.gpu == "cpu":
        if "cuda_graphs" in explicit:
            raise ConfigError("cuda_graphs=true needs a CUDA GPU; machine.gpu=cpu has none")
        config = replace(config, workload=replace(work, cuda_graphs=False))  # a proxy anyway, which says so
    elif isinstance(work, Inference) and work.cuda_graphs and config.parallel.world_size > 1:
        config = _depart(config, "cuda_graphs", ONE_RANK, explicit)
    elif isinstance(work, Training) and work.cuda_graphs and config.parallel.pp > 1:
        config = _depart(config, "cuda_graphs", PIPELINE, explicit)
    if isinstance(work, Inference) and "max_batch_size" not in explicit:
        config = balance_waves(config)
    if isinstance(work, Training) and work.fp8_experts and not runs_fp8_experts(config):
        config = replace(_depart(config, "fp8_experts", HOPPER, explicit), reference=None)
    return config if config.proxy or MEMORY_SETTINGS & set(explicit) else _recompute_to_fit(config)


def balance_waves(config: RunConfig) -> RunConfig:
    """Return a row whose requests exceed its batch by little with a batch that runs those too, if the cache holds it.

    Where the memory is unknown, as on a CPU, the scheduler makes requests wait that the cache does not hold.
    """
    work = config.workload
    assert isinstance(work, Inference)
    if work.mode != "max_throughput" or work.rate is not None or work.dataset is not None:
        return config
    schedulers = config.parallel.tp if work.attention_dp else 1
    requests, concurrency = (-(-count // schedulers) for count in (work.num_requests, work.concurrency))
    batch = balanced_batch(work.max_batch_size, requests, concurrency)
    balanced = replace(config, workload=replace(work, max_batch_size=batch))
    free = free_bytes(balanced)
    holds = batch if free is None else cache_capacity(balanced, free).requests
    if batch == work.max_batch_size or not batch <= min(holds, work.max_num_tokens):
        return config
    last = f"a last wave of {requests % work.max_batch_size} of {requests} requests would run alone"
    departure = Override(field="max_batch_size", value=batch, replaced=work.max_batch_size, source=f"{SOURCE}{last}")
    return replace(balanced, overrides=(*config.overrides, departure), reference=None)


def _recompute_to_fit(config: RunConfig) -> RunConfig:
    """Return a row that fits other engines with as many layers recomputed as it needs here."""
    layers, work = recomputed_layers_to_fit(config), config.workload
    if layers is None or not isinstance(work, Training):
        return config
    departure = Override(field="recompute_layers", value=layers, replaced=work.recompute_layers, source=MEMORY)
    return replace(config, workload=replace(work, recompute_layers=layers), overrides=(*config.overrides, departure))


def check_engine_support(config: RunConfig) -> None:
    """Raise a ConfigError if the native engine would refuse the configuration; it asks the same when it starts."""
    _check_restarts(config)
    if config.engine != "native":
        return
    if isinstance(config.workload, Training):
        supported_training(config)
    elif isinstance(config.workload, Inference):
        supported_serving(config)
        check_serving_layout(config)
    else:
        supported_outofcore(config)


def _check_restarts(config: RunConfig) -> None:
    """Refuse restarts of a run that has no checkpoint to continue from."""
    trains = isinstance(config.workload, Training) and config.engine == "native"
    if config.limits.max_restarts and not (trains and getattr(config.workload, "checkpoint_every", None)):
        raise ConfigError("max_restarts: only native training restarts, with --set checkpoint_every=N; leave it out")


def departures(config: RunConfig) -> list[str]:
    """Return one line for each setting of the recipe row that the engine leaves out."""
    return [
        f"{o.field}={typed_value(o.value, o.field)} instead of the recipe's "
        f"{typed_value(o.replaced, o.field)} ({o.source})"
        for o in config.overrides
        if is_departure(o)
    ]


def is_departure(override: Override) -> bool:
    """Return whether the engine made this change, or the recipe has no row for the GPU; not the user."""
    return override.source.startswith((SOURCE, NO_ROW))


def departure_lines(configs: Iterable[RunConfig]) -> list[str]:
    """Return each departure of several runs once, with the runs that it is about."""
    names: dict[str, list[str]] = {}
    for config in configs:
        for line in departures(config):
            names.setdefault(line, []).append(config.name)
    return [f"{runs[0]}{f' and {len(runs) - 1} more' if len(runs) > 1 else ''}: {line}" for line, runs in names.items()]


def _depart(config: RunConfig, field: str, source: str, explicit: Collection[str]) -> RunConfig:
    """Turn a setting off and record it, unless the user has asked for it."""
    if field in explicit:
        raise ConfigError(f"{field}=true on {config.machine.gpus} x {config.machine.gpu}: {source}; leave it out")
    departure = Override(field=field, value=False, replaced=True, source=source)
    work = replace(config.workload, **{field: False})  # type: ignore[arg-type]
    return replace(config, workload=work, overrides=(*config.overrides, departure))
