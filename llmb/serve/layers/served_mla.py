"""Multi-head latent attention (MLA) of a served model: absorbed over cached latents for decodes, expanded for prefills.

A decode attends to thousands of cached tokens: absorbing kv_up into its query and its output leaves one key and value
of kv_rank channels that all heads share. Many tokens that attend to the same ones are cheaper with each latent expanded
to the keys and values of every head, which are narrower: DeepSeek-V3 multiplies 320 numbers per head and pair of tokens
instead of 1088. So a sequence's first chunk is expanded, and a later one if it is long enough.

Shapes: N tokens, H heads of this rank, D head dimension (its last K with RoPE), R latent rank, V value dimension,
W = D - K + V, T tokens of a sequence.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.config.model import Model
from llmb.models.blocks import causal_attention, yarn_attention_scale
from llmb.models.decoder import rope_config
from llmb.models.mla import MLA_NORM_EPS, mla_config
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.mla_attention import (
    MlaCache,
    mla_attention,
    mla_prefill_attention,
    mla_rope_and_cache,
)
from llmb.ops.norm.add_rms_norm import add_rms_norm
from llmb.ops.quant.activation_quant import E4M3, Activation, QuantFormat, quantize_activation
from llmb.serve.layers.served_linear import Format, build_linear
from llmb.serve.rank_groups import RankGroup
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import WeightShard, WeightSource

MIN_EXPANDED_CHUNK = 256  # tokens of a later chunk; shorter ones save less than expanding the context costs


class PagedMla:
    """MLA sublayer and its KV cache, which is replicated on every rank: only heads are sharded."""

    captures_prefill = False
    window = None
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
        sizes = self.sizes = mla_config(model)
        self.group, self.kv_dtype = group, kv_dtype
        self.key_dtype = dtype if kv_dtype == E4M3 else kv_dtype
        self.heads = model.heads // group.size
        self.scale = (sizes.nope_dim + sizes.rope_dim) ** -0.5 * yarn_attention_scale(rope_config(model))
        heads, columns = WeightShard(0, group.index, group.size), WeightShard(1, group.index, group.size)
        down = (weights.load(f"{name}.{matrix}.weight") for matrix in ("q_down", "kv_down"))
        self.down = build_linear(*down, format=format, dtype=dtype)
        self.q_up = build_linear(weights.load(f"{name}.q_up.weight", heads), format=format, dtype=dtype)
        self.o = build_linear(weights.load(f"{name}.o.weight", columns), format=format, dtype=dtype)
        self.kv_up_HWR = weights.load(f"{name}.kv_up.weight", heads).to(dtype).unflatten(0, (self.heads, -1))
        self.q_norm_C, self.kv_norm_R = (
            weights.load(f"{name}.{norm}.weight").to(dtype) for norm in ("q_norm", "kv_norm")
        )
        self.input_format: QuantFormat = self.down.input_format
        self.bytes_per_token = sizes.kv_rank * kv_dtype.itemsize + sizes.rope_dim * self.key_dtype.itemsize
        self.cache: MlaCache | None = None

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        self.cache = MlaCache(
            torch.zeros(blocks, block_tokens, self.sizes.kv_rank, dtype=self.kv_dtype, device=device),
            torch.zeros(blocks, block_tokens, self.sizes.rope_dim, dtype=self.key_dtype, device=device),
        )

    def __call__(self, x: Activation, inputs: StepInputs) -> Tensor:
        assert self.cache is not None
        assert inputs.cos_ND is not None
        assert inputs.sin_ND is not None
        widths = (self.sizes.q_rank, self.sizes.kv_rank, self.sizes.rope_dim)
        q_NC, latent_NR, key_NK = self.down(x).split(widths, dim=-1)
        normed, _ = add_rms_norm(q_NC, None, self.q_norm_C, MLA_NORM_EPS, self.q_up.input_format)
        q_NHD = self.q_up(normed).unflatten(-1, (self.heads, -1))
        norm, rope = (self.kv_norm_R, MLA_NORM_EPS), (inputs.cos_ND, inputs.sin_ND)
        mla_rope_and_cache(q_NHD, latent_NR, key_NK, *norm, *rope, self.cache, inputs.slot_mapping_N)
        attn_NHV = q_NHD.new_empty(*q_NHD.shape[:2], self.sizes.value_dim)
        self._attend(q_NHD, inputs, self.cache, attn_NHV)
        return self.group.all_reduce(self.o(quantize_activation(attn_NHV.flatten(1), self.o.input_format)))

    def _attend(self, q_NHD: Tensor, inputs: StepInputs, cache: MlaCache, out_NHV: Tensor) -> None:
        """Compute the attention of every token: decodes, then prefill chunks grouped by the path they take."""
        index = first_token = inputs.num_decodes
        if first_token:
            decodes = _slice_metadata(inputs, 0, first_token, max_query_len=1)
            self._attend_absorbed(q_NHD[:first_token], cache, decodes, out_NHV[:first_token])
        for path, chunks in _group_chunks(inputs.prefill_chunks):
            rows = slice(first_token, first_token + sum(count for _, count in chunks))
            if path == "prefill":
                self._attend_prefill(q_NHD[rows], cache, inputs.slot_mapping_N[rows], chunks[0][1], out_NHV[rows])
            elif path == "expanded":
                self._attend_expanded(q_NHD[rows], cache, inputs.block_table_PM[index], sum(chunks[0]), out_NHV[rows])
            else:
                longest = max(count for _, count in chunks)
                chunk_metadata = _slice_metadata(inputs, index, index + len(chunks), longest, first_token=first_token)
                self._attend_absorbed(q_NHD[rows], cache, chunk_metadata, out_NHV[rows])
            index, first_token = index + len(chunks), rows.stop
        out_NHV[first_token:].zero_()  # padding

    def _attend_absorbed(self, q_NHD: Tensor, cache: MlaCache, metadata: AttentionMetadata, out_NHV: Tensor) -> None:
        """Attend to the latents themselves, with kv_up absorbed into queries and outputs."""
        key_HNR, value_HVR = self.kv_up_HWR.split((self.sizes.nope_dim, self.sizes.value_dim), dim=1)
        nope_NHD, rope_NHK = q_NHD.split((self.sizes.nope_dim, self.sizes.rope_dim), dim=-1)
        q_HNR = torch.bmm(nope_NHD.transpose(0, 1), key_HNR)
        attn_NHR = mla_attention(q_HNR.transpose(0, 1), rope_NHK, cache, metadata, self.scale)
        torch.bmm(attn_NHR.transpose(0, 1), value_HVR.transpose(1, 2), out=out_NHV.transpose(0, 1))

    def _attend_prefill(
        self, q_NHD: Tensor, cache: MlaCache, slot_mapping_N: Tensor, count: int, out_NHV: Tensor
    ) -> None:
        """Attend within sequences of `count` tokens each that begin in this step, as `llmb/models` computes them."""
        latents_NR, keys_NK = self._cached(cache, slot_mapping_N)
        kv_NHW = _expand_latents(latents_NR, self.kv_up_HWR)
        nope_NHD, v_NHV = kv_NHW.split((self.sizes.nope_dim, self.sizes.value_dim), dim=-1)
        k_NHD = torch.empty_like(q_NHD)  # two copies take a quarter of the time of torch.cat
        k_NHD[..., : self.sizes.nope_dim] = nope_NHD
        k_NHD[..., self.sizes.nope_dim :] = keys_NK[:, None]
        q_BHTD, k_BHTD, v_BHTV = (x.unflatten(0, (-1, count)).transpose(1, 2) for x in (q_NHD, k_NHD, v_NHV))
        attn_BHTV = causal_attention(q_BHTD, k_BHTD, v_BHTV, scale=self.scale)
        out_NHV.unflatten(0, (-1, count)).copy_(attn_BHTV.transpose(1, 2))

    def _attend_expanded(
        self, q_NHD: Tensor, cache: MlaCache, block_table_M: Tensor, length: int, out_NHV: Tensor
    ) -> None:
        """Attend from the last tokens of a sequence of `length`, with its latents expanded.

        A pass takes as many heads as need no more memory than all heads of the chunk alone.
        """
        positions_T = torch.arange(length, device=block_table_M.device)
        blocks_T = block_table_M[positions_T // cache.block_tokens].long()
        latents_TR, keys_TK = self._cached(cache, blocks_T * cache.block_tokens + positions_T % cache.block_tokens)
        heads_per_pass = max(1, self.heads * len(q_NHD) // length)
        for first in range(0, self.heads, heads_per_pass):
            heads = slice(first, first + heads_per_pass)
            kv_THW = _expand_latents(latents_TR, self.kv_up_HWR[heads])
            out_NHV[:, heads] = mla_prefill_attention(q_NHD[:, heads], kv_THW, keys_TK, self.scale)

    def _cached(self, cache: MlaCache, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        latents_TR, keys_TK = cache.gather(slots_T)
        return latents_TR.to(self.kv_up_HWR.dtype), keys_TK.to(self.kv_up_HWR.dtype)


def _expand_latents(latents_TR: Tensor, kv_up_HWR: Tensor) -> Tensor:
    """Return the keys without RoPE and the values of each head, [T, H, W]."""
    return F.linear(latents_TR, kv_up_HWR.flatten(0, 1)).unflatten(-1, kv_up_HWR.shape[:2])


def _group_chunks(chunks: Sequence[tuple[int, int]]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Group consecutive chunks that are computed together, with the path they take."""

    def kind(enumerated: tuple[int, tuple[int, int]]) -> tuple[str, int]:
        index, (start, count) = enumerated
        if start == 0:
            return "prefill", count  # chunks of equal length form a batch
        if count >= MIN_EXPANDED_CHUNK:
            return "expanded", index  # one at a time
        return "absorbed", 0

    for (path, _), run in groupby(enumerate(chunks), kind):
        yield path, [chunk for _, chunk in run]


def _slice_metadata(
    metadata: AttentionMetadata, first: int, end: int, max_query_len: int, first_token: int = 0
) -> AttentionMetadata:
    """Return the metadata of some sequences, with tokens counted from the first of them."""
    cu_seqlens_P1 = metadata.cu_seqlens_P1[first : end + 1]
    return AttentionMetadata(
        cu_seqlens_P1=cu_seqlens_P1 - first_token if first_token else cu_seqlens_P1,
        seq_lens_P=metadata.seq_lens_P[first:end],
        block_table_PM=metadata.block_table_PM[first:end],
        num_decodes=end - first if max_query_len == 1 else 0,
        max_query_len=max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
