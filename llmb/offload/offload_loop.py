"""Training loop of out-of-core training: build, step, report.

    train(config, recorder)    # config: a spec.RunConfig; recorder: a recorder.EventRecorder

Python issues a step while the device still computes the previous one, and waits for it only where there is nothing else
to do: at checkpoints and at the end.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.outofcore_support import supported_outofcore
from llmb.config.offload_plan import Plan
from llmb.config.spec import OutOfCore, RunConfig
from llmb.offload.arena import Budgets
from llmb.offload.chunked_batches import ChunkedBatches
from llmb.offload.disk.disk_file import buffered_line
from llmb.offload.hf_export import export
from llmb.offload.lora.adapter_export import check_export, export_adapters
from llmb.offload.offload_checkpoint import (
    CheckpointIdentity,
    checkpoint_identity,
    load,
    load_scales,
    resume_point,
    save,
)
from llmb.offload.offload_profiler import StreamProfiler
from llmb.offload.step_reports import StepReporter
from llmb.offload.trainer import Trainer, TrainerSettings
from llmb.ops.device_capabilities import TRAINING_FEATURES, check_dtypes, fallback_lines
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU
from llmb.perfmodel.offload.simulator import simulate
from llmb.runtime.adamw_settings import learning_rate
from llmb.runtime.checkpoint_folder import ResumePoint, record_resume
from llmb.runtime.checksums.checkpoint_checksums import CheckpointCheck, damaged_error
from llmb.runtime.gpu_sampler import GpuSampler
from llmb.runtime.process_memory import explain_oom
from llmb.runtime.profile_window import check_gpu_metrics
from llmb.runtime.provenance import run_started
from llmb.runtime.rank_info import init_distributed
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.token_data import open_token_file

ENGINE = "llmb.offload"
ADAPTERS = 0  # number of the file of adapters in a checkpoint


def train(config: RunConfig, recorder: EventRecorder) -> None:
    """Run every step of the configuration, reporting each; raises where the run cannot go on."""
    workload, plan = supported_outofcore(config)
    check_gpu_metrics(config.profile)
    folder = recorder.path.parent
    if workload.export is not None and plan.lora is not None:
        check_export(config.model)
    data = open_token_file(workload, config.model.vocab)
    identity = checkpoint_identity(config.model, plan, workload, data)
    resumed = resume_point(workload, folder, identity)
    rank_info = init_distributed(config, ENGINE)
    check_dtypes(rank_info.device, dtype=config.precision.dtype)
    buffered = buffered_line(Path(workload.disk_path)) if plan.uses_disk and workload.disk_path is not None else None
    fallbacks = (*fallback_lines(rank_info.device, TRAINING_FEATURES), *([buffered] if buffered else []))
    recorder.add(run_started(rank_info, fallbacks))
    record_resume(recorder, resumed)
    with explain_oom(partial(oom_message, rank_info.device, workload)), GpuSampler(recorder, rank_info.device):
        batches = ChunkedBatches(config.model, plan, workload.seed, data, workload.pack, rank_info.device)
        trainer = create_trainer(config.model, workload, plan, rank_info.device, batches)
        load_weights(trainer, resumed, workload.weights)
        print(memory_line(trainer, workload), flush=True)
        run_steps(config, workload, recorder, trainer, resumed, identity)
        print(memory_line(trainer, workload), flush=True)
        if workload.export is not None:
            export_trained(Path(workload.export), trainer, workload.weights)


def create_trainer(
    model: Model,
    workload: OutOfCore,
    plan: Plan,
    device: torch.device,
    batches: ChunkedBatches,
) -> Trainer:
    """Return a trainer with all the memory that it will ever take."""
    prediction = simulate(model, plan, NOMINAL_CPU) if workload.prediction is None else workload.prediction
    settings = TrainerSettings(
        seed=workload.seed,
        clip=workload.clip,
        budgets=Budgets(host_gib=workload.host_gib, device_gib=workload.device_gib, disk_gib=workload.disk_gib),
        host_slots=prediction.host_slots,
        disk_path=workload.disk_path,
    )
    return Trainer(model, plan, device, settings, batches, partial(learning_rate, workload=workload))


def load_weights(trainer: Trainer, resumed: ResumePoint | None, folder: str | None = None) -> None:
    """Initialise the weights, or load a checkpoint with its optimizer state and, in fp8, scales.

    Initial weights are random, or those in a folder in Hugging Face's layout. A checkpoint of LoRA holds adapters only,
    so frozen weights are initialised as well.
    """
    if resumed is None or trainer.adapters is not None:
        trainer.initialise(None if folder is None else Path(folder))
    if resumed is None:
        return
    checking, path = CheckpointCheck(resumed.path), resumed.path
    checking.begin()
    try:
        if trainer.adapters is not None:
            trainer.adapters.load(load(path, ADAPTERS))
        for bucket in trainer.buckets if trainer.adapters is None else ():
            saved = load(path, bucket)
            with trainer.edit_state(bucket) as tensors:
                for name, tensor in tensors.items():
                    tensor.copy_(saved[name])
        scales = load_scales(path)
    finally:  # a damaged file explains any other error
        if (damage := checking.damage()) is not None:
            raise damaged_error(path, damage)
    if trainer.scales is not None and scales is None:
        print(f"scales: none in {path}, measured anew", flush=True)
    trainer.resume(resumed.step, scales)


def run_steps(
    config: RunConfig,
    workload: OutOfCore,
    recorder: EventRecorder,
    trainer: Trainer,
    resumed: ResumePoint | None,
    identity: CheckpointIdentity,
) -> None:
    """Run all steps, with their checkpoints; after the last no update is pending."""
    steps = range(resumed.step + 1 if resumed else 1, workload.steps + 1)
    folder = recorder.path.parent
    profiler = StreamProfiler(folder, config, workload, steps, trainer)
    reporter = StepReporter(config, workload, recorder, trainer, resumed_at=steps[0] if resumed else None)
    for step in steps:
        saves = workload.checkpoint_every is not None and step % workload.checkpoint_every == 0
        flushes = saves or step == steps[-1]
        observer = profiler.before(step)
        reporter.add(trainer.step(step, "flush" if flushes else "step", observer, poll=reporter.report_done))
        pauses = profiler.after(step) or flushes
        if pauses:
            reporter.finish()
        if flushes:
            trainer.flush_updates("nothing" if step == steps[-1] else "step")
        if saves:
            save(folder, step, all_buckets(trainer), identity, trainer.scales)
        if pauses:
            reporter.restart()


def all_buckets(trainer: Trainer) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Return every bucket with its weights and optimizer state; with LoRA the adapters with theirs, as one."""
    if trainer.adapters is not None:
        return iter([(ADAPTERS, trainer.adapters.tensors())])
    return ((bucket, trainer.bucket_state(bucket)) for bucket in trainer.buckets)


