"""Llama 3.x: embedding, a stack of attention and gated-MLP layers, a norm, a head.

    network = Llama(model)              # model: a spec.Model
    logits_BTV = network(tokens_BT)
    loss = network(tokens_BT, labels_BT)

Checked number by number against `transformers` in tests/models. Tensor names end in their shape, as in `blocks.py`.
"""

import math

import torch
from torch import Tensor, nn

from llmb.errors import ConfigError
from llmb.models.blocks import Attention, GatedMlp, RMSNorm, rope_frequencies, rope_table
from llmb.models.loss import chunked_cross_entropy
from llmb.spec import Model

INIT_STD = 0.02


class Layer(nn.Module):
    """Attention, then the MLP, each on a normed copy of the stream and added to it."""

    def __init__(self, model: Model):
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden, model.norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = RMSNorm(model.hidden, model.norm_eps)
        self.mlp = GatedMlp(model.hidden, model.ffn)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), cos_TD, sin_TD)
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class Llama(nn.Module):
    """The whole network. With tied embeddings the head has no weight of its own and uses the embedding's."""

    def __init__(self, model: Model):
        super().__init__()
        _check(model)
        self.model = model
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = RMSNorm(model.hidden, model.norm_eps)
        self.head = None if model.tied_embeddings else nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V]; with labels the mean loss instead, which never holds all logits at once."""
        table = rope_table(self.model.rope, self.model.head_dim, tokens_BT.shape[1], tokens_BT.device)
        x_BTC = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC, *table)
        x_BTC = self.norm(x_BTC)
        weight_VC = self.embedding.weight if self.head is None else self.head.weight
        if labels_BT is None:
            return x_BTC @ weight_VC.to(x_BTC.dtype).T
        return chunked_cross_entropy(x_BTC.flatten(0, 1), weight_VC, labels_BT.flatten())

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal weights; those that write into the stream are smaller in a deep model, whose stream would grow."""
        stream_std = INIT_STD / math.sqrt(2 * self.model.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                writes_stream = name.endswith(("attention.o.weight", "mlp.down.weight"))
                parameter.normal_(0.0, stream_std if writes_stream else INIT_STD, generator=generator)


def _check(model: Model) -> None:
    foreign = [name for name in ("pattern", "experts", "latent", "mamba") if getattr(model, name) is not None]
    if foreign or not model.gated:
        wrong = ", ".join(foreign + ["gated=false"] * (not model.gated))
        raise ConfigError(f"model {model.name}: a llama has dense gated MLPs and plain attention, not {wrong}")
    if model.heads % model.kv_heads:
        raise ConfigError(f"model {model.name}: kv_heads={model.kv_heads} does not divide heads={model.heads}")
    if model.head_dim % 2:
        raise ConfigError(f"model {model.name}: head_dim={model.head_dim} must be even for rotary positions")
    rope_frequencies(model.rope, model.head_dim, torch.device("meta"))  # refuses a scaling that is not built
