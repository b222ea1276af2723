"""A served model: embedding, pre-norm blocks that add to the residual, and LM head.

    model = build_served_model(spec, weights, dtypes, groups)
    logits_SV = model.logits(model.forward(model.embed(tokens_N), inputs), logits_indices_S)

This covers all architectures: a Llama layer is two blocks, a Nemotron-H layer one. Between two blocks runs one fused
kernel, which adds to the residual, normalizes, and quantizes to the input format of the second. For small decode
batches even that is too many kernels: blocks with a skinny path (`SkinnyMixer`) take and return the residual itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.config.model import Model, RopeConfig
from llmb.config.parallel_layout import stage_layers
from llmb.models.blocks import RotaryPairs
from llmb.ops.gemm.skinny_gemm import InputNorm, SkinnyGemmWeight, skinny_gemm, takes_skinny_gemm
from llmb.ops.norm.add_rms_norm import add_rms_norm
from llmb.ops.quant.activation_quant import Activation, quantize_activation
from llmb.serve.layers.gqa import PagedAttention
from llmb.serve.layers.mixer import Mixer, SkinnyMixer
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_mamba import ServedMamba
from llmb.serve.layers.served_mla import PagedMla
from llmb.serve.layers.served_mlp import ServedGatedMlp, ServedPlainMlp
from llmb.serve.layers.served_moe import ServedMoe
from llmb.serve.rank_groups import RankGroups
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import WeightShard, WeightSource


@dataclass(frozen=True)
class ServingDtypes:
    """Dtype of the residual and of unquantized weights, format of linear layers, dtypes of KV cache and attention."""

    dtype: torch.dtype
    format: Format
    kv_dtype: torch.dtype
    fp8_prefills: bool = False  # attention of long whole prompts in fp8


@dataclass(frozen=True)
class ServedBlock:
    """A mixer with its pre-norm and its post-norm, where the model has them, and the factor of what it adds."""

    norm_C: Tensor | None
    mixer: Mixer
    post_norm_C: Tensor | None = None
    residual_scale: float = 1.0

    @cached_property
    def skinny_mixer(self) -> SkinnyMixer | None:
        """The mixer, if it has a skinny path."""
        mixer = self.mixer
        fits = self.norm_C is not None and self.post_norm_C is None and self.residual_scale == 1.0
        return mixer if fits and isinstance(mixer, SkinnyMixer) and mixer.has_skinny_path else None


@dataclass(frozen=True)
class ServedModel:
    """This rank's layers; embedding, final norm and head only on the first or last pipeline stage."""

    spec: Model
    blocks: Sequence[ServedBlock]
    embedding_VC: Tensor | None
    norm_C: Tensor | None
    head_VC: Tensor | None
    rotary: RotaryPairs | None
    local_rotary: RotaryPairs | None  # of layers with a sliding window, if theirs is another
    groups: RankGroups
    dtype: torch.dtype  # of the residual

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Return the input of the first block."""
        assert self.embedding_VC is not None
        x_NC = F.embedding(tokens_N, self.embedding_VC)
        return x_NC if self.spec.embedding_scale == 1.0 else x_NC * self.spec.embedding_scale

    def forward(self, delta_NC: Tensor, inputs: StepInputs) -> Tensor:
        """Return the residual after this rank's blocks; the final norm is part of `logits`."""
        inputs = self._with_rope(inputs)
        eps, residual_NC = self.spec.norm_eps, None
        is_skinny = takes_skinny_gemm(delta_NC) and inputs.num_decodes == len(delta_NC)
        is_skinny &= not inputs.repeats_sequences  # its attention reads no key that the same kernel writes
        for block in self.blocks:
            if is_skinny and block.skinny_mixer is not None and block.norm_C is not None:
                residual_NC = delta_NC if residual_NC is None else residual_NC + delta_NC
                delta_NC, residual_NC = (
                    block.skinny_mixer.forward_skinny(residual_NC, InputNorm(block.norm_C, eps), inputs),
                    None,
                )
                continue
            normed, residual_NC = _add_norm(delta_NC, residual_NC, block, eps)
            delta_NC = block.mixer(normed, inputs)
            if block.post_norm_C is not None:
                delta_NC = F.rms_norm(delta_NC, block.post_norm_C.shape, block.post_norm_C, eps)
            if block.residual_scale != 1.0:
                delta_NC = delta_NC * block.residual_scale
        return delta_NC if residual_NC is None else residual_NC + delta_NC

    def logits(self, x_NC: Tensor, logits_indices_S: Tensor) -> Tensor:
        """Return the logits of the sampling rows, [S, V]."""
        assert self.norm_C is not None
        assert self.head_VC is not None
        logits_SV = self._uncapped_logits(x_NC[logits_indices_S], InputNorm(self.norm_C, self.spec.norm_eps))
        softcap = self.spec.logit_softcap
        return logits_SV if softcap is None else softcap * torch.tanh(logits_SV / softcap)

    def _uncapped_logits(self, x_SC: Tensor, norm: InputNorm) -> Tensor:
        assert self.norm_C is not None
        assert self.head_VC is not None
        scale = self.spec.logit_scale
        if takes_skinny_gemm(x_SC) and scale == 1.0:
            return self.groups.tp.all_gather(skinny_gemm(x_SC, SkinnyGemmWeight(self.head_VC), x_SC.dtype, norm=norm))
        normed_SC = F.rms_norm(x_SC, self.norm_C.shape, *norm)
        return self.groups.tp.all_gather(F.linear(normed_SC if scale == 1.0 else normed_SC * scale, self.head_VC))

    def _with_rope(self, inputs: StepInputs) -> StepInputs:
        """Add cosine and sine of the positions, computed once for all layers."""
        if self.rotary is None:
            return inputs
        cos_ND, sin_ND = self.rotary.table(inputs.positions_N)
        inputs = replace(inputs, cos_ND=cos_ND, sin_ND=sin_ND)
        if self.local_rotary is None:
            return inputs
        cos_ND, sin_ND = self.local_rotary.table(inputs.positions_N)
        return replace(inputs, local_cos_ND=cos_ND, local_sin_ND=sin_ND)

    def mixers(self) -> Iterable[Mixer]:
        return (block.mixer for block in self.blocks)