def export_trained(folder: Path, trainer: Trainer, base: str | None) -> None:
    """Write what was trained to a new folder: all weights, or with LoRA the adapters of the base weights."""
    if trainer.adapters is None:
        export(folder, trainer.model, all_buckets(trainer))
        return
    adapters = trainer.adapters.adapters
    export_adapters(folder, trainer.model, adapters.lora, adapters.named, base)


def memory_line(trainer: Trainer, workload: OutOfCore) -> str:
    """Return the memory in use on both sides and on disk, and the budgets, in one line."""
    used = {
        "host": (trainer.host_bytes, workload.host_gib),
        "device": (trainer.arena.device_bytes, workload.device_gib),
    }
    if trainer.disk is not None:
        used["disk"] = trainer.disk.file.size, workload.disk_gib
    line = "memory: " + ", ".join(f"{side} {size / GIB:.2f} of {budget:g} GiB" for side, (size, budget) in used.items())
    return line if trainer.disk is None else f"{line} in {trainer.disk.file.folder}, {trainer.disk.file.mode}"


def oom_message(device: torch.device, workload: OutOfCore, _error: Exception) -> str:
    """Return one line with the peak, and what to change."""
    peak = torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else None
    reached = "" if peak is None else f" at a peak of {peak:.1f} GiB"
    advice = "a smaller chunk_tokens needs a smaller workspace, a larger device_gib leaves more"
    return f"out of memory{reached} with device_gib={workload.device_gib:g}: {advice}"
