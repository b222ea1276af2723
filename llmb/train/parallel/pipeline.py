"""Pipeline parallelism: each rank has some of the layers, and activations are sent from rank to rank.

    loss = Pipeline(model_parts, config, workload, mesh, trace_range)(batches)   # all micro-batches of a step

The model parts are those of `pipeline_stages.py`. The schedule is torch's: 1F1B, or interleaved 1F1B where a rank has
several stages. Its import takes a second, so only runs with a pipeline import this module.

With tied embeddings, both copies of the matrix get the sum of the two gradients after every step, so they stay bitwise
equal.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _batch_p2p  # sends must begin the way receives do

from llmb.config.spec import RunConfig, Training
from llmb.models.architectures import Network
from llmb.models.decoder import attach_aux_loss
from llmb.perfmodel.pipeline_schedule import MAX_PENDING_SENDS
from llmb.train.parallel.bucket import Bucket
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.pipeline_stages import TIED, stage_boundary_tensor

TraceRange = Callable[[str], AbstractContextManager[None]]

# On any error torch's schedules print the whole schedule of every rank.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class Pipeline:
    """Runner of a step's micro-batches through all stages; `trace_range` annotates this rank's passes in a trace."""

    def __init__(
        self, model_parts: list[Network], config: RunConfig, workload: Training, mesh: Mesh, trace_range: TraceRange
    ):
        self._mesh = mesh
        self._first, self._last = model_parts[0].first, model_parts[-1].last
        self._sharded = [sharded_parameters(model_part) for model_part in model_parts]
        buckets = (bucket for sharded in self._sharded for bucket in sharded.buckets)
        tied = (bucket for bucket in buckets if TIED in bucket.names)
        self._tied = next(tied, None) if config.model.tied_embeddings else None  # only on the first and the last stage
        self._aux_losses = torch.zeros((), device=mesh.device)  # of routers before the last stage, in this step
        self._sends = PendingSends(several_stages=len(model_parts) > 1, overlap=mesh.parallel.overlap_send)
        stages = [
            Stage(model_part, index, config, workload, mesh, trace_range, self._sends)
            for index, model_part in enumerate(model_parts)
        ]
        for model_part in model_parts:
            model_part.attach_aux_loss = self._record_aux_loss
        self._schedule = _schedule(stages, workload.ga)

    def __call__(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Accumulate gradients of all micro-batches; return this rank's loss: auxiliary only before the last stage."""
        tokens, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        losses: list[Tensor] = []
        inputs = (tokens,) if self._first else ()
        targets: dict[str, Any] = {"labels_BT": labels, "target": labels, "losses": losses} if self._last else {}
        self._aux_losses = torch.zeros_like(self._aux_losses)
        try:
            self._schedule.step(*inputs, return_outputs=False, **targets)
        except RuntimeError as error:  # torch wraps the error of a stage in a page about its tensors
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        self._sends.wait()
        for sharded in self._sharded:
            sharded.end_step()
        if self._tied is not None:
            self._reduce_tied_gradient(self._tied)
        return sum(losses, start=self._aux_losses)

    def _record_aux_loss(self, x: Tensor, loss: Tensor) -> Tensor:
        self._aux_losses += loss.detach()
        return attach_aux_loss(x, loss)

    def _reduce_tied_gradient(self, bucket: Bucket) -> None:
        """Sum the gradient of the tied matrix, alone in its bucket, over the first and the last stage."""
        gradient = bucket.reduced_grad
        peer_gradient = torch.empty_like(gradient)
        group, peer = self._mesh.submesh("pp").get_group(), self._mesh.size("pp") - 1 if self._first else 0
        transfers = [
            dist.P2POp(dist.isend, gradient, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, peer_gradient, group=group, group_peer=peer),
        ]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        gradient += peer_gradient


