"""Base class of all architectures: embedding, decoder layers, final norm, head and loss.

    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

An architecture is a subclass that defines its layers. Tensor names end in their shape, as in `blocks.py`.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from llmb.config.model import Model, RopeConfig
from llmb.errors import ConfigError
from llmb.models.blocks import RMSNorm, TokenEmbedding, rope_table, sequential_positions
from llmb.models.chunked_loss import chunked_cross_entropy
from llmb.models.hf_layout import HfLayout
from llmb.models.moe import collect_aux_losses
from llmb.ops.quant.delayed_scaling import Scaling
from llmb.ops.quant.vector_scaling import VectorScaling

INIT_STD = 0.02
# Fields of model.Model that only dense decoders with grouped-query attention have.
ATTENTION_FIELDS = (
    "pre_norms", "qkv_bias", "o_bias", "qk_norm", "attention_pattern", "window", "local_rope", "attention_scale",
    "attention_sinks", "residual_scale",
)  # fmt: skip


class DecoderLayer(nn.Module):
    """Attention and MLP with residuals, and norms before or after both of them, or before and after."""

    def __init__(self, model: Model, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        if model.post_norms and model.residual_scale != 1.0:
            raise ConfigError(
                f"model {model.name}: residual_scale={model.residual_scale:g} and post_norms exclude another"
            )
        self.attention_norm = _norm(model, model.pre_norms)
        self.attention = attention
        self.attention_post_norm = _post_norm(model)
        self.mlp_norm = _norm(model, model.pre_norms)
        self.mlp = mlp
        self.mlp_post_norm = _post_norm(model)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None) -> Tensor:
        normed_BTC, x_BTC = self.attention_norm(x_BTC, with_residual=True)
        return self.behind_attention(x_BTC, self.attention(normed_BTC, cos_TD, sin_TD))

    def behind_attention(self, x_BTC: Tensor, attention_BTC: Tensor) -> Tensor:
        """Add the attention's output to the residual, and then that of the MLP."""
        x_BTC = self.attention_post_norm(attention_BTC, residual_BTC=x_BTC)
        normed_BTC, x_BTC = self.mlp_norm(x_BTC, with_residual=True)
        return self.mlp_post_norm(self.mlp(normed_BTC), residual_BTC=x_BTC)


class NoNorm(nn.Module):
    """In place of the norm before a block, in models without it."""

    def forward(self, x_BTC: Tensor, with_residual: bool = True) -> tuple[Tensor, Tensor]:
        assert with_residual
        return x_BTC, x_BTC


