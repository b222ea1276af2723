"""One decoder layer over one sequence chunk by autograd, its weights and gradients in the caller's memory.

    layer = AutogradLayer(model, kind="F", names=["attention.q.weight", ...])
    layer.forward(weights, input_NC, kv, segments, cos_ND, sin_ND, out_NC, attn)
    layer.backward(weights, grads, accumulate, input_NC, kv, attn, attn_saved, dkv, accumulate_dkv, segments, cos_ND,
                   sin_ND, d_residual_NC)

For layers that have no explicit backward (`llama_layer`): the modules of `decoder.DecoderLayer` before and behind the
attention run under autograd, the attention of a chunk to its context in between is the same as there. Between forward
and backward the caller saves the input, keys and values, and maybe the attention; all else is recomputed in backward.
Each weight's gradient goes to the caller's memory, and is freed, as soon as autograd has it. Allocations in between are
counted in `llmb/perfmodel/offload/autograd_workspace.py`.

Shapes as in `llama_layer/layer_tensors.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from llmb.config.model import Model
from llmb.models.architectures import build_model
from llmb.models.blocks import Attention, attention_window
from llmb.models.decoder import DecoderLayer
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues
from llmb.ops.attention.attention_sinks import add_sinks_, sink_gradient
from llmb.ops.attention.segment_attention import (
    KEY_BLOCK,
    Segment,
    causal_backward,
    chunk_rows,
    segment_attention_backward,
    segment_attention_forward,
)

SINKS = "attention.sinks"


class _BeforeAttention(nn.Module):
    """Norm and projections of a layer: from the residual to queries, keys and values, and the residual itself."""

    def __init__(self, layer: DecoderLayer):
        super().__init__()
        self.layer = layer

    def forward(self, x_NC: Tensor, cos_ND: Tensor | None, sin_ND: Tensor | None) -> tuple[Tensor, ...]:
        normed_BNC, x_BNC = self.layer.attention_norm(x_NC[None], with_residual=True)
        attention = self.layer.attention
        assert isinstance(attention, Attention)
        return *(x[0] for x in attention.qkv_heads(normed_BNC, cos_ND, sin_ND)), x_BNC[0]


class _BehindAttention(nn.Module):
    """The rest of a layer: from the residual and the attention to the layer's output."""

    def __init__(self, layer: DecoderLayer):
        super().__init__()
        self.layer = layer

    def forward(self, x_NC: Tensor, attn_NHD: Tensor) -> Tensor:
        attention = self.layer.attention
        assert isinstance(attention, Attention)
        out_BNC: Tensor = self.layer.behind_attention(x_NC[None], attention.project_out(attn_NHD[None]))
        return out_BNC[0]


class _Projected(NamedTuple):
    """Outputs of `_BeforeAttention`, with their graph in backward."""

    q_NHD: Tensor
    k_NGD: Tensor
    v_NGD: Tensor
    residual_NC: Tensor


