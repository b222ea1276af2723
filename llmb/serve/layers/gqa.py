"""Grouped-query attention (GQA) of a served model: fused QKV gemm, RoPE, paged KV cache.

Shapes: N tokens, H query heads, G KV heads, D head dimension; heads are those of this rank.
"""

import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.ops.attention.decode_attention import decode_attention
from llmb.ops.attention.paged_attention import KvCache, paged_attention, rope_and_cache
from llmb.ops.gemm.skinny_gemm import InputNorm, skinny_gemm
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
    ):
        self.model, self.group, self.kv_dtype = model, group, kv_dtype
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
        q_and_kv = rope_and_cache(self.qkv(x), inputs.cos_ND, inputs.sin_ND, self.cache, inputs.slot_mapping_N)
        scale, softcap = self.model.head_dim**-0.5, self.model.attn_logit_softcap
        attn_NHD = paged_attention(*q_and_kv, self.cache, inputs, scale, softcap)
        return self.group.all_reduce(self.o(quantize_activation(attn_NHD.flatten(1), self.o.input_format)))

    @property
    def has_skinny_path(self) -> bool:
        return self.qkv.skinny_weight is not None and self.o.skinny_weight is not None

    def forward_skinny(self, residual_NC: Tensor, norm: InputNorm, inputs: StepInputs) -> Tensor:
        assert self.cache is not None
        assert self.qkv.skinny_weight is not None
        assert self.o.skinny_weight is not None
        qkv_NW = skinny_gemm(residual_NC, self.qkv.skinny_weight, residual_NC.dtype, norm=norm)
        scale, softcap = self.model.head_dim**-0.5, self.model.attn_logit_softcap
        attn_NHD = decode_attention(
            qkv_NW, inputs.cos_ND, inputs.sin_ND, self.cache, inputs.slot_mapping_N, inputs, scale, softcap
        )
        return add_skinny_gemm(residual_NC, attn_NHD.flatten(1), self.o.skinny_weight, self.group)
