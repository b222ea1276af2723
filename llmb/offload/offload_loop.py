"""The whole job of training out of core: build, step, report.

    train(config, record)      # config: a spec.RunConfig; record: a record.Record

Python issues a step while the device is still at the one before, and waits for it only where there is nothing else to
do: at checkpoints and at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model, OutOfCore, RunConfig
from llmb.offload.arena import Budgets
from llmb.offload.chunked_batches import Batches
from llmb.offload.hf_export import export
from llmb.offload.offload_checkpoint import Facts, facts_of, load, load_scales, resume_point, save
from llmb.offload.offload_profiler import Profiler
from llmb.offload.offload_support import supported
from llmb.offload.pinned_memory import HostSlab
from llmb.offload.step_reports import Reports
from llmb.offload.trainer import Settings, Trainer
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU
from llmb.perfmodel.offload.simulator import simulate
from llmb.runtime.checkpoint_folder import number
from llmb.runtime.learning_rate import learning_rate
from llmb.runtime.process_memory import is_out_of_memory
from llmb.runtime.provenance import run_started
from llmb.runtime.rank_info import join_ranks
from llmb.runtime.recorder import Record
from llmb.runtime.run_ending import OutOfMemory
from llmb.runtime.token_data import open_data

ENGINE = "llmb.offload"


def train(config: RunConfig, record: Record, host_slab: HostSlab | None = None) -> None:
    """Run every step the configuration asks for, reporting each; raises where the run cannot go on.

    A host slab that is given is used instead of a new one, which takes long to lock.
    """
    work, plan = supported(config)
    folder = record.path.parent
    data = open_data(work, config.model.vocab)
    facts = facts_of(config.model, plan, work, data, work.pack)
    resumed = resume_point(work, folder, facts)
    place = join_ranks(config, ENGINE)
    record.add(run_started(place))
    with naming_shortage(place.device, work):
        batches = Batches(config.model, plan, work.seed, data, work.pack, place.device)
        trainer = new_trainer(config.model, work, plan, place.device, batches, host_slab)
        begin(trainer, resumed)
        print(memory_line(trainer, work), flush=True)
        run_steps(config, work, record, trainer, resumed, facts)
        print(memory_line(trainer, work), flush=True)
        if work.export is not None:
            export(Path(work.export), config.model, unit_tensors(trainer))


def new_trainer(
    model: Model, work: OutOfCore, plan: Plan, device: torch.device, batches: Batches, host_slab: HostSlab | None
) -> Trainer:
    """With all the memory that it will ever take."""
    simulated = simulate(model, plan, NOMINAL_CPU) if work.prediction is None else work.prediction
    settings = Settings(
        seed=work.seed,
        clip=work.clip,
        budgets=Budgets(host_gib=work.host_gib, device_gib=work.device_gib),
        home_slots=simulated.home_slots,
    )
    return Trainer(model, plan, device, settings, batches, partial(learning_rate, work=work), host_slab)


def begin(trainer: Trainer, resumed: Path | None) -> None:
    """Random weights, or those of a checkpoint with their optimizer state and, in fp8, scales."""
    if resumed is None:
        trainer.initialise()
        return
    for unit in trainer.units:
        saved = load(resumed, unit)
        for name, tensor in trainer.unit(unit).items():
            tensor.copy_(saved[name])
    scales = load_scales(resumed)
    if trainer.plan.dtype == "fp8" and scales is None:
        print(f"scales: none in {resumed}, measured anew", flush=True)
    trainer.resume(number(resumed), scales)


def run_steps(
    config: RunConfig, work: OutOfCore, record: Record, trainer: Trainer, resumed: Path | None, facts: Facts
) -> None:
    """All steps, with their checkpoints; behind the last no update waits any more."""
    steps = range(number(resumed) + 1 if resumed else 1, work.steps + 1)
    folder = record.path.parent
    profiler = Profiler(folder, config, work, steps, trainer)
    reports = Reports(config, work, record, trainer, resumed_at=steps[0] if resumed else None)
    for step in steps:
        saves = work.checkpoint_every is not None and step % work.checkpoint_every == 0
        settles = saves or step == steps[-1]
        watch = profiler.before(step)
        reports.add(trainer.step(step, "settle" if settles else "step", watch, between=reports.tell))
        pauses = profiler.after(step) or settles
        if pauses:
            reports.finish()
        if settles:
            trainer.settle("nothing" if step == steps[-1] else "step")
        if saves:
            save(folder, step, unit_tensors(trainer), facts, trainer.scales)
        if pauses:
            reports.restart()


def unit_tensors(trainer: Trainer) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Every unit with its weights and state."""
    return ((unit, trainer.unit(unit)) for unit in trainer.units)


def memory_line(trainer: Trainer, work: OutOfCore) -> str:
    """What is taken on both sides, of what may be."""
    arena = trainer.arena
    used = {"host": (arena.host_bytes, work.host_gib), "device": (arena.device_bytes, work.device_gib)}
    return "memory: " + ", ".join(f"{side} {size / GIB:.2f} of {may:g} GiB" for side, (size, may) in used.items())


@contextmanager
def naming_shortage(device: torch.device, work: OutOfCore) -> Iterator[None]:
    """Whatever form a lack of memory takes inside, it leaves as OutOfMemory with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak = torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else None
        reached = "" if peak is None else f" at a peak of {peak:.1f} GiB"
        advice = "a smaller chunk_tokens needs less beside the buffers, a larger device_gib leaves more"
        raise OutOfMemory(f"out of memory{reached} with device_gib={work.device_gib:g}: {advice}") from error
