"""Pipeline parallelism: each rank has some of the layers, and the stream of activations travels from rank to rank.

    parts = own_parts(network, mesh)                          # before anything else is done to the network
    loss = Pipeline(parts, config, work, mesh, span)(batches) # all forward and backward passes of a step

Rank r of pp has the stages r, r + pp, r + 2 pp and so on (`layout.stage_layers`), each a decoder with only the layers
of that stage, which keep the names they have in the whole. The first stage has the embedding, the last one the norm,
the head and the loss. When to compute which micro-batch is for torch to say: 1F1B, or interleaved 1F1B where a rank has
several stages.

Where embedding and head are one matrix, the first and the last stage hold a copy each. Both get the sum of the two
gradients after every step, so the copies stay equal to the last bit.
"""

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _batch_p2p  # sends must begin the way receives do

from llmb.config.parallel_layout import stage_layers
from llmb.config.spec import RunConfig, Training
from llmb.models.architectures import Network
from llmb.models.decoder import with_side_loss
from llmb.perfmodel.pipeline_schedule import SENDS_UNDER_WAY
from llmb.train.optimizer import local
from llmb.train.parallel.fsdp import before_micro_batch
from llmb.train.parallel.mesh import Mesh

TIED = "embedding.weight"
Span = Callable[[str], AbstractContextManager[None]]

# On any error torch's schedules print what every rank does from the first micro-batch to the last.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
# The stream that carries the loss of routers is such a view; nothing here or in torch's schedules writes into it.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")


def own_parts(network: Network, mesh: Mesh) -> list[Network]:
    """This rank's parts of the network, first to last: one for each stage it has. The network itself is used up."""
    pp = mesh.size("pp")
    if pp == 1:
        return [network]
    layers, network.layers = list(network.layers), nn.ModuleList()  # without layers it is quickly copied
    stages = stage_layers(len(layers), pp, mesh.parallel.vp)
    parts = []
    for stage in range(mesh.index("pp"), len(stages), pp):
        part = deepcopy(network)
        for number in stages[stage]:
            part.layers.add_module(str(number), layers[number])
        _keep_ends(part, first=stage == 0, last=stage == len(stages) - 1)
        parts.append(part)
    return parts


def _keep_ends(part: Network, first: bool, last: bool) -> None:
    """Drop what only the first or the last stage computes with, unless it is this one."""
    part.first, part.last = first, last
    if not first and not (last and part.model.tied_embeddings):
        part.embedding = None
    if not last:
        part.norm = part.head = None


def copied_weights(parts: list[Network]) -> set[str]:
    """Names of weights that an earlier stage holds too, where the norm counts them."""
    return {TIED for part in parts if part.last and not part.first and part.model.tied_embeddings}


class Pipeline:
    """Runs a step's micro-batches through all stages. `span` marks the passes of this rank in a trace."""

    def __init__(self, parts: list[Network], config: RunConfig, work: Training, mesh: Mesh, span: Span):
        self._mesh = mesh
        self._first, self._last = parts[0].first, parts[-1].last
        weights = {name: weight for part in parts for name, weight in part.named_parameters()}
        self._tied = weights.get(TIED) if config.model.tied_embeddings else None  # only both ends have it
        self._side_losses = torch.zeros((), device=mesh.device)  # of routers before the last stage, in one step
        self._sends = Sends(several_stages=len(parts) > 1, overlap=mesh.parallel.overlap_send)
        stages = [Stage(part, number, config, work, mesh, span, self._sends) for number, part in enumerate(parts)]
        for part in parts:
            part.side_loss = self._noted
        self._schedule = _schedule(stages, work.ga)

    def __call__(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Gradients of all micro-batches; this rank's share of the loss, before the last stage only that of routers."""
        tokens, labels = (torch.cat(all_of_one_kind) for all_of_one_kind in zip(*batches, strict=True))
        losses: list[Tensor] = []
        inputs = (tokens,) if self._first else ()
        answers: dict[str, Any] = {"labels_BT": labels, "target": labels, "losses": losses} if self._last else {}
        self._side_losses = torch.zeros_like(self._side_losses)
        try:
            self._schedule.step(*inputs, return_outputs=False, **answers)
        except RuntimeError as error:  # what a stage raises comes wrapped in a page about its tensors
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        self._sends.wait()
        if self._tied is not None:
            self._add_gradient_of_copy(self._tied)
        return sum(losses, start=self._side_losses)

    def _noted(self, x: Tensor, loss: Tensor) -> Tensor:
        self._side_losses += loss.detach()
        return with_side_loss(x, loss)

    def _add_gradient_of_copy(self, weight: nn.Parameter) -> None:
        """The two ends of the pipeline exchange their gradients of the matrix that both hold."""
        assert weight.grad is not None
        mine = local(weight.grad)
        theirs = torch.empty_like(mine)
        group, other_end = self._mesh.sub("pp").get_group(), self._mesh.size("pp") - 1 if self._first else 0
        exchange = [
            dist.P2POp(dist.isend, mine, group=group, group_peer=other_end),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=other_end),
        ]
        for transfer in dist.batch_isend_irecv(exchange):
            transfer.wait()
        mine += theirs


