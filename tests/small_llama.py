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
from llmb.models.llama_layer.layer_tensors import LayerWeights
from llmb.models.llama_layer.linears import PlainLinears
from llmb.offload.buffer_views import attn_view, kv_view, layer_weights_view, saved_activations_view
from llmb.offload.vocab_ends import embed, embed_backward, head_loss
from llmb.ops.attention.segment_attention import chunk_segments
from llmb.perfmodel.offload.buffers import ParamBuckets

CPU = torch.device("cpu")
MODEL = llama_model()
TIED = replace(MODEL, name="tied", tied_embeddings=True)

NARROW = replace(MODEL, name="narrow", ffn=16)  # so narrow that gradients do not fit into the memory of gate and up


def network_of(model: Model) -> Llama:
    """Return a network with weights large enough that every part of the gradient matters, and norms other than one."""
    network = Llama(model)
    generator = torch.Generator().manual_seed(7)
    for parameter in network.parameters():
        parameter.data.normal_(0.0, 0.25, generator=generator)
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
    """The same in chunks, with activations saved or recomputed by `level(layer, chunk)`: F, A or I."""

    model: Model
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    fp8: bool = False
    level: Callable[[int, int], str] = lambda _layer, _chunk: "F"
    parts: int = 2  # of the vocabulary
    loss_tokens: int = 6
    key_block: int = 8
    device: torch.device = CPU

    def __post_init__(self) -> None:
        m, network = self.model, network_of(self.model)
        linears = Fp8Linears if self.fp8 else PlainLinears
        self.block = LlamaLayer(m, linears, key_block=self.key_block)
        self.fp8_weights = Fp8ModelWeights(m, self.device) if self.fp8 else None
        self.weights = [self._new_block(self.dtype) for _ in network.layers]
        self.grads = [self._new_block(self.grad_dtype) for _ in network.layers]
        for layer, weights in zip(network.layers, self.weights, strict=True):
            attention, mlp = layer.attention, layer.mlp
            values = (
                torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]),
                attention.o.weight,
                torch.cat([mlp.gate.weight, mlp.up.weight]),
                mlp.down.weight,
                layer.attention_norm.weight,
                layer.mlp_norm.weight,
            )
            for weight, value in zip(weights, values, strict=True):
                weight.copy_(value.detach())
        self.norm = self._new(network.norm.weight.detach())
        self.dnorm = torch.full_like(self.norm, torch.nan, dtype=self.grad_dtype)
        self.embedding, self.dembedding = self._in_parts(network.embedding.weight.detach())
        self.head, self.dhead = self.embedding, self.dembedding
        if not m.tied_embeddings:
            self.head, self.dhead = self._in_parts(network.head.weight.detach())

    def run(self, groups: list[list[int]], chunk: int, scale: float) -> list[Tensor]:
        """Return the losses of each group's tokens; gradients are in `self.grads` and similar attributes."""
        losses = []
        if self.fp8_weights is not None:
            self.fp8_weights.scales.update()
        for number, (tokens, labels) in enumerate(tokens_and_labels(self.model, groups)):
            losses.append(self._group(groups[number], tokens, labels, chunk, scale, number == 0))
        return losses

    def named_grads(self) -> dict[str, Tensor]:
        m, actual = self.model, {}
        width, kv_width = m.heads * m.head_dim, m.kv_heads * m.head_dim
        for layer, grads in enumerate(self.grads):
            q, k, v = grads.wqkv_XC.split((width, kv_width, kv_width))
            gate, up = grads.w13_2FC.chunk(2)
            local = {"attention.q": q, "attention.k": k, "attention.v": v, "attention.o": grads.wo_CA}
            local |= {"mlp.gate": gate, "mlp.up": up, "mlp.down": grads.w2_CF}
            local |= {"attention_norm": grads.norm1_C, "mlp_norm": grads.norm2_C}
            actual |= {f"layers.{layer}.{name}.weight": grad for name, grad in local.items()}
        actual |= {"norm.weight": self.dnorm, "embedding.weight": torch.cat(self.dembedding)}
        return actual if m.tied_embeddings else actual | {"head.weight": torch.cat(self.dhead)}

    def _group(self, documents, tokens, labels, chunk, scale, new) -> Tensor:
        m, n = self.model, len(tokens)
        tokens, labels = tokens.to(self.device), labels.to(self.device)
        chunks = [(first, min(first + chunk, n)) for first in range(0, n, chunk)]
        beginnings = list(accumulate(documents[:-1], initial=0))
        spans = [chunk_segments(beginnings, *rows) for rows in chunks]
        places = torch.cat([torch.arange(length) for length in documents])
        tables = [rope_table(m.rope, m.head_dim, places[slice(*rows)].to(self.device)) for rows in chunks]
        inp = [[self._stream(rows) for rows in chunks] for _ in range(m.layers + 1)]
        kv = [self._kv(n, self.dtype) for _ in range(m.layers)]
        stored = {}
        for c, rows in enumerate(chunks):
            embed(tokens[slice(*rows)], self.embedding, inp[0][c])
        for layer in range(m.layers):
            for c, rows in enumerate(chunks):
                level, (attn, remaining) = self.level(layer, c), self._saved(rows)
                attn, remaining = attn if level in "FA" else None, remaining if level == "F" else None
                self.block.forward(
                    self._weights(layer, "forward"), inp[layer][c], kv[layer], spans[c], *tables[c], inp[layer + 1][c],
                    attn, remaining,
                )  # fmt: skip
                stored[layer, c] = attn, remaining
        losses = torch.empty(n, device=self.device)
        stream = [self._stream(rows) for rows in chunks]
        for c, rows in reversed(list(enumerate(chunks))):
            some, first = slice(*rows), new and c == len(chunks) - 1
            head_loss(
                inp[-1][c], self.norm, m.norm_eps, self.head, labels[some], scale, stream[c], self.dhead, self.dnorm,
                not first, losses[some], self.loss_tokens,
            )  # fmt: skip
        for layer in reversed(range(m.layers)):
            dkv = self._kv(n, torch.float32) if len(chunks) > 1 else None
            for c, rows in reversed(list(enumerate(chunks))):
                last = c == len(chunks) - 1
                (attn, remaining), room = stored[layer, c], self._saved(rows)
                if remaining is None:
                    saved = attn is not None
                    attn, remaining = attn if saved else room[0], room[1]
                    self.block.recompute(
                        self._weights(layer, "backward"), inp[layer][c], kv[layer], spans[c], *tables[c], attn,
                        remaining, saved,
                    )  # fmt: skip
                self.block.backward(
                    self._weights(layer, "backward"), self.grads[layer], not (new and last), inp[layer][c], kv[layer],
                    attn, remaining, dkv, not last, spans[c], *tables[c], stream[c],
                )  # fmt: skip
        for c, rows in reversed(list(enumerate(chunks))):
            first = new and c == len(chunks) - 1 and not m.tied_embeddings
            embed_backward(stream[c], tokens[slice(*rows)], self.dembedding, not first)
        return losses

    def _weights(self, layer: int, way: PassName) -> LayerWeights | Fp8LayerWeights:
        weights = self.weights[layer]
        return weights if self.fp8_weights is None else self.fp8_weights.layer(layer, way, weights)

    def _new(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype)

    def _new_block(self, dtype: torch.dtype) -> LayerWeights:
        numbers = torch.full((ParamBuckets(self.model).bucket_numel,), torch.nan, dtype=dtype, device=self.device)
        return layer_weights_view(numbers, self.model)

    def _in_parts(self, weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        parts = [self._new(part).contiguous() for part in weight.chunk(self.parts)]
        return parts, [torch.full_like(part, torch.nan, dtype=self.grad_dtype) for part in parts]

    def _bytes(self, size: int) -> Tensor:
        """Full of NaN in all formats: what is read without having been written shows."""
        return torch.full((size + 1024,), 255, dtype=torch.uint8, device=self.device)

    def _stream(self, rows: tuple[int, int]) -> Tensor:
        return torch.full((rows[1] - rows[0], self.model.hidden), torch.nan, dtype=self.dtype, device=self.device)

    def _kv(self, tokens: int, dtype: torch.dtype):
        size = 2 * tokens * self.model.kv_heads * self.model.head_dim * dtype.itemsize
        return kv_view(self._bytes(size), self.model, tokens, dtype)

    def _saved(self, rows: tuple[int, int]):
        m, n = self.model, rows[1] - rows[0]
        width, each = m.heads * m.head_dim, self.dtype.itemsize
        attn = attn_view(self._bytes(n * (width * each + m.heads * 4)), m, n, self.dtype)
        return attn, saved_activations_view(self._bytes(n * (width + m.hidden + 2 * m.ffn) * each), m, n, self.dtype)
