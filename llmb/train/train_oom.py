"""What to change when a training run has not enough memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.runtime.process_memory import bytes_asked, is_out_of_memory, peak_bytes
from llmb.runtime.run_ending import OutOfMemory
from llmb.train.train_support import supported_workload

REMEDIES = 3  # named at most


@contextmanager
def naming_shortage(device: torch.device, config: RunConfig) -> Iterator[None]:
    """Whatever form a lack of memory takes inside, it leaves as OutOfMemory with advice."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(shortage(device, config, error)) from error
        raise


def shortage(device: torch.device, config: RunConfig, error: Exception) -> str:
    """One line: the peak, and what would free how much."""
    budget = memory_estimate(config).device_budget
    total = ""
    if device.type == "cuda":
        budget = torch.cuda.get_device_properties(device).total_memory
        total = f" of {_size(budget)}"
    peak = _size(peak_bytes(device))
    return f"out of memory at a peak of {peak}{total}: {advice(config, budget, bytes_asked(error))}"


@dataclass(frozen=True)
class Remedy:
    """One change of the configuration that needs less memory."""

    said: str
    frees: float  # bytes


def advice(config: RunConfig, budget: float | None, asked: float) -> str:
    """What to change, by the memory estimate: what suffices, else whatever helps; in the order of what it costs.

    `asked`: the allocation that failed, the least that is lacking even where the estimate says that all would fit.
    """
    lacking = max(asked, memory_estimate(config).total - budget) if budget is not None else asked
    chosen = [_enough(remedies, lacking) for remedies in _all_remedies(config) if remedies]
    enough = [remedy for remedy in chosen if remedy.frees >= lacking]
    if not chosen:
        return "nothing here needs less memory; take a smaller model"
    said = [f"{remedy.said} (frees about {_size(remedy.frees)})" for remedy in (enough or chosen)[:REMEDIES]]
    if not enough:
        said[-1] += f"; none alone frees the {_size(lacking)} that are lacking"
    return ", or ".join(said) + ", by estimate"


def _enough(remedies: list[Remedy], lacking: float) -> Remedy:
    """The mildest of one kind that suffices, else the strongest."""
    return next((remedy for remedy in remedies if remedy.frees >= lacking), remedies[-1])


def _all_remedies(config: RunConfig) -> Iterator[list[Remedy]]:
    """Those this engine runs, by kind, by rising cost and last what alters the work; each from mild to strong."""
    work, layers = supported_workload(config), config.model.layers
    split = work.mbs * work.ga  # sequences a rank computes in a step, however they are cut
    smaller = [n for n in range(work.mbs - 1, 0, -1) if split % n == 0]
    yield _remedies(config, [(f"lower mbs from {work.mbs} to {n}", {"mbs": n, "ga": split // n}) for n in smaller])
    if config.parallel.dp > 1 and not config.parallel.fsdp:
        sharded = replace(config, parallel=replace(config.parallel, fsdp=True))
        yield _worth(config, [("set fsdp=true", sharded)])
    for knob in ("recompute_layers", "offload_layers"):
        now = getattr(work, knob)
        more = range(now + 1, layers // config.parallel.pp + 1)
        yield _remedies(config, [(f"raise {knob} from {now} to {n} of {layers}", {knob: n}) for n in more])
    shorter = [n for n in (work.seqlen // 2, work.seqlen // 4, work.seqlen // 8) if n]
    yield _remedies(config, [(f"lower seqlen from {work.seqlen} to {n}", {"seqlen": n}) for n in shorter])


def _remedies(config: RunConfig, changes: list[tuple[str, dict[str, Any]]]) -> list[Remedy]:
    work = config.workload
    assert isinstance(work, Training)
    return _worth(config, [(said, replace(config, workload=replace(work, **change))) for said, change in changes])


def _worth(config: RunConfig, changed: list[tuple[str, RunConfig]]) -> list[Remedy]:
    """Those that this engine runs and that free anything."""
    now = memory_estimate(config).total
    remedies = []
    for said, candidate in changed:
        try:
            supported_workload(candidate)
        except ConfigError:
            continue
        remedies.append(Remedy(said, now - memory_estimate(candidate).total))
    return [remedy for remedy in remedies if remedy.frees > 0]


def _size(count: float) -> str:
    unit, name = next((pair for pair in ((GIB, "GiB"), (2**20, "MiB")) if count >= pair[0]), (2**10, "KiB"))
    return f"{count / unit:.1f} {name}"
