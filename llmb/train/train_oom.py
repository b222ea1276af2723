"""Advice on settings to change when a training run is out of memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from llmb.config.native.training_support import supported_training
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.runtime.process_memory import peak_bytes, requested_bytes

MAX_REMEDIES = 3  # named in a message


def oom_message(device: torch.device, config: RunConfig, error: Exception) -> str:
    """Return one line with the peak, and which change would free how much."""
    budget = memory_estimate(config).device_budget
    total = ""
    if device.type == "cuda":
        budget = torch.cuda.get_device_properties(device).total_memory
        total = f" of {_size(budget)}"
    peak = _size(peak_bytes(device))
    return f"out of memory at a peak of {peak}{total}: {advice(config, budget, requested_bytes(error))}"


@dataclass(frozen=True)
class Remedy:
    """A change of the configuration that reduces memory."""

    change: str
    frees: float  # bytes


def advice(config: RunConfig, budget: float | None, requested: float) -> str:
    """Return what to change by the memory estimate: what is sufficient, else whatever helps; cheapest first.

    `requested`: the failed allocation, a lower bound of the missing memory even if the estimate says that all fits.
    """
    missing = max(requested, memory_estimate(config).total - budget) if budget is not None else requested
    kinds = (_remedies(config, changes) for changes in _all_changes(config))
    candidates = [_mildest(remedies, missing) for remedies in kinds if remedies]
    sufficient = [remedy for remedy in candidates if remedy.frees >= missing]
    if not candidates:
        return "no setting reduces memory; use a smaller model"
    named = (sufficient or candidates)[:MAX_REMEDIES]
    changes = [f"{remedy.change} (frees about {_size(remedy.frees)})" for remedy in named]
    if not sufficient:
        changes[-1] += f"; none alone frees the missing {_size(missing)}"
    return ", or ".join(changes) + ", by estimate"


def _mildest(remedies: list[Remedy], missing: float) -> Remedy:
    """Return the mildest remedy of one kind that is sufficient, else the strongest."""
    return next((remedy for remedy in remedies if remedy.frees >= missing), remedies[-1])


def _all_changes(config: RunConfig) -> Iterator[list[tuple[str, RunConfig]]]:
    """Yield changes by kind, cheapest kind first and changes of the workload last; each mild to strong."""
    workload, layers = supported_training(config), config.model.layers

    def changed(**fields: int) -> RunConfig:
        return replace(config, workload=replace(workload, **fields))  # type: ignore[arg-type]

    sequences = workload.mbs * workload.ga  # sequences per rank and step
    smaller = [n for n in range(workload.mbs - 1, 0, -1) if sequences % n == 0]
    yield [(f"lower mbs from {workload.mbs} to {n}", changed(mbs=n, ga=sequences // n)) for n in smaller]
    if config.parallel.dp > 1 and not config.parallel.fsdp:
        yield [("set fsdp=true", replace(config, parallel=replace(config.parallel, fsdp=True)))]
    for setting in ("recompute_layers", "offload_layers"):
        current = getattr(workload, setting)
        more = range(current + 1, layers // config.parallel.pp + 1)
        yield [(f"raise {setting} from {current} to {n} of {layers}", changed(**{setting: n})) for n in more]
    shorter = [n for n in (workload.seqlen // 2, workload.seqlen // 4, workload.seqlen // 8) if n]
    yield [(f"lower seqlen from {workload.seqlen} to {n}", changed(seqlen=n)) for n in shorter]


def _remedies(config: RunConfig, changes: list[tuple[str, RunConfig]]) -> list[Remedy]:
    """Return the changes that are supported and free any memory."""
    current = memory_estimate(config).total
    remedies = []
    for change, candidate in changes:
        try:
            supported_training(candidate)
        except ConfigError:
            continue
        remedies.append(Remedy(change, current - memory_estimate(candidate).total))
    return [remedy for remedy in remedies if remedy.frees > 0]


def _size(count: float) -> str:
    unit, name = next((pair for pair in ((GIB, "GiB"), (2**20, "MiB")) if count >= pair[0]), (2**10, "KiB"))
    return f"{count / unit:.1f} {name}"
