"""Grouped-query attention of a served model: one product for q, k and v, rotary positions, the paged cache.

Shapes: N tokens, H query heads, G heads of keys and values, D width of a head; heads are this rank's.
"""

import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.ops.attention.decode_attention import thin_attention
from llmb.ops.attention.paged_attention import KvCache, paged_attention, rotate_and_cache
from llmb.ops.gemm.skinny_gemm import Norm, thin_product
from llmb.ops.quant.activation_quant import Activation, Form, in_form
from llmb.serve.layers.served_linear import Format, linear, thin_onto
from llmb.serve.rank_groups import Group
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import Cut, Weights


class PagedAttention:
    """One attention block and its cache."""

    bytes_per_slot = 0

    def __init__(
        self,
        weights: Weights,
        name: str,
        model: Model,
        format: Format,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        group: Group,
    ):
        self.model, self.group, self.kv_dtype = model, group, kv_dtype
        cut = Cut(0, group.index, group.size)
        # Fewer heads of keys and values than ranks: each is on several of them.
        kv_parts = min(group.size, model.kv_heads)
        kv_cut = Cut(0, group.index * kv_parts // group.size, kv_parts)
        self.heads, self.kv_heads = model.heads // group.size, model.kv_heads // kv_parts
        cuts = {"q": cut, "k": kv_cut, "v": kv_cut}
        parts = (weights.take(f"{name}.{one}.weight", share) for one, share in cuts.items())
        self.qkv = linear(*parts, format=format, dtype=dtype)
        columns = weights.take(f"{name}.o.weight", Cut(1, group.index, group.size))
        self.o = linear(columns, format=format, dtype=dtype)
        self.form: Form = self.qkv.form
        self.cache: KvCache | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.model.head_dim * self.kv_dtype.itemsize

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        heads, width = self.kv_heads, self.model.head_dim
        keys, values = (blocks, heads, block_tokens, width), (blocks, heads, width, block_tokens)
        self.cache = KvCache(
            torch.zeros(keys, dtype=self.kv_dtype, device=device),
            torch.zeros(values, dtype=self.kv_dtype, device=device),
        )

    def __call__(self, x: Activation, inputs: Inputs) -> Tensor:
        assert self.cache is not None
        made = rotate_and_cache(self.qkv(x), inputs.cos_ND, inputs.sin_ND, self.cache, inputs.places_N)
        scale, cap = self.model.head_dim**-0.5, self.model.attention_cap
        mixed_NHD = paged_attention(*made, self.cache, inputs, scale, cap)
        return self.group.sum(self.o(in_form(mixed_NHD.flatten(1), self.o.form)))

    @property
    def has_thin(self) -> bool:
        return self.qkv.thin is not None and self.o.thin is not None

    def thin(self, stream_NC: Tensor, norm: Norm, inputs: Inputs) -> Tensor:
        assert self.cache is not None
        assert self.qkv.thin is not None
        assert self.o.thin is not None
        qkv_NW = thin_product(stream_NC, self.qkv.thin, stream_NC.dtype, norm=norm)
        scale, cap = self.model.head_dim**-0.5, self.model.attention_cap
        mixed_NHD = thin_attention(
            qkv_NW, inputs.cos_ND, inputs.sin_ND, self.cache, inputs.places_N, inputs, scale, cap
        )
        return thin_onto(stream_NC, mixed_NHD.flatten(1), self.o.thin, self.group)
