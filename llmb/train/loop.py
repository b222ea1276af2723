"""The whole training job: build, step, report.

    train(config, record)      # config: a spec.RunConfig; record: a record.Record

Per optimizer step the host waits for the device once, when it reads the loss and the gradient norm; that wait also
closes the time measurement.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from llmb.config.spec import RunConfig, Training
from llmb.events import StepDone, TimeSpent
from llmb.models.architectures import Network
from llmb.runtime.checkpoint_folder import number
from llmb.runtime.learning_rate import learning_rate
from llmb.runtime.process_memory import peak_bytes
from llmb.runtime.provenance import run_started
from llmb.runtime.recorder import Record
from llmb.runtime.run_ending import Diverged
from llmb.runtime.step_log import LoggedStep, step_lines
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.runtime.token_data import TokenFile, open_data
from llmb.train.cuda_graphs import MicroBatchGraph
from llmb.train.fused_llama import begin_step
from llmb.train.nonfinite import first_bad_tensor
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.context_parallel import own_tokens
from llmb.train.parallel.fsdp import before_micro_batch
from llmb.train.parallel.mesh import Mesh, open_mesh
from llmb.train.parallel.pipeline import Pipeline
from llmb.train.parallelize import optimizer_of, ready_parts
from llmb.train.step_profiler import SOURCES, Profiler
from llmb.train.step_timer import StepClock
from llmb.train.train_checkpoint import Checkpoints, resume_point
from llmb.train.train_log import time_table
from llmb.train.train_oom import naming_shortage
from llmb.train.train_support import supported_workload

Parts = Sequence[Network]  # what this rank trains: the whole network, or its parts of the pipeline


@dataclass(frozen=True)
class Job:
    """What stays the same from the first step to the last."""

    config: RunConfig
    work: Training
    mesh: Mesh
    data: TokenFile | None = None  # none: synthetic tokens
    profiler: Profiler | None = None  # none: nothing is traced
    graph: MicroBatchGraph | None = None  # none: every kernel is launched by itself
    pipeline: Pipeline | None = None  # none: this rank computes all layers
    resumed_at: int | None = None  # the first step of this process, where another process did those before

    def span(self, name: str) -> AbstractContextManager[None]:
        """A part of a step, by its name in the trace."""
        return nullcontext() if self.profiler is None else self.profiler.span(name)


def train(config: RunConfig, record: Record, graph: MicroBatchGraph | None = None) -> None:
    """Run every step the configuration asks for, reporting each; raises where the run cannot go on.

    With CUDA graphs it takes the one that is given: its owner may retire it between two steps.
    """
    work = supported_workload(config)
    data = open_data(work, config.model.vocab)
    folder = record.path.parent
    resumed = resume_point(config, work, folder)
    steps = range(number(resumed) + 1 if resumed else 1, work.steps + 1)
    mesh = open_mesh(config)
    clock = StepClock(mesh.device, mesh.world_size)
    profiler = Profiler(folder, config.profile, steps, mesh)
    job = Job(config, work, mesh, data, profiler, resumed_at=steps[0] if resumed else None)
    if work.cuda_graphs:
        job = replace(job, graph=graph or MicroBatchGraph())
    record.add(run_started(mesh))
    with naming_shortage(mesh.device, config):
        parts = ready_parts(config, work, mesh)
        if mesh.size("pp") > 1:
            job = replace(job, pipeline=Pipeline(parts, config, work, mesh, job.span))
        optimizer = optimizer_of(parts, work, mesh)
        with Checkpoints(folder, config, work, mesh, parts, optimizer) as checkpoints:
            if resumed is not None:
                checkpoints.load(resumed)
            for step in steps:
                profiler.before(step)
                clock.begin()
                with job.span(f"step {step}"):
                    loss, grad_norm = train_step(job, parts, optimizer, step)
                report(job, record, step, clock.end(), loss, grad_norm)
                stop_if_diverged(job, parts, step, loss, grad_norm)
                report_time_spent(job, record, profiler.after(step))
                checkpoints.after(step)


def train_step(job: Job, parts: Parts, optimizer: Optimizer, step: int) -> tuple[float, float]:
    """Gradients of this rank's micro-batches, reduced over ranks, then one update: the mean loss and gradient norm."""
    for part in parts:
        begin_step(part)
    loss = accumulate_gradients(job, parts, step)
    with job.span("optimizer"):
        grad_norm = optimizer.update(learning_rate(step, job.work))
    mean_loss = job.mesh.total(loss) / job.mesh.size("tp")  # ranks of tp share every token, and have the same loss
    mean, norm = torch.stack((mean_loss, grad_norm)).tolist()  # the one wait for the device
    return mean, norm