class Stage(PipelineStage):
    """Pipeline stage for torch's schedules, with memory only for micro-batches in flight.

    torch's own stage has a receive buffer for each micro-batch of a step, allocated before the first step and never
    freed, and keeps sent outputs until the backward pass, which does not need them. Here a buffer is allocated when it
    is received into, and freed after its backward pass; a sent tensor is freed with the send, which references it until
    it has completed.
    """

    def __init__(
        self,
        model_part: Network,
        index: int,
        config: RunConfig,
        workload: Training,
        mesh: Mesh,
        trace_range: TraceRange,
        sends: "PendingSends",
    ):
        pp = mesh.size("pp")
        self._model_part, self._mesh, self._trace_range, self._sends = model_part, mesh, trace_range, sends
        super().__init__(
            model_part,
            stage_index=mesh.index("pp") + index * pp,
            num_stages=pp * (mesh.parallel.vp or 1),
            device=mesh.device,
            input_args=_tokens(workload, mesh) if model_part.first else stage_boundary_tensor(config, workload, mesh),
            output_args=_loss() if model_part.last else stage_boundary_tensor(config, workload, mesh),
            group=mesh.submesh("pp").get_group(),
        )

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta_device():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta_device():
            result = super()._prepare_backward_infra(*args, **kwargs)
        received = [] if self.is_first else [*self.args_recv_info.values()]
        received += [] if self.is_last else [*self.grad_recv_info.values()]
        neighbors = (not self.is_first) + (not self.is_last)
        is_supported = len(received) == neighbors * (self.chunks or 0) and all(
            len(infos) == 1 and isinstance(infos[0].buffer, Tensor) and infos[0].buffer.is_meta for infos in received
        )
        assert is_supported, f"the receive buffers of pipeline stages in torch {torch.__version__} are not supported"
        return result

    @contextmanager
    def _on_meta_device(self) -> Iterator[None]:
        """Make torch allocate the receive buffers on the meta device."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate and return the receive of a micro-batch's input."""
        if not self.is_first:
            (info,) = self.args_recv_info[fwd_chunk_id]
            assert info.buffer is not None  # on the meta device
            info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate and return the receive of the gradient of a micro-batch's output."""
        if not self.is_last:
            (info,) = self.grad_recv_info[bwd_chunk_id]
            info.buffer = torch.empty_like(info.buffer, device=self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send of a micro-batch's output, of which only the autograd graph and the shape are kept here."""
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        for send in sends:
            (output,), _ = self.fwd_cache[fwd_chunk_id]
            send.tensor = output.detach()
            output.data = output.new_empty(()).expand(output.shape)
        return self._sends.start(sends)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send of the gradient of a micro-batch's input."""
        return self._sends.start(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of one micro-batch; its input is then referenced by autograd only."""
        with self._trace_range("forward"):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_first:
            _free_buffers(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of one micro-batch; gradients are reduced over replicas as without a pipeline."""
        sharded = sharded_parameters(self._model_part)
        sharded.begin_backward(last=last_backward)
        with self._trace_range("backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            sharded.end_backward()
        if not self.is_last:
            _free_buffers(self.grad_recv_info[bwd_chunk_id])


def _free_buffers(received: tuple[Any, ...]) -> None:
    """Free receive buffers but keep their shapes for the next step."""
    for info in received:
        info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)


class PendingSends:
    """Pending sends of a rank with several stages, which torch's schedule would wait for only at the end of a step.

    Until then each would hold the tensor it sends. Here at most a few are pending. That cannot deadlock: torch posts
    every receive at the position of its send in the global schedule, so even waiting for each at once would work. With
    one stage per rank torch waits itself, and posts a send together with the next receive.
    """

    def __init__(self, several_stages: bool, overlap: bool):
        self._several_stages = several_stages
        self._max_pending = MAX_PENDING_SENDS if overlap else 0
        self._pending: deque[list[dist.Work]] = deque()

    def start(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        """Start sends; return those left for the schedule to start."""
        if not self._several_stages:
            return sends
        self._pending.append(_batch_p2p(sends))
        self.wait(max_pending=self._max_pending)
        return []

    def wait(self, max_pending: int = 0) -> None:
        """Wait for the oldest sends until at most `max_pending` are left."""
        while len(self._pending) > max_pending:
            for transfer in self._pending.popleft():
                transfer.wait()


def _schedule(stages: list[Stage], micro_batches: int) -> Schedule1F1B | ScheduleInterleaved1F1B:
    def identity_loss(loss: Tensor, _labels: Tensor) -> Tensor:
        return loss

    settings: dict[str, Any] = {"loss_fn": identity_loss, "scale_grads": False}  # the loss is scaled by `loss_weight`
    if len(stages) == 1:
        return Schedule1F1B(stages[0], micro_batches, **settings)
    return ScheduleInterleaved1F1B(stages, micro_batches, **settings)  # type: ignore[arg-type]


# Shapes of what stages send and receive: with them torch needs no shape inference over all stages.


def _tokens(workload: Training, mesh: Mesh) -> Tensor:
    return torch.empty(workload.mbs, workload.seqlen // mesh.size("cp"), dtype=torch.int64, device="meta")


def _loss() -> Tensor:
    return torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