class AutogradLayer:
    """Arithmetic of the layer; weights come with each call, in the order of their `names` in a layer.

    `kind` is a letter of the model's attention pattern. A smaller key block takes less memory in the backward pass.
    """

    def __init__(self, model: Model, names: Sequence[str], kind: str = "F", key_block: int = KEY_BLOCK):
        with torch.device("meta"):
            layer = build_model(replace(model, layers=1, attention_pattern=kind)).layers[0]
        assert isinstance(layer, DecoderLayer)
        assert {*names} == {name for name, _ in layer.named_parameters()}
        self._names = [f"layer.{name}" for name in names]
        self._sinks = names.index(SINKS) if SINKS in names else None
        self._before, self._behind = _BeforeAttention(layer), _BehindAttention(layer)
        self.window, self.softcap = attention_window(model, kind), model.attn_logit_softcap
        self.has_rope = kind != "N"
        self.head_dim, self.scale, self.key_block = model.head_dim, model.softmax_scale, key_block

    @torch.no_grad()
    def forward(
        self,
        weights: Sequence[Tensor],
        input_NC: Tensor,
        kv: KeyValues,
        segments: Sequence[Segment],
        cos_ND: Tensor,
        sin_ND: Tensor,
        out_NC: Tensor,
        attn: AttentionOutput | None = None,
    ) -> None:
        """Fill `out`, the chunk's rows of `kv`, and `attn` if it is given."""
        projected, rows = self._project(weights, input_NC, cos_ND, sin_ND), chunk_rows(segments)
        kv.k_TW[rows].copy_(projected.k_NGD.flatten(1))
        kv.v_TW[rows].copy_(projected.v_NGD.flatten(1))
        attn_NHD = self._attend(weights, projected.q_NHD, kv, segments, attn)
        del projected
        out_NC.copy_(functional_call(self._behind, self._named(weights), (input_NC, attn_NHD)))

    def backward(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        accumulate: bool,
        input_NC: Tensor,
        kv: KeyValues,
        attn: AttentionOutput,
        attn_saved: bool,
        dkv: KeyValues,
        accumulate_dkv: bool,
        segments: Sequence[Segment],
        cos_ND: Tensor,
        sin_ND: Tensor,
        d_residual_NC: Tensor,
    ) -> None:
        """Set `d_residual` to the gradient of `input`, and set or accumulate `grads`; fills `attn` unless it is saved.

        Chunks of a context go backward from the last to the first; `dkv` holds in fp32 the gradients from later ones,
        and is set by the last.
        """
        leaves = [_weight_leaf(weight, grad, accumulate) for weight, grad in zip(weights, grads, strict=True)]
        x_NC = _leaf(input_NC)
        projected = None if attn_saved else self._project(leaves, x_NC, cos_ND, sin_ND)
        if projected is not None:
            self._attend(weights, projected.q_NHD.detach(), kv, segments, attn)
        dx_NC, dout_NHD = self._behind_backward(leaves, input_NC, attn, d_residual_NC)
        if projected is None:
            projected = self._project(leaves, x_NC, cos_ND, sin_ND)
        if self._sinks is not None:
            out_NHD = self._heads(attn.out_NA)
            dsinks_H = sink_gradient(dout_NHD, out_NHD, attn.lse_HN, weights[self._sinks])
            grads[self._sinks].add_(dsinks_H) if accumulate else grads[self._sinks].copy_(dsinks_H)
        dqkv = self._attention_backward(dout_NHD, projected.q_NHD.detach(), kv, attn, segments, dkv, accumulate_dkv)
        del dout_NHD
        torch.autograd.backward(projected, (*dqkv, dx_NC))
        assert x_NC.grad is not None
        d_residual_NC.copy_(x_NC.grad)

    def _project(self, weights: Sequence[Tensor], x_NC: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> _Projected:
        rope = (cos_ND, sin_ND) if self.has_rope else (None, None)
        return _Projected(*functional_call(self._before, self._named(weights), (x_NC, *rope)))

    def _attend(
        self,
        weights: Sequence[Tensor],
        q_NHD: Tensor,
        kv: KeyValues,
        segments: Sequence[Segment],
        attn: AttentionOutput | None,
    ) -> Tensor:
        """Return the attention, in the memory of `attn` if it is given; it and the log-sum-exp include sinks."""
        chunk_kv, context_kv = self._chunk_and_context(kv, segments)
        buffers = None if attn is None else (self._heads(attn.out_NA), attn.lse_HN)
        out_NHD, lse_HN = segment_attention_forward(
            q_NHD, *chunk_kv, *context_kv, segments, self.scale, self.key_block, buffers, self.window, self.softcap
        )
        if self._sinks is not None:
            lse_HN.copy_(add_sinks_(out_NHD, lse_HN, weights[self._sinks]))
        return out_NHD

    def _behind_backward(
        self, leaves: Sequence[Tensor], input_NC: Tensor, attn: AttentionOutput, d_out_NC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the residual before the attention, and of the attention."""
        x_NC, attn_NHD = _leaf(input_NC), _leaf(self._heads(attn.out_NA))
        out_NC = functional_call(self._behind, self._named(leaves), (x_NC, attn_NHD))
        out_NC.backward(d_out_NC)
        assert x_NC.grad is not None
        assert attn_NHD.grad is not None
        return x_NC.grad, attn_NHD.grad

    def _attention_backward(
        self,
        dout_NHD: Tensor,
        q_NHD: Tensor,
        kv: KeyValues,
        attn: AttentionOutput,
        segments: Sequence[Segment],
        dkv: KeyValues,
        accumulate_dkv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the chunk's queries, keys and values; those of earlier keys go to `dkv`."""
        chunk_kv, context_kv = self._chunk_and_context(kv, segments)
        out_NHD = self._heads(attn.out_NA)
        if not accumulate_dkv and chunk_rows(segments).start == 0:  # no other chunk sees these keys
            return causal_backward(
                dout_NHD, q_NHD, *chunk_kv, out_NHD, attn.lse_HN, segments, self.scale, self.window, self.softcap
            )  # fmt: skip
        (dk, dv), context_dkv = self._chunk_and_context(dkv, segments)
        dq_NHD = torch.empty_like(q_NHD)
        segment_attention_backward(
            dout_NHD, q_NHD, *chunk_kv, *context_kv, out_NHD, attn.lse_HN, segments, dq_NHD, dk, dv, *context_dkv,
            accumulate_dkv, self.scale, self.key_block, self.window, self.softcap,
        )  # fmt: skip
        return dq_NHD, dk.to(q_NHD.dtype), dv.to(q_NHD.dtype)

    def _chunk_and_context(self, kv: KeyValues, segments: Sequence[Segment]) -> tuple[KeyValues, KeyValues]:
        """View keys and values, or their gradients, of the chunk and of what precedes it as [N, heads, head_dim]."""
        rows = chunk_rows(segments)
        k, v = (self._heads(x) for x in kv)
        return KeyValues(k[rows], v[rows]), KeyValues(k[: rows.start], v[: rows.start])

    def _heads(self, x_NA: Tensor) -> Tensor:
        return x_NA.unflatten(1, (-1, self.head_dim))

    def _named(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, weights, strict=True))


def _leaf(x: Tensor) -> Tensor:
    """Return a leaf of a new graph with this content.

    Not by `detach`, which would share the version counter: all buffers of the caller may be parts of one tensor, and to
    write one of them is no change of this one.
    """
    return x.data.requires_grad_()


def _weight_leaf(weight: Tensor, grad: Tensor, accumulate: bool) -> Tensor:
    """Return a weight as a leaf, whose gradient goes to `grad`."""
    leaf = _leaf(weight)
    leaf.register_post_accumulate_grad_hook(partial(_move_gradient, grad, accumulate))
    return leaf


def _move_gradient(grad: Tensor, accumulate: bool, leaf: Tensor) -> None:
    assert leaf.grad is not None
    grad.add_(leaf.grad) if accumulate else grad.copy_(leaf.grad)
    leaf.grad = None
