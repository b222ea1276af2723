"""Training loop: build the model, run steps, report each.

    train(config, recorder)      # a spec.RunConfig and an EventRecorder

The host synchronizes with the device once per optimizer step, when it reads the loss and the gradient norm; that also
ends the timing of the step.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmb.config.native.training_support import supported_training
from llmb.config.spec import RunConfig, Training
from llmb.events import TimeSpent
from llmb.models.architectures import Network
from llmb.ops.device_capabilities import TRAINING_FEATURES, check_dtypes, fallback_lines
from llmb.runtime.adamw_settings import learning_rate
from llmb.runtime.checkpoint_folder import record_resume
from llmb.runtime.faults.fault_injector import FaultInjector
from llmb.runtime.gpu_sampler import GpuSampler
from llmb.runtime.process_memory import explain_oom, peak_bytes
from llmb.runtime.profile_window import check_gpu_metrics
from llmb.runtime.provenance import run_started
from llmb.runtime.rank_info import RankInfo
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.run_ending import Diverged
from llmb.runtime.step_log import MeasuredStep, StepReport
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.runtime.token_data import TokenFile, open_token_file
from llmb.train.checkpoint_identity import resume_point
from llmb.train.cuda_graphs import MicroBatchGraph
from llmb.train.llama_layers import begin_step, quantize_weights
from llmb.train.nonfinite import find_first_nonfinite
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.context_parallel import shard_sequence
from llmb.train.parallel.expert_parallel import expert_dispatchers, grow_capacity, pop_overflow
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import Mesh, init_mesh
from llmb.train.parallelize import build_model_parts, build_optimizer
from llmb.train.step_profiler import SOURCES, Profiler, format_time_spent
from llmb.train.step_timer import StepTimer
from llmb.train.train_oom import oom_message

if TYPE_CHECKING:  # imported where they are used: each takes a second, and most runs on one GPU need neither
    from llmb.train.parallel.pipeline import Pipeline
    from llmb.train.train_checkpoint import Checkpointer

ModelParts = Sequence[Network]  # the whole network, or one model part for each pipeline stage of this rank


@dataclass(frozen=True)
class TrainJob:
    """State that is constant over all steps of a run."""

    config: RunConfig
    workload: Training
    mesh: Mesh
    data: TokenFile | None = None  # None: synthetic tokens
    profiler: Profiler | None = None  # None: no profiling
    graph: MicroBatchGraph | None = None  # None: eager
    pipeline: "Pipeline | None" = None  # None: no pipeline parallelism

    def trace_range(self, name: str) -> AbstractContextManager[None]:
        """Return a context that names a range of a step in the trace."""
        return nullcontext() if self.profiler is None else self.profiler.trace_range(name)


def train(config: RunConfig, recorder: EventRecorder, graph: MicroBatchGraph | None = None) -> None:
    """Run and report every step of a configuration; raise an exception if the run fails.

    With CUDA graphs, `graph` is used if given: its owner may disable it between two steps.
    """
    workload = supported_training(config)
    check_gpu_metrics(config.profile)
    data = open_token_file(workload, config.model.vocab)
    folder = recorder.path.parent
    checkpoint = resume_point(config, workload, data, folder)
    steps = range(checkpoint.step + 1 if checkpoint else 1, workload.steps + 1)
    mesh = init_mesh(config)
    process = RankInfo(recorder.rank, mesh.world_size, mesh.device)  # whose rank is 0 where one rank runs alone
    timer = StepTimer(mesh.device, mesh.world_size)
    profiler = Profiler(folder, config.profile, steps, process)
    job = TrainJob(config, workload, mesh, data, profiler)
    if workload.cuda_graphs:
        job = replace(job, graph=graph or MicroBatchGraph())
    faults = FaultInjector(config, recorder)
    report = StepReport(config, workload, workload.gbs, recorder, steps[0] if checkpoint else None)
    check_dtypes(mesh.device, dtype=config.precision.dtype)
    features = TRAINING_FEATURES if config.precision.dtype != "fp32" else ("triton",)
    recorder.add(run_started(process, fallback_lines(mesh.device, features)))
    record_resume(recorder, checkpoint)
    with explain_oom(partial(oom_message, mesh.device, config)), GpuSampler(recorder, mesh.device):
        job, model_parts, optimizer = build_training(job)
        with open_checkpointer(job, folder, model_parts, optimizer, faults) as checkpointer:
            if checkpointer is not None and checkpoint is not None:
                checkpointer.load(checkpoint.path)
            for step in steps:
                profiler.before_step(step)
                timer.start()
                faults.before_step(step)
                with job.trace_range(f"step {step}"):
                    loss, grad_norm = train_step(job, model_parts, optimizer, step)
                seconds, busy_s = timer.stop()
                measured = MeasuredStep(
                    step=step, seconds=seconds, busy_s=busy_s, loss=loss, grad_norm=grad_norm,
                    memory_bytes=peak_bytes(mesh.device),
                )  # fmt: skip
                if config.one_rank is not None:  # no sum over ranks is correct
                    measured = replace(measured, loss=None, grad_norm=None)
                report.add(measured)
                if config.one_rank is None:
                    stop_if_diverged(job, model_parts, step, loss, grad_norm)
                report_time_spent(job, recorder, profiler.after_step(step))
                if checkpointer is not None:
                    checkpointer.after_step(step)


def open_checkpointer(
    job: TrainJob, folder: Path, model_parts: ModelParts, optimizer: Optimizer, faults: FaultInjector
) -> AbstractContextManager["Checkpointer | None"]:
    """Return the reader and writer of checkpoints; None: the run neither resumes from one nor writes any."""
    if job.workload.resume is None and job.workload.checkpoint_every is None:
        return nullcontext()
    from llmb.train.train_checkpoint import Checkpointer

    return Checkpointer(folder, job.config, job.workload, job.data, job.mesh, model_parts, optimizer, faults)


def build_training(job: TrainJob) -> tuple[TrainJob, list[Network], Optimizer]:
    """Build the model parts of a job, their pipeline and their optimizer."""
    model_parts = build_model_parts(job.config, job.workload, job.mesh)
    if job.mesh.size("pp") > 1:
        from llmb.train.parallel.pipeline import Pipeline

        job = replace(job, pipeline=Pipeline(model_parts, job.config, job.workload, job.mesh, job.trace_range))
    return job, model_parts, build_optimizer(model_parts, job.workload, job.mesh)


def train_step(job: TrainJob, model_parts: ModelParts, optimizer: Optimizer, step: int) -> tuple[float, float]:
    """Accumulate and reduce gradients, update the weights; return the mean loss and the gradient norm.

    While experts receive more rows than their capacity, the step is repeated with a larger one.
    """
    for model_part in model_parts:
        begin_step(model_part)
    dispatchers = expert_dispatchers(model_parts)
    while True:
        loss = accumulate_gradients(job, model_parts, step)
        loss_and_overflow = torch.stack((loss, pop_overflow(dispatchers, job.mesh.device)))
        loss, overflow = job.mesh.all_reduce(loss_and_overflow).unbind()
        with job.trace_range("optimizer"):
            grad_norm = optimizer.update(learning_rate(step, job.workload), discard=overflow > 0)
        mean_loss = loss / job.mesh.size("tp")  # the ranks of tp have the same tokens and loss
        mean, norm, overflowed = torch.stack((mean_loss, grad_norm, overflow)).tolist()  # synchronizes with the device
        if not overflowed:
            return mean, norm
        optimizer.repeat()
        for scaling in (model_part.fp8_scaling for model_part in model_parts):
            if scaling is not None:
                scaling.restart_step()
        growth = grow_capacity(dispatchers, job.mesh.size("ep"))
        if job.graph is not None:
            job.graph.reset()
        if job.mesh.rank == 0 or job.config.one_rank is not None:
            print(
                f"step {step} repeated: an expert-parallel pair received more rows than its capacity; {growth}",
                flush=True,
            )


def accumulate_gradients(job: TrainJob, model_parts: ModelParts, step: int) -> Tensor:
    """Run forward and backward of this rank's micro-batches; return its term of the mean loss, still on the device."""
    batches = micro_batches(job, step)
    if job.pipeline is not None:
        return job.pipeline(list(batches))
    (model_part,) = model_parts
    sharded = sharded_parameters(model_part)
    forward_backward = partial(add_gradients, job, model_part)
    if job.graph is not None:
        sharded.gather_all()
        quantize_weights(model_part)
        forward_backward = partial(job.graph, sharded, forward_backward)
    loss_sum = torch.zeros((), device=job.mesh.device)
    for micro, (tokens, labels) in enumerate(batches, start=1):
        sharded.begin_backward(last=micro == job.workload.ga, captured=job.graph is not None)
        with job.trace_range(f"micro-batch {micro}"):
            loss_sum += forward_backward(tokens, labels)
    sharded.end_step()
    return loss_sum