def build_served_model(
    model: Model, weights: WeightSource, dtypes: ServingDtypes, groups: RankGroups, context_tokens: int = 0
) -> ServedModel:
    """Build the layers of this rank's stage from weights that are loaded one at a time.

    `context_tokens`: of the longest sequence, for RoPE that depends on it (longrope).
    """
    stage = groups.stage
    layers = stage_layers(model.layers, stage.size, None)[stage.index]
    embedding_VC = weights.load("embedding.weight").to(dtypes.dtype) if stage.is_first else None
    return ServedModel(
        spec=model,
        blocks=[block for layer in layers for block in layer_blocks(model, layer, weights, dtypes, groups)],
        embedding_VC=embedding_VC,
        norm_C=weights.load("norm.weight").to(dtypes.dtype) if stage.is_last else None,
        head_VC=_head(model, weights, dtypes, groups, embedding_VC) if stage.is_last else None,
        rotary=_rotary(model, model.rope, groups.device, context_tokens),
        local_rotary=_rotary(model, model.local_rope, groups.device, context_tokens),
        groups=groups,
        dtype=dtypes.dtype,
    )


def _add_norm(
    delta_NC: Tensor, residual_NC: Tensor | None, block: ServedBlock, eps: float
) -> tuple[Activation, Tensor]:
    """Return the input of a block's mixer and the residual."""
    if block.norm_C is not None:
        return add_rms_norm(delta_NC, residual_NC, block.norm_C, eps, block.mixer.input_format)
    residual_NC = delta_NC if residual_NC is None else residual_NC + delta_NC
    return quantize_activation(residual_NC, block.mixer.input_format), residual_NC


def _head(
    model: Model, weights: WeightSource, dtypes: ServingDtypes, groups: RankGroups, embedding_VC: Tensor | None
) -> Tensor:
    """Return this rank's shard of the vocabulary; a tied head shares the memory of an embedding on the same stage."""
    shard = WeightShard(0, groups.tp.index, groups.tp.size)
    if model.tied_embeddings and embedding_VC is not None:
        return shard.slice(embedding_VC)
    return weights.load("embedding.weight" if model.tied_embeddings else "head.weight", shard).to(dtypes.dtype)


def _rotary(model: Model, rope: RopeConfig | None, device: torch.device, context_tokens: int) -> RotaryPairs | None:
    if rope is None:
        return None
    return RotaryPairs.of(rope, model.mla.rope_dim if model.mla else model.head_dim, device, context_tokens)


def layer_blocks(
    model: Model, layer: int, weights: WeightSource, dtypes: ServingDtypes, groups: RankGroups
) -> list[ServedBlock]:
    """Build the blocks of one layer, from weights named as in `llmb/models`."""
    name = f"layers.{layer}"

    def norm(norm_name: str) -> Tensor:
        return weights.load(f"{name}.{norm_name}.weight").to(dtypes.dtype)

    common = (dtypes.format, dtypes.dtype)
    if model.pattern is not None:
        kind = model.pattern[layer]
        if kind == "*":
            mixer: Mixer = PagedAttention(
                weights, f"{name}.mixer", model, *common, dtypes.kv_dtype, groups.tp, fp8_prefills=dtypes.fp8_prefills
            )
        elif kind == "M":
            mixer = ServedMamba(weights, f"{name}.mixer", model, *common, groups.tp)
        else:
            mixer = ServedPlainMlp(weights, f"{name}.mixer", model.activation, *common, groups.tp)
        return [ServedBlock(norm("norm"), mixer)]
    shared = (*common, dtypes.kv_dtype, groups.tp)
    attention: Mixer = (
        PagedAttention(weights, f"{name}.attention", model, *shared, model.attention_kind(layer), dtypes.fp8_prefills)
        if model.mla is None
        else PagedMla(weights, f"{name}.attention", model, *shared)
    )
    if model.experts is not None and layer >= model.experts.dense_layers:
        mlp: Mixer = ServedMoe(weights, f"{name}.mlp", model, *common, groups.experts, groups.tp)
    else:
        dense_mlp = ServedGatedMlp if model.gated else ServedPlainMlp
        mlp = dense_mlp(weights, f"{name}.mlp", model.activation, *common, groups.tp)
    post = {key: norm(f"{key}_post_norm") if model.post_norms else None for key in ("attention", "mlp")}
    pre = {key: norm(f"{key}_norm") if model.pre_norms else None for key in ("attention", "mlp")}
    return [
        ServedBlock(pre["attention"], attention, post["attention"], model.residual_scale),
        ServedBlock(pre["mlp"], mlp, post["mlp"], model.residual_scale),
    ]
