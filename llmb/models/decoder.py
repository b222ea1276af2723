"""What the architectures share: embedding, a stack of layers, a norm, a head, and the loss.

    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

An architecture is a subclass that says what a layer is. Tensor names end in their shape, as in `blocks.py`.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from llmb.config.spec import Model, Rope
from llmb.errors import ConfigError
from llmb.models.blocks import RMSNorm, positions_in_order, rope_table
from llmb.models.chunked_loss import chunked_cross_entropy
from llmb.models.hf_row_order import RowOrder
from llmb.models.moe import balance_losses

INIT_STD = 0.02


class Decoder(nn.Module):
    """The whole network. With tied embeddings the head has no weight of its own and uses the embedding's.

    What techniques for many ranks change from outside is an attribute here, and its plain form is the default: which
    positions the stream's tokens have, how the loss is computed, what the loss of a micro-batch weighs, whether this is
    the first or last part of a pipeline, and how one that is not the last adds its routers' losses. A part keeps the
    numbers of its layers in `layers`, hence their names.
    """

    writes_stream: tuple[str, ...] = ("attention.o.weight", ".down.weight")  # whose products are added to the stream

    def __init__(self, model: Model, layers: Iterable[nn.Module], rotated: int):
        super().__init__()
        self.model = model
        self.rope = rope_of(model) if rotated else None
        self.rotated = rotated  # how much of each head's width turns with the position; 0: attention without positions
        self.embedding: nn.Embedding | None = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm: RMSNorm | None = RMSNorm(model.hidden, model.norm_eps)
        self.head = None if model.tied_embeddings else nn.Linear(model.hidden, model.vocab, bias=False)
        self.first = self.last = True
        self.positions: Callable[[int, torch.device], Tensor] = positions_in_order
        self.cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor] = chunked_cross_entropy
        self.side_loss: Callable[[Tensor, Tensor], Tensor] = with_side_loss
        self.loss_share = 1.0

    def forward(self, x: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]; with labels their mean loss instead, which never holds all logits at once.

        Not the first part: x is the stream [B, T, C] that the part before it gave. Not the last: the stream comes out.
        """
        x_BTC = self.embedded(x) if self.first else x
        with balance_losses(self) as balance:
            x_BTC = self.through_layers(x_BTC)
        if not self.last:
            return self.side_loss(x_BTC, self.loss_share * sum(balance[1:], start=balance[0])) if balance else x_BTC
        assert self.norm is not None
        x_BTC = _scaled(self.norm(x_BTC), self.model.logit_scale)
        if labels_BT is None:
            return x_BTC @ self.head_weight().to(x_BTC.dtype).T
        loss = self.cross_entropy(x_BTC, self.head_weight(), labels_BT)
        return self.loss_share * sum(balance, start=loss)

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        """The stream as it enters the first layer."""
        assert self.embedding is not None
        return _scaled(self.embedding(tokens_BT), self.model.embedding_scale)

    def through_layers(self, x_BTC: Tensor) -> Tensor:
        """The stream through all layers that this part has."""
        table: tuple[Tensor, ...] = ()
        if self.rope is not None:
            table = rope_table(self.rope, self.rotated, self.positions(x_BTC.shape[1], x_BTC.device))
        for layer in self.layers:
            x_BTC = layer(x_BTC, *table)
        return x_BTC

    def head_weight(self) -> Tensor:
        """The matrix [V, C] that turns the stream into logits."""
        owner = self.embedding if self.head is None else self.head
        assert owner is not None
        return owner.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set everything as it is before training. Equal seeds give equal numbers on equal devices."""
        for name, parameter in self.named_parameters():
            self.fill(name, parameter, parameter_generator(seed, name, parameter.device))
        for buffer in self.buffers():  # the routers' corrections
            buffer.zero_()

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Set one whole parameter: normal weights, smaller where they write into the stream of a deep model.

        A scaled embedding starts so that the stream has the size 1, as the published weights of Grok-1 have.
        """
        scale = self.model.embedding_scale
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name == "embedding.weight":
            parameter.normal_(0.0, INIT_STD if scale == 1.0 else 1.0 / scale, generator=generator)
        elif name.endswith(self.writes_stream):
            parameter.normal_(0.0, INIT_STD / math.sqrt(self.stream_writes), generator=generator)
        else:
            parameter.normal_(0.0, INIT_STD, generator=generator)

    @staticmethod
    def foreign_orders(_model: Model) -> dict[str, RowOrder]:
        """Our name -> how the rows lie in Hugging Face files, of tensors where that differs from ours."""
        return {}

    @property
    def stream_writes(self) -> int:
        """How often something is added to the stream; it would grow with the root of that."""
        return 2 * self.model.layers


def parameter_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Random numbers for one parameter: they depend on its name, not on which others this process draws before it."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()  # a CPU generator takes 32 bits
    return torch.Generator(device).manual_seed(int.from_bytes(digest))


class _SideLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return x.clone()  # FSDP does not take a view for the output of a module

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)


def with_side_loss(x: Tensor, loss: Tensor) -> Tensor:
    """x as it is; its backward pass also starts that of a loss, which no later part of a pipeline gets to see."""
    return _SideLoss.apply(x, loss)


def foreign_stack(model: Model, layer_names: Callable[[int], dict[str, str]]) -> dict[str, str]:
    """Our name -> the Hugging Face name of every tensor, given those inside layer number n."""
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not model.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    for index in range(model.layers):
        inside = layer_names(index)
        names |= {f"layers.{index}.{ours}": f"model.layers.{index}.{theirs}" for ours, theirs in inside.items()}
    return names


def rope_of(model: Model) -> Rope:
    """The model's rotary positions, which every decoder here needs."""
    if model.rope is None:
        raise ConfigError(f"model {model.name}: a {model.architecture} has rotary positions; rope is missing")
    return model.rope


def refuse_fields(model: Model, *names: str) -> None:
    """A field without effect would falsify the benchmark: those named must have their default."""
    given = {field.name: getattr(model, field.name) for field in fields(Model) if field.name in names}
    defaults = {field.name: field.default for field in fields(Model)}
    wrong = [f"{name}={_shown(value)}" for name, value in given.items() if value != defaults[name]]
    if wrong:
        raise ConfigError(f"model {model.name}: a {model.architecture} cannot have {', '.join(wrong)}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale
