"""Grouped-query attention (GQA) of a served model: fused QKV gemm, RoPE, paged KV cache.

Shapes: N tokens, H query heads, G KV heads, D head dimension; heads are those of this rank.
"""

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.models.blocks import attention_window
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.decode_attention import decode_attention
from llmb.ops.attention.paged_attention import HeadNorms, KvCache, paged_attention, rope_and_cache
from llmb.ops.gemm.skinny_gemm import InputNorm, skinny_gemm
from llmb.ops.norm.qkv_norm import qkv_norm_
from llmb.ops.quant.activation_quant import Activation, QuantFormat, quantize_activation
from llmb.serve.layers.served_linear import Format, add_skinny_gemm, build_linear
from llmb.serve.rank_groups import RankGroup
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import WeightShard, WeightSource


class PagedAttention:
    """Attention sublayer and its KV cache."""

    captures_prefill = True
    bytes_per_slot = 0

    def __init__(
        self,
        weights: WeightSource,
        name: str,
        model: Model,
        format: Format,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        group: RankGroup,
        kind: str = "F",
        fp8_prefills: bool = False,
    ):
        self.model, self.group, self.kv_dtype, self.kind = model, group, kv_dtype, kind
        self.window = attention_window(model, kind)
        self.fp8_prefills = fp8_prefills
        shard = WeightShard(0, group.index, group.size)
        # KV heads are replicated if there are fewer of them than ranks.
        kv_shards = min(group.size, model.kv_heads)
        kv_shard = WeightShard(0, group.index * kv_shards // group.size, kv_shards)
        self.heads, self.kv_heads = model.heads // group.size, model.kv_heads // kv_shards
        shards = {"q": shard, "k": kv_shard, "v": kv_shard}
        qkv = (weights.load(f"{name}.{matrix}.weight", matrix_shard) for matrix, matrix_shard in shards.items())
        self.qkv = build_linear(*qkv, format=format, dtype=dtype)
        columns = weights.load(f"{name}.o.weight", WeightShard(1, group.index, group.size))
        self.o = build_linear(columns, format=format, dtype=dtype)
        self.qkv_bias_W = self.o_bias_C = None
        if model.qkv_bias:
            biases = (weights.load(f"{name}.{matrix}_bias", matrix_shard) for matrix, matrix_shard in shards.items())
            self.qkv_bias_W = torch.cat([bias.to(dtype) for bias in biases])
        if model.o_bias:
            self.o_bias_C = weights.load(f"{name}.o_bias").to(dtype)
        self.sinks_H = weights.load(f"{name}.sinks", shard).float() if model.attention_sinks else None
        self.qk_norms: tuple[Tensor, Tensor] | None = None
        if model.qk_norm:
            q_norm, k_norm = (weights.load(f"{name}.{norm}.weight").to(dtype) for norm in ("q_norm", "k_norm"))
            self.qk_norms = q_norm, k_norm
        self.input_format: QuantFormat = self.qkv.input_format
        self.cache: KvCache | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.model.head_dim * self.kv_dtype.itemsize

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        heads, head_dim = self.kv_heads, self.model.head_dim
        keys, values = (blocks, heads, block_tokens, head_dim), (blocks, heads, head_dim, block_tokens)
        self.cache = KvCache(
            torch.zeros(keys, dtype=self.kv_dtype, device=device),
            torch.zeros(values, dtype=self.kv_dtype, device=device),
        )

    def __call__(self, x: Activation, inputs: StepInputs) -> Tensor:
        assert self.cache is not None
        norms = self._norms_before_rope(inputs)
        qkv_NW = self.qkv(x) if norms is not None else self._biased_and_normed(self.qkv(x))
        metadata, slot_mapping_N = self._tables(inputs)
        q_and_kv = rope_and_cache(qkv_NW, *self._rope(inputs), self.cache, slot_mapping_N, norms)
        scale, softcap = self.model.softmax_scale, self.model.attn_logit_softcap
        attn_NHD = paged_attention(
            *q_and_kv, self.cache, metadata, scale, softcap, self.window, self.sinks_H, self.fp8_prefills
        )
        out_NC = self.group.all_reduce(self.o(quantize_activation(attn_NHD.flatten(1), self.o.input_format)))
        return out_NC if self.o_bias_C is None else out_NC + self.o_bias_C

    def _tables(self, inputs: StepInputs) -> tuple[AttentionMetadata, Tensor]:
        """Return the metadata and the slot mapping of this layer's blocks."""
        if self.window is None or inputs.window_metadata is None or inputs.window_slot_mapping_N is None:
            return inputs, inputs.slot_mapping_N
        return inputs.window_metadata, inputs.window_slot_mapping_N

    def _rope(self, inputs: StepInputs) -> tuple[Tensor | None, Tensor | None]:
        """Return cosine and sine of this layer."""
        if self.kind == "N":
            return None, None
        if self.kind == "S" and inputs.local_cos_ND is not None:
            return inputs.local_cos_ND, inputs.local_sin_ND
        return inputs.cos_ND, inputs.sin_ND

    def _norms_before_rope(self, inputs: StepInputs) -> HeadNorms | None:
        """Return norms that the pass of RoPE can compute too: those of single heads, without a bias before them."""
        has_rope = self._rope(inputs)[0] is not None
        if self.qk_norms is None or self.qkv_bias_W is not None or not has_rope:
            return None
        of_heads = all(len(weight) == self.model.head_dim for weight in self.qk_norms)
        return HeadNorms(*self.qk_norms, self.model.norm_eps) if of_heads else None

    def _biased_and_normed(self, qkv_NW: Tensor) -> Tensor:
        """Add the bias of the projections and norm queries and keys in place, where the model has them."""
        if self.qkv_bias_W is not None or self.qk_norms is not None:
            qkv_norm_(qkv_NW, self.heads, self.kv_heads, self.qkv_bias_W, self.qk_norms, self.model.norm_eps)
        return qkv_NW

    @property
    def has_skinny_path(self) -> bool:
        return self.qkv.skinny_weight is not None and self.o.skinny_weight is not None

    def forward_skinny(self, residual_NC: Tensor, norm: InputNorm, inputs: StepInputs) -> Tensor:
        assert self.cache is not None
        assert self.qkv.skinny_weight is not None
        assert self.o.skinny_weight is not None
        qkv_NW = skinny_gemm(residual_NC, self.qkv.skinny_weight, residual_NC.dtype, norm=norm)
        scale, softcap = self.model.softmax_scale, self.model.attn_logit_softcap
        metadata, slot_mapping_N = self._tables(inputs)
        attn_NHD = decode_attention(
            self._biased_and_normed(qkv_NW), *self._rope(inputs), self.cache, slot_mapping_N, metadata, scale,
            softcap, self.window, self.sinks_H,
        )  # fmt: skip
        out_NC = add_skinny_gemm(residual_NC, attn_NHD.flatten(1), self.o.skinny_weight, self.group)
        return out_NC if self.o_bias_C is None else out_NC + self.o_bias_C
