"""The whole training job: build, step, report.

    train(config, record)      # config: a spec.RunConfig; record: a record.Record

Per optimizer step the host waits for the device once, when it reads the loss and the gradient norm; that wait also
closes the time measurement.
"""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llmb.costs import train_flops_per_sequence
from llmb.events import StepDone
from llmb.metrics import tflops_per_gpu
from llmb.spec import RunConfig, Training
from llmb.train.endings import Diverged
from llmb.train.log import step_lines
from llmb.train.memory import naming_shortage, peak_bytes
from llmb.train.mesh import Mesh, open_mesh
from llmb.train.optimizer import learning_rate, make_optimizer, update
from llmb.train.parallelize import ready_model
from llmb.train.provenance import run_started
from llmb.train.record import Record
from llmb.train.supported import supported_workload
from llmb.train.tokens import synthetic_tokens


@dataclass(frozen=True)
class Job:
    """What stays the same from the first step to the last."""

    config: RunConfig
    work: Training
    mesh: Mesh


def train(config: RunConfig, record: Record) -> None:
    """Run every step the configuration asks for, reporting each; raises where the run cannot go on."""
    work = supported_workload(config)
    mesh = open_mesh(config)
    job = Job(config, work, mesh)
    record.add(run_started(mesh))
    with naming_shortage(mesh.device, config.model, work):
        model = ready_model(config, work, mesh)
        optimizer = make_optimizer(model.parameters(), work.lr)
        for step in range(1, work.steps + 1):
            began = time.perf_counter()
            loss, grad_norm = train_step(job, model, optimizer, step)
            report(job, record, step, time.perf_counter() - began, loss, grad_norm)
            stop_if_diverged(step, loss, grad_norm)
    mesh.close()


def train_step(job: Job, model: nn.Module, optimizer: torch.optim.AdamW, step: int) -> tuple[float, float]:
    """Gradients of this rank's micro-batches, averaged over ranks, then one update: the mean loss and gradient norm."""
    ga, mesh = job.work.ga, job.mesh
    loss_sum = torch.zeros((), device=mesh.device)
    for micro, (tokens, labels) in enumerate(micro_batches(job, step), start=1):
        with nullcontext() if micro == ga else gradients_kept_local(model):
            loss = model(tokens, labels) / ga
            loss.backward()
        loss_sum += loss.detach()
    grad_norm = update(optimizer, learning_rate(step, job.work.lr))
    mean_loss, norm = torch.stack((mesh.mean(loss_sum), grad_norm)).tolist()  # the one wait for the device
    return mean_loss, norm


def micro_batches(job: Job, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the step's global batch: tokens and, one place further on, their labels."""
    work, mesh = job.work, job.mesh
    for micro in range(work.ga):
        first = (step - 1) * work.gbs + (micro * mesh.world_size + mesh.rank) * work.mbs
        shape = (work.mbs, work.seqlen + 1)
        tokens = synthetic_tokens(work.seed, first, shape, job.config.model.vocab, mesh.device)
        yield tokens[:, :-1], tokens[:, 1:]


def gradients_kept_local(model: nn.Module) -> AbstractContextManager[None]:
    """Before the last micro-batch there is nothing to average over ranks yet."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def report(job: Job, record: Record, step: int, seconds: float, loss: float, grad_norm: float) -> None:
    """One step as an event of this rank and, from rank 0, in the log."""
    config, work, mesh = job.config, job.work, job.mesh
    record.add(
        StepDone(
            time=time.time(),
            rank=mesh.rank,
            step=step,
            steps=work.steps,
            seconds=seconds,
            tokens=work.gbs * work.seqlen,
            loss=loss if math.isfinite(loss) else None,  # JSON has no NaN; the last event names it
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            memory_bytes=peak_bytes(mesh.device),
            warmup=step < work.window[0],
        )
    )
    if mesh.rank == 0:
        flops = work.gbs * train_flops_per_sequence(config.model, work.seqlen, config.flops_convention)
        tflops = tflops_per_gpu(flops, seconds, mesh.world_size)
        lr = learning_rate(step, work.lr)
        print(step_lines(work, step, seconds, tflops, lr, loss, grad_norm), flush=True)


def stop_if_diverged(step: int, loss: float, grad_norm: float) -> None:
    """Every rank sees the same two numbers, so all stop at the same step."""
    for name, value in (("loss", loss), ("grad norm", grad_norm)):
        if not math.isfinite(value):
            raise Diverged(f"{name} became {value} at step {step}")
