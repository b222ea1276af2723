"""A model as it is served: an embedding, blocks that each read a normed copy of the stream and add to it, a head.

    stack = build_stack(model, weights, how, ranks)
    logits_SV = stack.logits(stack.through(stack.embed(tokens_N), inputs), rows_S)

All architectures are this: a Llama layer is two blocks, a Nemotron-H layer one. Between two blocks stands one kernel:
it adds what the first made, norms the sum, and gives it in the number format that the second wants. For a handful of
tokens even that is too many: then blocks that can (`ThinMixer`) take the stream itself and give it back added to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.config.parallel_layout import stage_layers
from llmb.config.spec import Model
from llmb.models.blocks import rope_frequencies
from llmb.ops.gemm.skinny_gemm import Norm, ThinWeight, is_thin, thin_product
from llmb.ops.norm.add_rms_norm import add_norm
from llmb.serve.layers.gqa import PagedAttention
from llmb.serve.layers.mixer import Mixer, ThinMixer
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_mamba import StatefulMamba
from llmb.serve.layers.served_mla import LatentPaged
from llmb.serve.layers.served_mlp import ServedGatedMlp, ServedPlainMlp
from llmb.serve.layers.served_moe import ServedExperts
from llmb.serve.rank_groups import Ranks
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import Cut, Weights


@dataclass(frozen=True)
class How:
    """Number formats: of the stream and of what is not rounded, of linear layers, of the cache."""

    dtype: torch.dtype
    format: Format
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class Block:
    """A mixer with the norm before it and, where the model has one, the norm of what it adds."""

    norm_C: Tensor
    mixer: Mixer
    post_norm_C: Tensor | None = None

    @cached_property
    def thin(self) -> ThinMixer | None:
        """The mixer, if steps of a handful of tokens can go its second way."""
        mixer = self.mixer
        return mixer if self.post_norm_C is None and isinstance(mixer, ThinMixer) and mixer.has_thin else None


@dataclass(frozen=True)
class Stack:
    """This rank's layers; embedding, norm and head only where it is the first or last of a pipeline."""

    model: Model
    blocks: Sequence[Block]
    embedding_VC: Tensor | None
    norm_C: Tensor | None
    head_VC: Tensor | None
    frequencies_D: Tensor | None  # of the rotary positions, in radians a token
    ranks: Ranks

    @property
    def dtype(self) -> torch.dtype:
        """Of the stream."""
        return self.blocks[0].norm_C.dtype

    def embed(self, tokens_N: Tensor) -> Tensor:
        """The stream as it enters the first block."""
        assert self.embedding_VC is not None
        x_NC = F.embedding(tokens_N, self.embedding_VC)
        return x_NC if self.model.embedding_scale == 1.0 else x_NC * self.model.embedding_scale

    def through(self, added_NC: Tensor, inputs: Inputs) -> Tensor:
        """The stream after this rank's blocks; its last norm comes with the head, for the rows that need it."""
        inputs = self._with_angles(inputs)
        eps, stream_NC = self.model.norm_eps, None
        few = is_thin(added_NC) and inputs.decodes == len(added_NC)
        for block in self.blocks:
            if few and block.thin is not None:
                stream_NC = added_NC if stream_NC is None else stream_NC + added_NC
                added_NC, stream_NC = block.thin.thin(stream_NC, Norm(block.norm_C, eps), inputs), None
                continue
            normed, stream_NC = add_norm(added_NC, stream_NC, block.norm_C, eps, block.mixer.form)
            added_NC = block.mixer(normed, inputs)
            if block.post_norm_C is not None:
                added_NC = F.rms_norm(added_NC, block.post_norm_C.shape, block.post_norm_C, eps)
        return added_NC if stream_NC is None else stream_NC + added_NC

    def logits(self, x_NC: Tensor, rows_S: Tensor) -> Tensor:
        """Of the rows that sample, [S, V]."""
        assert self.norm_C is not None
        assert self.head_VC is not None
        x_SC, norm, scale = x_NC[rows_S], Norm(self.norm_C, self.model.norm_eps), self.model.logit_scale
        if is_thin(x_SC) and scale == 1.0:
            return self.ranks.dense.gather(thin_product(x_SC, ThinWeight(self.head_VC), x_SC.dtype, norm=norm))
        normed_SC = F.rms_norm(x_SC, self.norm_C.shape, *norm)
        return self.ranks.dense.gather(F.linear(normed_SC if scale == 1.0 else normed_SC * scale, self.head_VC))

    def _with_angles(self, inputs: Inputs) -> Inputs:
        """Cosine and sine of the positions, once for all layers."""
        if self.frequencies_D is None:
            return inputs
        angles_ND = inputs.positions_N[:, None].float() * self.frequencies_D
        return replace(inputs, cos_ND=angles_ND.cos(), sin_ND=angles_ND.sin())

    def mixers(self) -> Iterable[Mixer]:
        return (block.mixer for block in self.blocks)


