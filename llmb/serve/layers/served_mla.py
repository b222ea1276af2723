"""Latent attention of a served model: queries with kv_up absorbed meet a cache of latents, long prompts expand them.

A token that is generated meets thousands of cached ones: absorbing kv_up into its query and its output leaves one key
and value of kv_rank channels that all heads share. Many tokens that meet the same ones are cheaper computed with each
latent expanded to keys and values of every head, which are narrower: DeepSeek-V3 multiplies 320 numbers for a pair of
tokens and a head, instead of 1088. So a sequence's first chunk is expanded, and a later one if it is long enough.

Shapes: N tokens, H heads of this rank, D width of a head (its last K with position), R latent rank, V width of values,
W = D - K + V, T tokens of a sequence.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.config.spec import Model
from llmb.models.blocks import causal_attention, yarn_attention_scale
from llmb.models.decoder import rope_of
from llmb.models.mla import LATENT_NORM_EPS, latent_of
from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.attention.mla_attention import (
    LatentCache,
    expanded_attention,
    latent_attention,
    rotate_and_cache_latents,
)
from llmb.ops.norm.add_rms_norm import add_norm
from llmb.ops.quant.activation_quant import E4M3, Activation, Form, in_form
from llmb.serve.layers.served_linear import Format, linear
from llmb.serve.rank_groups import Group
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import Cut, Weights

EXPANDED_FROM = 256  # tokens of a later chunk: fewer save less than it costs to expand all that came before


class LatentPaged:
    """One latent attention block and its cache, which is whole on every rank: only heads are shared out."""

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
        sizes = self.sizes = latent_of(model)
        self.group, self.kv_dtype = group, kv_dtype
        self.key_dtype = dtype if kv_dtype == E4M3 else kv_dtype
        self.heads = model.heads // group.size
        self.scale = (sizes.nope_dim + sizes.rope_dim) ** -0.5 * yarn_attention_scale(rope_of(model))
        heads, columns = Cut(0, group.index, group.size), Cut(1, group.index, group.size)
        both_down = (weights.take(f"{name}.{one}.weight") for one in ("q_down", "kv_down"))
        self.down = linear(*both_down, format=format, dtype=dtype)
        self.q_up = linear(weights.take(f"{name}.q_up.weight", heads), format=format, dtype=dtype)
        self.o = linear(weights.take(f"{name}.o.weight", columns), format=format, dtype=dtype)
        self.kv_up_HWR = weights.take(f"{name}.kv_up.weight", heads).to(dtype).unflatten(0, (self.heads, -1))
        self.q_norm_C, self.kv_norm_R = (
            weights.take(f"{name}.{one}.weight").to(dtype) for one in ("q_norm", "kv_norm")
        )
        self.form: Form = self.down.form
        self.bytes_per_token = sizes.kv_rank * kv_dtype.itemsize + sizes.rope_dim * self.key_dtype.itemsize
        self.cache: LatentCache | None = None

    def allocate(self, blocks: int, block_tokens: int, slots: int, device: torch.device) -> None:
        self.cache = LatentCache(
            torch.zeros(blocks, block_tokens, self.sizes.kv_rank, dtype=self.kv_dtype, device=device),
            torch.zeros(blocks, block_tokens, self.sizes.rope_dim, dtype=self.key_dtype, device=device),
        )

    def __call__(self, x: Activation, inputs: Inputs) -> Tensor:
        assert self.cache is not None
        assert inputs.cos_ND is not None
        assert inputs.sin_ND is not None
        widths = (self.sizes.q_rank, self.sizes.kv_rank, self.sizes.rope_dim)
        q_NC, latent_NR, key_NK = self.down(x).split(widths, dim=-1)
        normed, _ = add_norm(q_NC, None, self.q_norm_C, LATENT_NORM_EPS, self.q_up.form)
        q_NHD = self.q_up(normed).unflatten(-1, (self.heads, -1))
        norm, turns = (self.kv_norm_R, LATENT_NORM_EPS), (inputs.cos_ND, inputs.sin_ND)
        rotate_and_cache_latents(q_NHD, latent_NR, key_NK, *norm, *turns, self.cache, inputs.places_N)
        mixed_NHV = q_NHD.new_empty(*q_NHD.shape[:2], self.sizes.value_dim)
        self._mix(q_NHD, inputs, self.cache, mixed_NHV)
        return self.group.sum(self.o(in_form(mixed_NHV.flatten(1), self.o.form)))

    def _mix(self, q_NHD: Tensor, inputs: Inputs, cache: LatentCache, out_NHV: Tensor) -> None:
        """Attention of every token, each kind of part in its own way."""
        part = done = inputs.decodes
        if done:
            self._absorbed(q_NHD[:done], cache, _some(inputs, 0, done, longest_part=1), out_NHV[:done])
        for way, parts in _runs(inputs.parts):
            rows = slice(done, done + sum(count for _, count in parts))
            if way == "whole":
                self._whole(q_NHD[rows], cache, inputs.places_N[rows], parts[0][1], out_NHV[rows])
            elif way == "expanded":
                self._expanded(q_NHD[rows], cache, inputs.table_PM[part], sum(parts[0]), out_NHV[rows])
            else:
                longest = max(count for _, count in parts)
                few = _some(inputs, part, part + len(parts), longest, first_token=done)
                self._absorbed(q_NHD[rows], cache, few, out_NHV[rows])
            part, done = part + len(parts), rows.stop
        out_NHV[done:].zero_()  # padding

    def _absorbed(self, q_NHD: Tensor, cache: LatentCache, spans: Spans, out_NHV: Tensor) -> None:
        """Queries and outputs go through kv_up, latents stay as they are."""
        key_HNR, value_HVR = self.kv_up_HWR.split((self.sizes.nope_dim, self.sizes.value_dim), dim=1)
        still_NHD, turned_NHK = q_NHD.split((self.sizes.nope_dim, self.sizes.rope_dim), dim=-1)
        q_HNR = torch.bmm(still_NHD.transpose(0, 1), key_HNR)
        mixed_NHR = latent_attention(q_HNR.transpose(0, 1), turned_NHK, cache, spans, self.scale)
        torch.bmm(mixed_NHR.transpose(0, 1), value_HVR.transpose(1, 2), out=out_NHV.transpose(0, 1))

    def _whole(self, q_NHD: Tensor, cache: LatentCache, places_N: Tensor, count: int, out_NHV: Tensor) -> None:
        """Sequences of `count` tokens each, all of them here, as `llmb/models` computes them."""
        latents_NR, keys_NK = self._cached(cache, places_N)
        kv_NHW = _times(latents_NR, self.kv_up_HWR)
        still_NHD, v_NHV = kv_NHW.split((self.sizes.nope_dim, self.sizes.value_dim), dim=-1)
        k_NHD = torch.empty_like(q_NHD)  # filled by two copies, which torch.cat takes four times as long for
        k_NHD[..., : self.sizes.nope_dim] = still_NHD
        k_NHD[..., self.sizes.nope_dim :] = keys_NK[:, None]
        q_BHTD, k_BHTD, v_BHTV = (x.unflatten(0, (-1, count)).transpose(1, 2) for x in (q_NHD, k_NHD, v_NHV))
        mixed_BHTV = causal_attention(q_BHTD, k_BHTD, v_BHTV, scale=self.scale)
        out_NHV.unflatten(0, (-1, count)).copy_(mixed_BHTV.transpose(1, 2))

    def _expanded(self, q_NHD: Tensor, cache: LatentCache, table_M: Tensor, length: int, out_NHV: Tensor) -> None:
        """The last tokens of one sequence of `length`; as many heads at a time as take no more memory than if it were
        whole."""
        positions_T = torch.arange(length, device=table_M.device)
        blocks_T = table_M[positions_T // cache.block_tokens].long()
        latents_TR, keys_TK = self._cached(cache, blocks_T * cache.block_tokens + positions_T % cache.block_tokens)
        each = max(1, self.heads * len(q_NHD) // length)
        for first in range(0, self.heads, each):
            heads = slice(first, first + each)
            kv_THW = _times(latents_TR, self.kv_up_HWR[heads])
            out_NHV[:, heads] = expanded_attention(q_NHD[:, heads], kv_THW, keys_TK, self.scale)

    def _cached(self, cache: LatentCache, places_T: Tensor) -> tuple[Tensor, Tensor]:
        latents_TR, keys_TK = cache.at(places_T)
        return latents_TR.to(self.kv_up_HWR.dtype), keys_TK.to(self.kv_up_HWR.dtype)


def _times(latents_TR: Tensor, kv_up_HWR: Tensor) -> Tensor:
    """Keys without position and values of each head, [T, H, W]."""
    return F.linear(latents_TR, kv_up_HWR.flatten(0, 1)).unflatten(-1, kv_up_HWR.shape[:2])


def _runs(parts: Sequence[tuple[int, int]]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """In which way each of the parts is computed; those that follow one another may go together."""

    def kind(numbered: tuple[int, tuple[int, int]]) -> tuple[str, int]:
        place, (start, count) = numbered
        if start == 0:
            return "whole", count  # those of one length are a batch
        if count >= EXPANDED_FROM:
            return "expanded", place  # each by itself
        return "absorbed", 0

    for (way, _), run in groupby(enumerate(parts), kind):
        yield way, [part for _, part in run]


def _some(spans: Spans, first: int, end: int, longest_part: int, first_token: int = 0) -> Spans:
    """Some of the parts, with tokens counted from the first of them."""
    starts_P1 = spans.starts_P1[first : end + 1]
    return Spans(
        starts_P1=starts_P1 - first_token if first_token else starts_P1,
        lengths_P=spans.lengths_P[first:end],
        table_PM=spans.table_PM[first:end],
        decodes=end - first if longest_part == 1 else 0,
        longest_part=longest_part,
        longest=spans.longest,
    )
