"""One layer of a Llama over one chunk of tokens, forward and back by hand, with every tensor that is kept named.

    block = Block(model, Products())
    block.forward(weights, inp_NC, kv, spans, cos_ND, sin_ND, out_NC, attn, rest)
    block.recompute(weights, inp_NC, kv, spans, cos_ND, sin_ND, attn, rest, attn_saved=True)
    block.backward(weights, grads, fresh, inp_NC, kv, attn, rest, dkv, fresh_dkv, spans, cos_ND, sin_ND, dstream_NC)

Autograd keeps what it likes as long as it likes; here the caller says what is kept: nothing but the input, keys and
values; the attention too; or all. The outputs of norms and of the gated activation are never kept. Keys and values are
those of the chunk's whole context, of which its own rows are written on the way there. Cosine and sine are fp32, those
of each token's place in its document. What is allocated in between is counted in `workspace.py`.

Shapes as in `tensors.py`; D half the width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmb.kernels.rms_norm import rms_norm, rms_norm_backward
from llmb.kernels.rotation import rotate_in_place
from llmb.kernels.span_attention import KEYS_AT_ONCE, Span, attend, attend_backward, rows_of
from llmb.kernels.swiglu import swiglu, swiglu_backward
from llmb.outofcore.products import Products
from llmb.outofcore.tensors import Attn, BlockWeights, KeyValues, Rest
from llmb.predict.pieces import aligned
from llmb.predict.plain_llama import check_plain_llama
from llmb.spec import Model


class Block:
    """The layer's arithmetic; weights come with each call. Fewer keys at once: less memory on the way back."""

    def __init__(self, model: Model, products: Products, keys_at_once: int = KEYS_AT_ONCE):
        check_plain_llama(model)
        self.keys_at_once = keys_at_once
        self.model, self.products = model, products
        self.width, self.kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.scale = model.head_dim**-0.5

    def forward(
        self,
        weights: BlockWeights,
        inp_NC: Tensor,
        kv: KeyValues,
        spans: Sequence[Span],
        cos_ND: Tensor,
        sin_ND: Tensor,
        out_NC: Tensor,
        attn: Attn | None = None,
        rest: Rest | None = None,
    ) -> None:
        """Fills `out`, the chunk's rows of `kv`, and of `attn` and `rest` what is given."""
        q_NA = inp_NC.new_empty(len(inp_NC), self.width) if rest is None else rest.q_NA
        self._project(weights, inp_NC, kv, spans, cos_ND, sin_ND, q_NA)
        attn = self._room_for_attn(inp_NC) if attn is None else attn
        self._attend(q_NA, kv, spans, attn)
        resid_NC = out_NC if rest is None else rest.resid_NC  # unless it is kept, what comes next is added in place
        self.products.forward(attn.out_NA, weights.wo_CA, out=resid_NC, onto=inp_NC)
        del q_NA, attn
        h13_N2F = self._gate_and_up(weights, resid_NC, None if rest is None else rest.h13_N2F)
        act_NF = swiglu(h13_N2F, out=h13_N2F[:, : self.model.ffn] if rest is None else None)
        self.products.forward(act_NF, weights.w2_CF, out=out_NC, onto=resid_NC)

    def recompute(
        self,
        weights: BlockWeights,
        inp_NC: Tensor,
        kv: KeyValues,
        spans: Sequence[Span],
        cos_ND: Tensor,
        sin_ND: Tensor,
        attn: Attn,
        rest: Rest,
        attn_saved: bool,
    ) -> None:
        """Fills `rest` again, and `attn` unless it was saved. Keys and values are there already."""
        x_NC = rms_norm(inp_NC, weights.norm1_C, self.model.norm_eps)
        self.products.forward(x_NC, weights.wqkv_XC[: self.width], out=rest.q_NA)
        del x_NC
        rotate_in_place(self._heads(rest.q_NA), cos_ND, sin_ND)
        if not attn_saved:
            self._attend(rest.q_NA, kv, spans, attn)
        self.products.forward(attn.out_NA, weights.wo_CA, out=rest.resid_NC, onto=inp_NC)
        self._gate_and_up(weights, rest.resid_NC, rest.h13_N2F)

    def backward(
        self,
        weights: BlockWeights,
        grads: BlockWeights,
        fresh: bool,
        inp_NC: Tensor,
        kv: KeyValues,
        attn: Attn,
        rest: Rest,
        dkv: KeyValues | None,
        fresh_dkv: bool,
        spans: Sequence[Span],
        cos_ND: Tensor,
        sin_ND: Tensor,
        dstream_NC: Tensor,
    ) -> None:
        """`dstream` becomes the slope of `inp`; `grads` are set if fresh, otherwise added to. `rest` is used up.

        Chunks of a context are gone back through from the last to the first; `dkv` holds in fp32 what later ones
        found, and has no values yet where this is the last. A context of one chunk needs none.
        """
        self._mlp_backward(weights, grads, fresh, rest, dstream_NC)
        n, qkv = len(inp_NC), self.width + 2 * self.kv_width
        # The gate's and up's slopes are done with: what comes now lies in their memory.
        dout_NA, dqkv_NX, x_NC = _carved(rest.h13_N2F, (n, self.width), (n, qkv), (n, self.model.hidden))
        self.products.weight_gradient(dstream_NC, attn.out_NA, grads.wo_CA, fresh)
        self.products.input_gradient(dstream_NC, weights.wo_CA, out=dout_NA)
        self._attention_backward(dout_NA, kv, attn, rest, dkv, fresh_dkv, spans, dqkv_NX)
        turned = self._heads(dqkv_NX[:, : self.width + self.kv_width])
        rotate_in_place(turned, cos_ND, sin_ND, inverse=True)
        rms_norm(inp_NC, weights.norm1_C, self.model.norm_eps, out=x_NC)
        self._back_through_norm(dqkv_NX, x_NC, inp_NC, weights.wqkv_XC, weights.norm1_C, grads.wqkv_XC, grads.norm1_C,
                                fresh, dstream_NC)  # fmt: skip

    def _project(
        self,
        weights: BlockWeights,
        inp_NC: Tensor,
        kv: KeyValues,
        spans: Sequence[Span],
        cos_ND: Tensor,
        sin_ND: Tensor,
        q_NA: Tensor,
    ) -> None:
        """Queries, keys and values, each where it belongs: three products instead of one and three copies."""
        own = rows_of(spans)
        k_NW, v_NW = kv.k_TW[own], kv.v_TW[own]
        x_NC = rms_norm(inp_NC, weights.norm1_C, self.model.norm_eps)
        parts = weights.wqkv_XC.split((self.width, self.kv_width, self.kv_width))
        self.products.project(x_NC, parts, (q_NA, k_NW, v_NW))
        for x in (q_NA, k_NW):
            rotate_in_place(self._heads(x), cos_ND, sin_ND)

    def _attend(self, q_NA: Tensor, kv: KeyValues, spans: Sequence[Span], attn: Attn) -> None:
        q, k, v, out = (self._heads(x) for x in (q_NA, *kv, attn.out_NA))
        attend(q, k, v, spans, out, attn.lse_HN, self.scale, self.keys_at_once)

    def _gate_and_up(self, weights: BlockWeights, resid_NC: Tensor, out_N2F: Tensor | None) -> Tensor:
        x_NC = rms_norm(resid_NC, weights.norm2_C, self.model.norm_eps)
        return self.products.forward(x_NC, weights.w13_2FC, out=out_N2F)

    def _mlp_backward(
        self, weights: BlockWeights, grads: BlockWeights, fresh: bool, rest: Rest, dstream_NC: Tensor
    ) -> None:
        act_NF = self.products.input_gradient(dstream_NC, weights.w2_CF)  # the activation's slope, until the next line
        swiglu_backward(act_NF, rest.h13_N2F)
        self.products.weight_gradient(dstream_NC, act_NF, grads.w2_CF, fresh)
        del act_NF
        x_NC = rms_norm(rest.resid_NC, weights.norm2_C, self.model.norm_eps)
        self._back_through_norm(rest.h13_N2F, x_NC, rest.resid_NC, weights.w13_2FC, weights.norm2_C, grads.w13_2FC,
                                grads.norm2_C, fresh, dstream_NC)  # fmt: skip

    def _attention_backward(
        self,
        dout_NA: Tensor,
        kv: KeyValues,
        attn: Attn,
        rest: Rest,
        dkv: KeyValues | None,
        fresh_dkv: bool,
        spans: Sequence[Span],
        dqkv_NX: Tensor,
    ) -> None:
        """The slopes of queries, keys and values side by side, as the product with their weights wants them."""
        own = rows_of(spans)
        dout, q, out = (self._heads(x) for x in (dout_NA, rest.q_NA, attn.out_NA))
        widths = (self.width, self.kv_width, self.kv_width)
        dq, own_dk, own_dv = (self._heads(x) for x in dqkv_NX.split(widths, dim=1))
        alone = fresh_dkv and own.start == 0  # no other chunk has seen these keys: their slopes need not be added up
        if alone:
            k, v = (self._heads(x[own]) for x in kv)
            attend_backward(dout, q, k, v, out, attn.lse_HN, spans, dq, own_dk, own_dv, True, self.scale)
            return
        assert dkv is not None, "a context of several chunks has slopes of keys and values to be added up"
        (k, v), (dk, dv) = ([self._heads(x) for x in pair] for pair in (kv, dkv))
        attend_backward(dout, q, k, v, out, attn.lse_HN, spans, dq, dk, dv, fresh_dkv, self.scale, self.keys_at_once)
        own_dk.copy_(dk[own])
        own_dv.copy_(dv[own])

    def _back_through_norm(
        self,
        dy_NM: Tensor,
        x_NC: Tensor,
        before_NC: Tensor,
        weight_MC: Tensor,
        norm_C: Tensor,
        dweight_MC: Tensor,
        dnorm_C: Tensor,
        fresh: bool,
        dstream_NC: Tensor,
    ) -> None:
        """From a product's slope to the stream's, which it is added to. `x`, the normed stream, is used up."""
        self.products.weight_gradient(dy_NM, x_NC, dweight_MC, fresh)
        self.products.input_gradient(dy_NM, weight_MC, out=x_NC)
        rms_norm_backward(x_NC, before_NC, norm_C, self.model.norm_eps, dstream_NC, dstream_NC, dnorm_C, fresh)

    def _room_for_attn(self, inp_NC: Tensor) -> Attn:
        n, h = len(inp_NC), self.model.heads
        return Attn(inp_NC.new_empty(n, self.width), inp_NC.new_empty(h, n, dtype=torch.float32))

    def _heads(self, x_NA: Tensor) -> Tensor:
        """[N, H, D] over the same memory, D the whole width of a head."""
        return x_NA.unflatten(1, (-1, self.model.head_dim))


def _carved(memory: Tensor, *shapes: tuple[int, int]) -> list[Tensor]:
    """Tensors inside the memory of one that is done with; new ones where it is too small."""
    flat, found, first = memory.flatten(), [], 0
    for rows, width in shapes:
        size = rows * width
        if first + size <= flat.numel():
            found.append(flat[first : first + size].view(rows, width))
            first += aligned(size)
        else:
            found.append(memory.new_empty(rows, width))
    return found