class Stage(PipelineStage):
    """One part of a pipeline as torch's schedules drive it, with memory for no more than is in flight.

    Torch's own stage receives each micro-batch of a step in a tensor of its own, which it makes before the first step
    and keeps for good, and it keeps what it has sent until the backward pass, which needs none of it. Here a tensor is
    made when it is received into. An input goes with its backward pass and a gradient behind it; what is sent goes
    with the send: the transfer holds it until it has been waited for.
    """

    def __init__(
        self, part: Network, number: int, config: RunConfig, work: Training, mesh: Mesh, span: Span, sends: "Sends"
    ):
        pp = mesh.size("pp")
        self._part, self._mesh, self._span, self._sends = part, mesh, span, sends
        super().__init__(
            _Forward(part, span),
            stage_index=mesh.index("pp") + number * pp,
            num_stages=pp * (mesh.parallel.vp or 1),
            device=mesh.device,
            input_args=_tokens(work, mesh) if part.first else stream_between(config, work, mesh),
            output_args=_loss() if part.last else stream_between(config, work, mesh),
            group=mesh.sub("pp").get_group(),
        )

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        with self._shapes_only():
            return super()._prepare_forward_infra(*arguments, **named)

    def _prepare_backward_infra(self, *arguments: Any, **named: Any) -> Any:
        with self._shapes_only():
            made = super()._prepare_backward_infra(*arguments, **named)
        received = [] if self.is_first else [*self.args_recv_info.values()]
        received += [] if self.is_last else [*self.grad_recv_info.values()]
        ends = (not self.is_first) + (not self.is_last)
        known = len(received) == ends * (self.chunks or 0) and all(
            len(infos) == 1 and isinstance(infos[0].buffer, Tensor) and infos[0].buffer.is_meta for infos in received
        )
        assert known, f"torch {torch.__version__} keeps what pipeline stages receive in a way not known here"
        return made

    @contextmanager
    def _shapes_only(self) -> Iterator[None]:
        """Torch makes what it will receive into where it believes the stage to be."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Where the input of a micro-batch is received."""
        if not self.is_first:
            (info,) = self.args_recv_info[fwd_chunk_id]
            assert info.buffer is not None  # it has a shape, if no memory
            info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Where the gradient of a micro-batch's output is received."""
        if not self.is_last:
            (info,) = self.grad_recv_info[bwd_chunk_id]
            info.buffer = torch.empty_like(info.buffer, device=self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What is sent of a micro-batch. Here only the way back through the graph is left, behind a shape."""
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        for send in sends:
            (output,), _ = self.fwd_cache[fwd_chunk_id]
            send.tensor = output.detach()
            output.data = output.new_empty(()).expand(output.shape)
        return self._sends.begun(sends)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The gradient of a micro-batch's input, which is sent."""
        return self._sends.begun(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """The forward pass of one micro-batch, whose input is then held for its backward pass only."""
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **named)
        if not self.is_first:
            _let_go(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of one micro-batch; gradients are reduced over replicas as without a pipeline."""
        before_micro_batch(self._part, self._mesh, last=last_backward)
        with self._span("backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.is_last:
            _let_go(self.grad_recv_info[bwd_chunk_id])


def _let_go(received: tuple[Any, ...]) -> None:
    """Keep the shape for the next step."""
    for info in received:
        info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)


class Sends:
    """Sends of a rank with several stages, which torch's schedule would only wait for at the end of a step.

    Until then each would hold what it sends. Here at most a few are on their way. That cannot stop the pipeline: torch
    has every receive begin where the send does in the order of all ranks, so even waiting for each at once would do.
    With one stage a rank torch waits by itself, and begins a send together with the receive that comes next.
    """

    def __init__(self, several_stages: bool, overlap: bool):
        self._several = several_stages
        self._most = SENDS_UNDER_WAY if overlap else 0
        self._under_way: deque[list[dist.Work]] = deque()

    def begun(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        """What is left for the schedule to send."""
        if not self._several:
            return sends
        self._under_way.append(_batch_p2p(sends))
        self.wait(but=self._most)
        return []

    def wait(self, but: int = 0) -> None:
        """For the eldest, until so many are left."""
        while len(self._under_way) > but:
            for transfer in self._under_way.popleft():
                transfer.wait()


class _Forward(nn.Module):
    """A part's forward pass. Torch's schedules treat a sharded module in a way of their own, and see none here."""

    def __init__(self, part: Network, span: Span):
        super().__init__()
        self.part, self._span = part, span

    def forward(self, x: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        with self._span("forward"):
            return self.part(x, labels_BT)


def _schedule(stages: list[Stage], micro_batches: int) -> Schedule1F1B | ScheduleInterleaved1F1B:
    def loss_of_last_part(loss: Tensor, _labels: Tensor) -> Tensor:
        return loss

    settings: dict[str, Any] = {"loss_fn": loss_of_last_part, "scale_grads": False}  # `loss_share` has scaled the loss
    if len(stages) == 1:
        return Schedule1F1B(stages[0], micro_batches, **settings)
    return ScheduleInterleaved1F1B(stages, micro_batches, **settings)  # type: ignore[arg-type]


# What passes between stages, in shape: with it, torch need not ask every stage and its neighbours.


def _tokens(work: Training, mesh: Mesh) -> Tensor:
    return torch.empty(work.mbs, work.seqlen // mesh.size("cp"), dtype=torch.int64, device="meta")


def stream_between(config: RunConfig, work: Training, mesh: Mesh) -> Tensor:
    """What one stage gives the next."""
    shape = (work.mbs, work.seqlen // mesh.size("cp") // mesh.size("tp"), config.model.hidden)
    dtype = torch.float32 if config.precision.dtype == "fp32" else torch.bfloat16
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _loss() -> Tensor:
    return torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