class NoPostNorm(nn.Module):
    """In place of the norm behind a block, in models without it: the block's output is added, or `scale` of it."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale

    def forward(self, x_BTC: Tensor, residual_BTC: Tensor) -> Tensor:
        return residual_BTC + x_BTC if self.scale == 1.0 else torch.add(residual_BTC, x_BTC, alpha=self.scale)


def _norm(model: Model, has_norm: bool) -> nn.Module:
    return RMSNorm(model.hidden, model.norm_eps) if has_norm else NoNorm()


def _post_norm(model: Model) -> nn.Module:
    return RMSNorm(model.hidden, model.norm_eps) if model.post_norms else NoPostNorm(model.residual_scale)


class Decoder(nn.Module):
    """Decoder-only transformer. With tied embeddings the head uses the embedding's weight.

    Parallelism replaces attributes: the positions of the tokens, the longest sequence, the loss function, the weight of
    a micro-batch's loss, whether this is the first or last pipeline stage, and how other stages attach their routers'
    auxiliary losses. A stage keeps the global layer indices in `layers`, and so the parameter names. Precision sets
    `fp8_scaling`.
    """

    residual_projections: tuple[str, ...] = ("attention.o.weight", ".down.weight")

    def __init__(self, model: Model, layers: Iterable[nn.Module], rope_dim: int):
        super().__init__()
        self.model = model
        self.rope = rope_config(model) if rope_dim else None
        self.rope_dim = rope_dim  # of each head; 0: no positional embedding
        self.embedding: nn.Embedding | None = TokenEmbedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm: RMSNorm | None = RMSNorm(model.hidden, model.norm_eps)
        self.head = None if model.tied_embeddings else nn.Linear(model.hidden, model.vocab, bias=False)
        self.first = self.last = True
        self.positions: Callable[[int, torch.device], Tensor] = sequential_positions
        self.context_tokens: int | None = None  # of the longest sequence, for longrope; none: that of the input
        self.cross_entropy: Callable[..., Tensor] = chunked_cross_entropy
        self.attach_aux_loss: Callable[[Tensor, Tensor], Tensor] = attach_aux_loss
        self.loss_weight = 1.0
        self.fp8_scaling: Scaling | VectorScaling | None = None  # of all fp8 tensors of `layers` outside of experts

    def forward(self, x: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Return the logits [B, T, V] of tokens [B, T]; with labels the mean loss, without materializing all logits.

        Not the first pipeline stage: x is the residual stream [B, T, C]. Not the last: returns the residual stream.
        """
        x_BTC = self.embed(x) if self.first else x
        with collect_aux_losses(self) as aux_losses:
            x_BTC = self.run_layers(x_BTC)
        if not self.last:
            return (
                self.attach_aux_loss(x_BTC, self.loss_weight * sum(aux_losses[1:], start=aux_losses[0]))
                if aux_losses
                else x_BTC
            )
        assert self.norm is not None
        x_BTC = _scale(self.norm(x_BTC), self.model.logit_scale)
        softcap = self.model.logit_softcap
        if labels_BT is None:
            logits_BTV = x_BTC @ self.head_weight().to(x_BTC.dtype).T
            return logits_BTV if softcap is None else softcap * torch.tanh(logits_BTV / softcap)
        loss = self.cross_entropy(x_BTC, self.head_weight(), labels_BT, **({"softcap": softcap} if softcap else {}))
        return self.loss_weight * sum(aux_losses, start=loss)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Embed tokens."""
        assert self.embedding is not None
        return _scale(self.embedding(tokens_BT), self.model.embedding_scale)

    def run_layers(self, x_BTC: Tensor) -> Tensor:
        """Run all layers of this pipeline stage."""
        tables = self.rope_tables(x_BTC)
        for index, layer in self.layers.named_children():
            x_BTC = layer(x_BTC, *tables.get(self.model.attention_kind(int(index)), ()))
        return x_BTC

    def rope_tables(self, x_BTC: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Return the RoPE tables of the tokens, by letter of the attention pattern; those without RoPE have none."""
        if self.rope is None:
            return {}
        positions_T = self.positions(x_BTC.shape[1], x_BTC.device)
        context = self.context_tokens or x_BTC.shape[1]
        full = rope_table(self.rope, self.rope_dim, positions_T, context)
        local = self.model.local_rope
        return {"F": full, "S": full if local is None else rope_table(local, self.rope_dim, positions_T, context)}

    def head_weight(self) -> Tensor:
        """Return the weight [V, C] of the head."""
        module = self.embedding if self.head is None else self.head
        assert module is not None
        return module.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize all parameters and buffers. Equal seeds give equal values on equal devices."""
        for name, parameter in self.named_parameters():
            self.init_parameter(name, parameter, parameter_generator(seed, name, parameter.device))
        for buffer in self.buffers():  # the routers' biases
            buffer.zero_()

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Initialize one unsharded parameter: normal, scaled down with depth where it writes to the residual stream.

        A scaled embedding starts with a residual stream of unit variance, as the published weights of Grok-1 have.
        """
        scale = self.model.embedding_scale
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(("bias", "sinks")) else 1.0)
        elif name.endswith(".bias"):  # of all experts
            parameter.zero_()
        elif name == "embedding.weight":
            parameter.normal_(0.0, INIT_STD if scale == 1.0 else 1.0 / scale, generator=generator)
        elif name.endswith(self.residual_projections):
            parameter.normal_(0.0, INIT_STD / math.sqrt(self.residual_adds), generator=generator)
        else:
            parameter.normal_(0.0, INIT_STD, generator=generator)

    @staticmethod
    def hf_layouts(_model: Model) -> dict[str, HfLayout]:
        """Map our names to the layout in Hugging Face files, for tensors where it differs from ours."""
        return {}

    @property
    def residual_adds(self) -> int:
        """Number of adds to the residual stream, whose standard deviation grows with the square root of it."""
        return 2 * self.model.layers


def parameter_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Return a generator for one parameter that depends on its name only, not on the order of initialization."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()  # a CPU generator takes 32 bits
    return torch.Generator(device).manual_seed(int.from_bytes(digest))


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return x.clone()  # FSDP does not support a view as a module output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)


def attach_aux_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return x unchanged; its backward pass also starts that of the loss, which no later pipeline stage sees."""
    return _AttachAuxLoss.apply(x, loss)


def hf_decoder_names(model: Model, layer_names: Callable[[int], dict[str, str]]) -> dict[str, str]:
    """Map our names to Hugging Face names, given those of the tensors of a layer by its index."""
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not model.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    for index in range(model.layers):
        for name, hf_name in layer_names(index).items():
            names[f"layers.{index}.{name}"] = f"model.layers.{index}.{hf_name}"
    return names


def rope_config(model: Model) -> RopeConfig:
    """Return the RoPE settings of a model, or raise a ConfigError."""
    if model.rope is None:
        raise ConfigError(f"model {model.name}: a {model.architecture} needs the field rope")
    rope = model.rope
    pairs = int((model.mla.rope_dim if model.mla else model.head_dim) * rope.partial_rotary_factor) // 2
    if rope.scaling == "longrope" and {len(rope.short_factors), len(rope.long_factors)} != {pairs}:
        raise ConfigError(
            f"model {model.name}: longrope needs {pairs} short_factors and long_factors, one for each rotated pair, "
            f"not {len(rope.short_factors)} and {len(rope.long_factors)}"
        )
    return rope


def reject_fields(model: Model, *names: str) -> None:
    """Raise a ConfigError if a named field is not the default: a field without effect would falsify the benchmark."""
    values = {field.name: getattr(model, field.name) for field in fields(Model) if field.name in names}
    defaults = {field.name: field.default for field in fields(Model)}
    wrong = [f"{name}={_format_value(value)}" for name, value in values.items() if value != defaults[name]]
    if wrong:
        raise ConfigError(f"model {model.name}: a {model.architecture} cannot have {', '.join(wrong)}")


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scale(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale
