"""What the architectures share: embedding, a stack of layers, a norm, a head, and the loss.

    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

An architecture is a subclass that says what a layer is. Tensor names end in their shape, as in `blocks.py`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import fields

import torch
from torch import Tensor, nn

from llmb.errors import ConfigError
from llmb.models.blocks import RMSNorm, rope_table
from llmb.models.experts import balance_losses
from llmb.models.loss import chunked_cross_entropy
from llmb.spec import Model, Rope

INIT_STD = 0.02


class Decoder(nn.Module):
    """The whole network. With tied embeddings the head has no weight of its own and uses the embedding's."""

    def __init__(self, model: Model, layers: Iterable[nn.Module], rotated: int):
        super().__init__()
        self.model = model
        self.rope = rope_of(model) if rotated else None
        self.rotated = rotated  # how much of each head's width turns with the position; 0: attention without positions
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(model.hidden, model.norm_eps)
        self.head = None if model.tied_embeddings else nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V]; with labels the mean loss instead, which never holds all logits at once."""
        table = rope_table(self.rope, self.rotated, tokens_BT.shape[1], tokens_BT.device) if self.rope else ()
        x_BTC = _scaled(self.embedding(tokens_BT), self.model.embedding_scale)
        with balance_losses(self) as balance:
            for layer in self.layers:
                x_BTC = layer(x_BTC, *table)
        x_BTC = _scaled(self.norm(x_BTC), self.model.logit_scale)
        weight_VC = self.embedding.weight if self.head is None else self.head.weight
        if labels_BT is None:
            return x_BTC @ weight_VC.to(x_BTC.dtype).T
        loss = chunked_cross_entropy(x_BTC.flatten(0, 1), weight_VC, labels_BT.flatten())
        return sum(balance, start=loss)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal weights; those that write into the stream are smaller in a deep model, whose stream would grow.

        A scaled embedding starts so that the stream has the size 1, as the published weights of Grok-1 have.
        """
        scale = self.model.embedding_scale
        embedding_std = INIT_STD if scale == 1.0 else 1.0 / scale
        stream_std = INIT_STD / math.sqrt(2 * self.model.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif name == "embedding.weight":
                parameter.normal_(0.0, embedding_std, generator=generator)
            else:
                writes_stream = name.endswith(("attention.o.weight", ".down.weight"))
                parameter.normal_(0.0, stream_std if writes_stream else INIT_STD, generator=generator)
        for buffer in self.buffers():  # the routers' corrections
            buffer.zero_()


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
