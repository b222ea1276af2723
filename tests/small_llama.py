"""A small Llama computed in chunks with explicit backward passes, as an offloaded run does, and under autograd."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from small_models import llama_model
from torch import Tensor

from llmb.config.spec import Model
from llmb.models.blocks import rope_table
from llmb.models.llama import Llama
from llmb.models.llama_layer.fp8_layer_weights import Fp8LayerWeights, Fp8ModelWeights, PassName
from llmb.models.llama_layer.fp8_linears import Fp8Linears
from llmb.models.llama_layer.layer import LlamaLayer
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues, LayerWeights, SavedActivations
from llmb.models.llama_layer.linears import PlainLinears
from llmb.ops.attention.segment_attention import chunk_segments

CPU = torch.device("cpu")
MODEL = llama_model()
TIED = replace(MODEL, name="tied", tied_embeddings=True)

NARROW = replace(MODEL, name="narrow", ffn=16)  # so narrow that gradients do not fit into the memory of gate and up


def network_of(model: Model, std: float = 0.25) -> Llama:
    """Return a network with weights large enough that every part of the gradient matters, and norms other than one."""
    network = Llama(model)
    generator = torch.Generator().manual_seed(7)
    for parameter in network.parameters():
        parameter.data.normal_(0.0, std, generator=generator)
        if parameter.ndim == 1:
            parameter.data += 1
    return network


def tokens_and_labels(model: Model, groups: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and labels of each group; tokens recur, and some labels are ignored."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for documents in groups:
        tokens, labels = (torch.randint(model.vocab, (sum(documents),), generator=generator) for _ in range(2))
        tokens[1::3] = 5
        labels[::4] = -1
        batches.append((tokens, labels))
    return batches


def by_autograd(
    model: Model, groups: list[list[int]], scale: float, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses of each group's tokens, and gradients of their sum times scale, one document at a time."""
    network, losses = network_of(model).to(dtype), []
    for documents, (tokens, labels) in zip(groups, tokens_and_labels(model, groups), strict=True):
        segments = [slice(*pair) for pair in pairwise(accumulate(documents, initial=0))]
        logits = torch.cat([network(tokens[None, segment])[0] for segment in segments])
        token_losses = torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-1, reduction="none")
        losses.append(token_losses)
    (torch.cat(losses).sum() * scale).backward()
    return [loss.detach() for loss in losses], {name: p.grad for name, p in network.named_parameters()}