def build_stack(model: Model, weights: Weights, how: How, ranks: Ranks) -> Stack:
    """The layers of this rank's stage, from weights that are taken one at a time."""
    stage = ranks.stage
    layers = stage_layers(model.layers, stage.size, None)[stage.index]
    embedding_VC = weights.take("embedding.weight").to(how.dtype) if stage.first else None
    return Stack(
        model=model,
        blocks=[block for layer in layers for block in layer_blocks(model, layer, weights, how, ranks)],
        embedding_VC=embedding_VC,
        norm_C=weights.take("norm.weight").to(how.dtype) if stage.last else None,
        head_VC=_head(model, weights, how, ranks, embedding_VC) if stage.last else None,
        frequencies_D=_frequencies(model, ranks.device),
        ranks=ranks,
    )


def _head(model: Model, weights: Weights, how: How, ranks: Ranks, embedding_VC: Tensor | None) -> Tensor:
    """This rank's part of the vocabulary; tied to the embedding it is the same memory, where the embedding is here."""
    split = Cut(0, ranks.dense.index, ranks.dense.size)
    if model.tied_embeddings and embedding_VC is not None:
        return split.of(embedding_VC)
    return weights.take("embedding.weight" if model.tied_embeddings else "head.weight", split).to(how.dtype)


def _frequencies(model: Model, device: torch.device) -> Tensor | None:
    if model.rope is None:
        return None
    return rope_frequencies(model.rope, model.latent.rope_dim if model.latent else model.head_dim, device)


def layer_blocks(model: Model, layer: int, weights: Weights, how: How, ranks: Ranks) -> list[Block]:
    """The blocks of one layer, as `llmb/models` names their weights."""
    name = f"layers.{layer}"

    def norm(of: str) -> Tensor:
        return weights.take(f"{name}.{of}.weight").to(how.dtype)

    common = (how.format, how.dtype)
    if model.pattern is not None:
        kind = model.pattern[layer]
        if kind == "*":
            mixer: Mixer = PagedAttention(weights, f"{name}.mixer", model, *common, how.kv_dtype, ranks.dense)
        elif kind == "M":
            mixer = StatefulMamba(weights, f"{name}.mixer", model, *common, ranks.dense)
        else:
            mixer = ServedPlainMlp(weights, f"{name}.mixer", model.activation, *common, ranks.dense)
        return [Block(norm("norm"), mixer)]
    attend = PagedAttention if model.latent is None else LatentPaged
    attention: Mixer = attend(weights, f"{name}.attention", model, *common, how.kv_dtype, ranks.dense)
    if model.experts is not None and layer >= model.experts.dense_layers:
        mlp: Mixer = ServedExperts(weights, f"{name}.mlp", model, *common, ranks.experts, ranks.dense)
    else:
        mlp = ServedGatedMlp(weights, f"{name}.mlp", model.activation, *common, ranks.dense)
    post = {of: norm(f"{of}_post_norm") if model.post_norms else None for of in ("attention", "mlp")}
    return [
        Block(norm("attention_norm"), attention, post["attention"]),
        Block(norm("mlp_norm"), mlp, post["mlp"]),
    ]