def add_gradients(job: TrainJob, model_part: Network, tokens: Tensor, labels: Tensor) -> Tensor:
    """Run forward and backward of one micro-batch, accumulating gradients; return its term of the mean loss."""
    with job.trace_range("forward"):
        loss = model_part(tokens, labels)
    with job.trace_range("backward"):
        loss.backward()
        sharded_parameters(model_part).end_backward()
    return loss.detach()


def micro_batches(job: TrainJob, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's micro-batches of the global batch: tokens, and labels shifted by one position."""
    workload, mesh = job.workload, job.mesh
    for micro in range(workload.ga):
        first = (step - 1) * workload.gbs + (micro * mesh.size("dp") + mesh.index("dp")) * workload.mbs
        shape = (workload.mbs, workload.seqlen + 1)
        if job.data is not None:
            tokens = job.data.sequences(first, shape, mesh.device)
        else:
            tokens = synthetic_tokens(workload.seed, first, shape, job.config.model.vocab, mesh.device)
        yield shard_sequence(tokens[:, :-1], mesh), shard_sequence(tokens[:, 1:], mesh)


def report_time_spent(job: TrainJob, recorder: EventRecorder, spent: Sequence[TimeSpent]) -> None:
    """Record and print the time per kind of kernel, once the profiled steps are done."""
    for event in spent:
        recorder.add(event)
    if spent:
        print(format_time_spent(spent, SOURCES[job.mesh.device.type]), flush=True)


def stop_if_diverged(job: TrainJob, model_parts: ModelParts, step: int, loss: float, grad_norm: float) -> None:
    """Raise Diverged if the loss or the gradient norm is not finite; they are equal on all ranks, so all stop."""
    for name, value in (("loss", loss), ("grad norm", grad_norm)):
        if not math.isfinite(value):
            if job.graph is not None:
                job.graph.disable()
            nonfinite = find_first_nonfinite(model_parts, lambda: accumulate_gradients(job, model_parts, step))
            raise Diverged(f"{name} became {value} at step {step}: {nonfinite.text}", nonfinite.failed_rank)