@dataclass
class InChunks:
    """The same with layers in chunks, whose activations are saved or recomputed by `level(layer, chunk)`: F, A or I.

    Embedding, head and loss are those of the plain network.
    """

    model: Model
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    fp8: bool = False
    level: Callable[[int, int], str] = lambda _layer, _chunk: "F"
    key_block: int = 8
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.network = network_of(self.model).to(self.device, self.dtype)
        self.block = LlamaLayer(self.model, Fp8Linears if self.fp8 else PlainLinears, key_block=self.key_block)
        self.fp8_weights = Fp8ModelWeights(self.model, self.device) if self.fp8 else None
        self.weights: list[LayerWeights] = []
        self.grads: list[LayerWeights] = []
        for layer in self.network.layers:
            attention, mlp = layer.attention, layer.mlp
            weights = (
                torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]),
                attention.o.weight,
                torch.cat([mlp.gate.weight, mlp.up.weight]),
                mlp.down.weight,
                layer.attention_norm.weight,
                layer.mlp_norm.weight,
            )
            self.weights.append(LayerWeights(*(weight.detach() for weight in weights)))
            self.grads.append(LayerWeights(*(self._unset(*weight.shape, dtype=self.grad_dtype) for weight in weights)))

    def run(self, groups: list[list[int]], chunk: int, scale: float) -> list[Tensor]:
        """Return the losses of each group's tokens; `named_grads` returns the gradients."""
        losses = []
        self.network.zero_grad()
        if self.fp8_weights is not None:
            self.fp8_weights.scales.update()
        for number, (tokens, labels) in enumerate(tokens_and_labels(self.model, groups)):
            losses.append(self._group(groups[number], tokens, labels, chunk, scale, number == 0))
        return losses

    def named_grads(self) -> dict[str, Tensor]:
        m = self.model
        actual = {name: p.grad for name, p in self.network.named_parameters() if p.grad is not None}
        width, kv_width = m.heads * m.head_dim, m.kv_heads * m.head_dim
        for layer, grads in enumerate(self.grads):
            q, k, v = grads.wqkv_XC.split((width, kv_width, kv_width))
            gate, up = grads.w13_2FC.chunk(2)
            local = {"attention.q": q, "attention.k": k, "attention.v": v, "attention.o": grads.wo_CA}
            local |= {"mlp.gate": gate, "mlp.up": up, "mlp.down": grads.w2_CF}
            local |= {"attention_norm": grads.norm1_C, "mlp_norm": grads.norm2_C}
            actual |= {f"layers.{layer}.{name}.weight": grad for name, grad in local.items()}
        return actual

    def _group(self, documents, tokens, labels, chunk, scale, new) -> Tensor:
        m, n = self.model, len(tokens)
        tokens, labels = tokens.to(self.device), labels.to(self.device)
        chunks = [(first, min(first + chunk, n)) for first in range(0, n, chunk)]
        beginnings = list(accumulate(documents[:-1], initial=0))
        segments = [chunk_segments(beginnings, *rows) for rows in chunks]
        positions = torch.cat([torch.arange(length) for length in documents]).to(self.device)
        tables = [rope_table(m.rope, m.head_dim, positions[slice(*rows)]) for rows in chunks]
        embedded = self.network.embed(tokens)
        inp = [embedded.detach().split(chunk)]
        inp += [self._unset(n, m.hidden).split(chunk) for _ in range(m.layers)]
        kv = [self._kv(n, self.dtype) for _ in range(m.layers)]
        stored = {}
        for layer in range(m.layers):
            for c, rows in enumerate(chunks):
                level, (attn, remaining) = self.level(layer, c), self._saved(rows)
                attn, remaining = attn if level in "FA" else None, remaining if level == "F" else None
                self.block.forward(
                    self._weights(layer, "forward"), inp[layer][c], kv[layer], segments[c], *tables[c],
                    inp[layer + 1][c], attn, remaining,
                )  # fmt: skip
                stored[layer, c] = attn, remaining
        out = torch.cat(inp[-1]).requires_grad_()
        logits = self.network.norm(out) @ self.network.head_weight().T
        losses = torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-1, reduction="none")
        (losses.sum() * scale).backward()
        d_residual = out.grad.split(chunk)
        for layer in reversed(range(m.layers)):
            dkv = self._kv(n, torch.float32) if len(chunks) > 1 else None
            for c, rows in reversed(list(enumerate(chunks))):
                last = c == len(chunks) - 1
                (attn, remaining), room = stored[layer, c], self._saved(rows)
                if remaining is None:
                    saved = attn is not None
                    attn, remaining = attn if saved else room[0], room[1]
                    self.block.recompute(
                        self._weights(layer, "backward"), inp[layer][c], kv[layer], segments[c], *tables[c], attn,
                        remaining, saved,
                    )  # fmt: skip
                self.block.backward(
                    self._weights(layer, "backward"), self.grads[layer], not (new and last), inp[layer][c], kv[layer],
                    attn, remaining, dkv, not last, segments[c], *tables[c], d_residual[c],
                )  # fmt: skip
        embedded.backward(out.grad)  # by now that of the first layer's input
        return losses.detach()

    def _weights(self, layer: int, way: PassName) -> LayerWeights | Fp8LayerWeights:
        weights = self.weights[layer]
        return weights if self.fp8_weights is None else self.fp8_weights.layer(layer, way, weights)

    def _unset(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory full of NaN: what is read without having been written shows."""
        return torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.device)

    def _kv(self, tokens: int, dtype: torch.dtype) -> KeyValues:
        return KeyValues(*(self._unset(tokens, self.model.kv_heads * self.model.head_dim, dtype=dtype) for _ in "kv"))

    def _saved(self, rows: tuple[int, int]) -> tuple[AttentionOutput, SavedActivations]:
        m, n = self.model, rows[1] - rows[0]
        width = m.heads * m.head_dim
        attn = AttentionOutput(self._unset(n, width), self._unset(m.heads, n, dtype=torch.float32))
        return attn, SavedActivations(self._unset(n, width), self._unset(n, m.hidden), self._unset(n, 2 * m.ffn))