def accumulate_gradients(job: Job, parts: Parts, step: int) -> Tensor:
    """Forward and backward of this rank's micro-batches; its share of the step's loss, still on the device."""
    batches = micro_batches(job, step)
    if job.pipeline is not None:
        return job.pipeline(list(batches))
    (part,) = parts
    compute = partial(add_gradients, job, part)
    if job.graph is not None:
        compute = partial(job.graph, part, compute)
    loss_sum = torch.zeros((), device=job.mesh.device)
    for micro, (tokens, labels) in enumerate(batches, start=1):
        before_micro_batch(part, job.mesh, last=micro == job.work.ga)
        with job.span(f"micro-batch {micro}"):
            loss_sum += compute(tokens, labels)
    return loss_sum


def add_gradients(job: Job, part: Network, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward and backward of one micro-batch, added to the parameters' gradients; its share of the loss."""
    with job.span("forward"):
        loss = part(tokens, labels)
    with job.span("backward"):
        loss.backward()
    return loss.detach()


def micro_batches(job: Job, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the step's global batch: tokens and, one place further on, their labels."""
    work, mesh = job.work, job.mesh
    for micro in range(work.ga):
        first = (step - 1) * work.gbs + (micro * mesh.size("dp") + mesh.index("dp")) * work.mbs
        shape = (work.mbs, work.seqlen + 1)
        if job.data is not None:
            tokens = job.data.sequences(first, shape, mesh.device)
        else:
            tokens = synthetic_tokens(work.seed, first, shape, job.config.model.vocab, mesh.device)
        yield own_tokens(tokens[:, :-1], mesh), own_tokens(tokens[:, 1:], mesh)


def report(
    job: Job, record: Record, step: int, took: tuple[float, float | None], loss: float, grad_norm: float
) -> None:
    """One step as an event of this rank and, from rank 0, in the log."""
    config, work, mesh = job.config, job.work, job.mesh
    seconds, busy_s = took
    record.add(
        StepDone(
            time=time.time(),
            rank=mesh.rank,
            step=step,
            steps=work.steps,
            seconds=seconds,
            busy_s=busy_s,
            tokens=work.gbs * work.seqlen,
            loss=loss if math.isfinite(loss) else None,  # JSON has no NaN; the last event names it
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            memory_bytes=peak_bytes(mesh.device),
            warmup=step < work.window[0] or step == job.resumed_at,
        )
    )
    if mesh.rank == 0:
        logged = LoggedStep(
            step=step,
            steps=work.steps,
            gbs=work.gbs,
            seqlen=work.seqlen,
            seconds=seconds,
            lr=learning_rate(step, work),
            loss=loss,
            grad_norm=grad_norm,
            memory_bytes=peak_bytes(mesh.device),
        )
        print(step_lines(config, logged), flush=True)


def report_time_spent(job: Job, record: Record, spent: Sequence[TimeSpent]) -> None:
    """Where the time of the profiled steps went, once that is known: as events and in the log."""
    for event in spent:
        record.add(event)
    if spent:
        print(time_table(spent, SOURCES[job.mesh.device.type]), flush=True)


def stop_if_diverged(job: Job, parts: Parts, step: int, loss: float, grad_norm: float) -> None:
    """Every rank sees the same two numbers, so all stop at the same step."""
    for name, value in (("loss", loss), ("grad norm", grad_norm)):
        if not math.isfinite(value):
            if job.graph is not None:
                job.graph.retire()
            first = first_bad_tensor(parts, lambda: accumulate_gradients(job, parts, step))
            raise Diverged(f"{name} became {value} at step {step}: {first.text}", first.guilty_rank)
