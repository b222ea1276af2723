"""Check that a run fits into memory, and find a change that would make it fit.

    misfit(config)                       one line with the numbers and what would fit; None: it fits, or nobody knows
    host_misfit(config, 4, available)    the same for the host memory of four ranks
    recomputed_layers_to_fit(config)     how many layers it must recompute to fit

An estimate for the native engine is within 1 % of what its tensors take (bench/RESULTS.md); the CUDA context, NCCL's
buffers and fragmentation come on top, so a part of the GPU is left to them. Estimates for other engines are rougher:
published runs that are known to have worked come out at up to 109 %.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from llmb.config.parallel_layout import max_layers_per_rank
from llmb.config.spec import Inference, OutOfCore, RunConfig, Training
from llmb.perfmodel import serving_capacity
from llmb.perfmodel.hardware import GIB, memory_bytes, with_article
from llmb.perfmodel.memory_estimate import memory_estimate

USABLE_FRACTION = 0.97  # of a GPU's memory: runs of 134 of 139 GiB have been measured
EXTERNAL_TOLERANCE = 1.15  # times a GPU's memory, for the estimates of other engines
CPU_RANK_BYTES = 0.4 * GIB  # measured: a process with torch and gloo, and no model
GPU_RANK_BYTES = 1.0 * GIB  # host memory of a process with torch and a CUDA context
LAUNCHER_BYTES = 0.2 * GIB  # measured: torchrun
MOST_GPUS = 4096  # that a remedy proposes
SMALLER_BATCHES = 8  # divisors of the batch that are tried below the largest that should fit


def misfit(config: RunConfig) -> str | None:
    """Return why a run does not fit on its GPUs and what would; None if it does, or their memory is unknown."""
    memory = memory_bytes(config.launch_machine)
    if memory is None:
        return None
    match config.workload:
        case Inference():
            return serving_capacity.misfit(config)
        case OutOfCore() as work:
            return _plan_misfit(config, work, memory)
        case Training():
            return _training_misfit(config, memory)


def _training_misfit(config: RunConfig, memory: float) -> str | None:
    estimate, usable = memory_estimate(config), _usable(config, memory)
    if estimate.total <= usable:
        return None
    parts = ("weights", "gradients", "optimizer", "activations")
    numbers = ", ".join(f"{part} {getattr(estimate, part) / GIB:,.1f}" for part in parts)
    reserve = f", {_gib(usable)} of them usable" if usable < memory else ""
    needs = f"{_subject(config)} needs about {_gib(estimate.total)} on each GPU ({numbers})"
    has = f"{with_article(config.launch_machine.gpu)} has {_gib(memory)}{reserve}"
    return f"{needs}; {has}; {_join(remedies(config, usable))}"


def _plan_misfit(config: RunConfig, work: OutOfCore, memory: float) -> str | None:
    """Compare what the plan of an out-of-core run allocates, the CUDA context included, with the GPU."""
    planned = memory_estimate(config).total
    if planned <= memory:
        return None
    uses = f"the plan uses {_gib(planned)} of the {work.device_gib:g} GiB of device memory that --device-gb allows"
    return f"{uses}, {with_article(config.launch_machine.gpu)} has {_gib(memory)}; lower --device-gb"


def _usable(config: RunConfig, memory: float) -> float:
    return memory * (USABLE_FRACTION if config.engine == "native" else EXTERNAL_TOLERANCE)


def remedies(config: RunConfig, limit: float) -> Iterator[str]:
    """Yield the changes of a training run that bring its estimate below a limit, the cheapest first."""
    work = _training(config)
    smaller = _largest_micro_batch(config, limit)
    if smaller is not None:
        yield f"--set mbs={smaller} fits"
    layers = _fewest_recomputed_layers(config, limit)
    if layers is not None:
        yield f"--set recompute_layers={layers} fits"
    elif smaller is None and work.mbs > 1:
        alone = _with_micro_batch(config, 1)
        layers = _fewest_recomputed_layers(alone, limit)
        if layers is not None:
            yield f"--set mbs=1 --set recompute_layers={layers} fits"
    gpus = _fewest_gpus(config, limit)
    if gpus is not None:
        yield f"--scale {gpus} fits"
    fewer = _most_layers(config, limit) if config.one_rank is not None else None
    if fewer is not None:
        yield f"--set model.layers={fewer} fits, as a proxy"


def _fits(config: RunConfig, limit: float) -> bool:
    return memory_estimate(config).total <= limit


def _with_micro_batch(config: RunConfig, mbs: int) -> RunConfig:
    work = _training(config)
    return replace(config, workload=replace(work, mbs=mbs, ga=work.gbs // config.parallel.dp // mbs))


def _largest_micro_batch(config: RunConfig, limit: float) -> int | None:
    """Return the largest smaller micro-batch size that fits and divides the global batch."""
    work, sequences = _training(config), _training(config).gbs // config.parallel.dp
    largest = _last(1, work.mbs - 1, lambda mbs: _fits(_with_micro_batch(config, mbs), limit))
    if largest is None:
        return None
    divisors = (mbs for mbs in range(min(largest, 1 << 16), 0, -1) if sequences % mbs == 0)
    nearest = [mbs for _, mbs in zip(range(SMALLER_BATCHES), divisors, strict=False)]
    return next((mbs for mbs in nearest if _fits(_with_micro_batch(config, mbs), limit)), None)


def _fewest_recomputed_layers(config: RunConfig, limit: float) -> int | None:
    """Return the smallest larger number of recomputed layers with which the run fits."""
    work = _training(config)
    most = max_layers_per_rank(config.model.layers, config.parallel) - work.offload_layers

    def fits(recomputed: int) -> bool:
        return _fits(replace(config, workload=replace(work, recompute_layers=recomputed)), limit)

    if most <= work.recompute_layers or not fits(most):
        return None
    last_misfit = _last(work.recompute_layers, most, lambda layers: not fits(layers))
    return most if last_misfit is None else last_misfit + 1


def _fewest_gpus(config: RunConfig, limit: float) -> int | None:
    """Return the smallest larger number of GPUs on which the run fits, with more data-parallel ranks."""
    if config.machine.gpus == 1:
        return None
    factor = 2
    while factor * config.machine.gpus <= MOST_GPUS:
        parallel = replace(config.parallel, dp=factor * config.parallel.dp)
        if _fits(replace(config, parallel=parallel), limit):
            return factor * config.machine.gpus
        factor *= 2
    return None


def _most_layers(config: RunConfig, limit: float) -> int | None:
    """Return the largest smaller number of layers, the same on every stage, with which the run fits."""
    model, parallel, work = config.model, config.parallel, _training(config)
    if model.pattern is not None:  # one letter per layer: not a number that can be set
        return None
    stages = parallel.pp * (parallel.vp or 1)

    def fits(per_stage: int) -> bool:
        layers = per_stage * stages
        on_rank = max_layers_per_rank(layers, parallel)
        recomputed = min(work.recompute_layers, on_rank)
        offloaded = min(work.offload_layers, on_rank - recomputed)
        smaller = replace(work, recompute_layers=recomputed, offload_layers=offloaded)
        return _fits(replace(config, model=replace(model, layers=layers), workload=smaller), limit)

    per_stage = _last(1, (model.layers - 1) // stages, fits)
    return None if per_stage is None else per_stage * stages


def _last(first: int, last: int, holds: Callable[[int], bool]) -> int | None:
    """Return the last number of a range for which a condition holds that no later one fulfils again."""
    if first > last or not holds(first):
        return None
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if holds(middle) else (first, middle - 1)
    return first


def recomputed_layers_to_fit(config: RunConfig) -> int | None:
    """Return how many layers a training run must recompute to fit; None: it fits as it is, or not even with all."""
    memory = memory_bytes(config.launch_machine)
    if memory is None or not isinstance(config.workload, Training) or _fits(config, _usable(config, memory)):
        return None
    return _fewest_recomputed_layers(config, _usable(config, memory))


def host_misfit(config: RunConfig, ranks: int, available: float) -> str | None:
    """Return why this many ranks of a run do not fit into the available host memory and what would; None: they do."""
    required = host_bytes(config, ranks)
    if required <= available:
        return None
    needs = f"{_subject(config)} needs about {_gib(required)} of host memory for {ranks} rank{'s' if ranks > 1 else ''}"
    return f"{needs}; {_gib(available)} are available; {_host_remedy(config, ranks, available)}"


def host_bytes(config: RunConfig, ranks: int) -> float:
    """Return the host memory of this many ranks on one machine; on a CPU it holds everything."""
    estimate, on_cpu = memory_estimate(config), config.launch_machine.gpu == "cpu"
    rank = CPU_RANK_BYTES + estimate.total if on_cpu else GPU_RANK_BYTES
    return ranks * (rank + estimate.host) + (LAUNCHER_BYTES if ranks > 1 else 0.0)


def _host_remedy(config: RunConfig, ranks: int, available: float) -> str:
    if isinstance(config.workload, OutOfCore):
        return "lower --host-gb" + (" or --device-gb" if config.launch_machine.gpu == "cpu" else "")
    fewer = _last(1, ranks - 1, lambda count: host_bytes(config, count) <= available)
    if fewer is not None and config.launch_machine.gpu == "cpu":
        return f"--scale {fewer}{' or less' if fewer > 1 else ''} fits"
    if isinstance(config.workload, Inference):
        return "choose a smaller MAX_BATCH_SIZE or MAX_NUM_TOKENS"
    if config.launch_machine.gpu != "cpu":
        return "choose fewer offload_layers"
    return _join(remedies(config, (available - LAUNCHER_BYTES) / ranks - CPU_RANK_BYTES))


def _training(config: RunConfig) -> Training:
    assert isinstance(config.workload, Training)
    return config.workload


def _subject(config: RunConfig) -> str:
    return f"the proxy of {config.model.name}" if config.proxy else config.model.name


def _join(changes: Iterator[str]) -> str:
    return ", ".join(changes) or "no setting of this run would make it fit"


def _gib(number: float) -> str:
    return f"{number / GIB:,.1f} GiB"
