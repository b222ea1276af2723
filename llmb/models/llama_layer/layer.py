"""One layer of a Llama over one chunk of tokens, forward and back by hand, with every tensor that is kept named.

    block = Block(model, PlainLinears)
    block.forward(weights, inp_NC, kv, spans, cos_ND, sin_ND, out_NC, attn, rest)
    block.recompute(weights, inp_NC, kv, spans, cos_ND, sin_ND, attn, rest, attn_saved=True)
    block.backward(weights, grads, fresh, inp_NC, kv, attn, rest, dkv, fresh_dkv, spans, cos_ND, sin_ND, dstream_NC)

Autograd keeps what it likes as long as it likes; here the caller says what is kept: nothing but the input, keys and
values; the attention too; or all but the outputs of norms and of the gated activation; or these as well. Keys and
values are those of the chunk's whole context, of which its own rows are written on the way there. Cosine and sine are
fp32, those of each token's place in its document. What is allocated in between is counted in `workspace.py`.

Shapes as in `layer_tensors.py`; D half the width of a head.
"""

from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from llmb.config.llama_layer_shapes import aligned, check_plain_llama
from llmb.config.spec import Model
from llmb.models.llama_layer.layer_tensors import Attn, BlockWeights, Inputs, KeyValues, Rest
from llmb.models.llama_layer.linears import Linears, LinearsOf, Weights
from llmb.ops.attention.segment_attention import KEYS_AT_ONCE, Span, attend, attend_backward, rows_of, squares_backward
from llmb.ops.rope.rope import rotate_in_place, rotate_into

WORD = torch.int64


class Block(Generic[Weights]):
    """The layer's arithmetic; weights come with each call, in the form that its linear layers take.

    Fewer keys at once: less memory on the way back.
    """

    def __init__(self, model: Model, linears: LinearsOf[Weights], keys_at_once: int = KEYS_AT_ONCE):
        check_plain_llama(model)
        self.keys_at_once = keys_at_once
        self.model, self.linears = model, linears
        self.width, self.kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.scale = model.head_dim**-0.5

    def forward(
        self,
        weights: Weights,
        inp_NC: Tensor,
        kv: KeyValues,
        spans: Sequence[Span],
        cos_ND: Tensor,
        sin_ND: Tensor,
        out_NC: Tensor,
        attn: Attn | None = None,
        rest: Rest | None = None,
        inputs: Inputs | None = None,
        gives_attn: bool = False,
    ) -> Attn | None:
        """Fills `out`, the chunk's rows of `kv`, and of `attn`, `rest` and `inputs` what is given.

        The attention is given back where that is asked for: as its kernel made it, unless there was memory for it.
        """
        linears = self.linears(self.model, weights, inputs)
        q_NA = inp_NC.new_empty(len(inp_NC), self.width) if rest is None else rest.q_NA
        self._project(linears, inp_NC, kv, spans, cos_ND, sin_ND, q_NA)
        attn = self._attend(q_NA, kv, spans, attn)
        resid_NC = out_NC if rest is None else rest.resid_NC  # unless it is kept, what comes next is added in place
        linears.output(attn.out_NA, inp_NC, resid_NC)
        attn = attn if gives_attn else None
        del q_NA
        h13_N2F = inp_NC.new_empty(len(inp_NC), 2 * self.model.ffn) if rest is None else rest.h13_N2F
        linears.gate_and_up(resid_NC, h13_N2F)
        linears.down(h13_N2F, resid_NC, out_NC, keep=rest is not None)
        return attn

    def recompute(
        self,
        weights: Weights,
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
        linears = self.linears(self.model, weights)
        linears.project(inp_NC, (rest.q_NA,))
        rotate_in_place(self._heads(rest.q_NA), cos_ND, sin_ND)
        if not attn_saved:
            self._attend(rest.q_NA, kv, spans, attn)
        linears.output(attn.out_NA, inp_NC, rest.resid_NC)
        linears.gate_and_up(rest.resid_NC, rest.h13_N2F)

    def backward(
        self,
        weights: Weights,
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
        out_NC: Tensor | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """`out`, or `dstream`, becomes the slope of `inp`; `grads` are set if fresh, otherwise added to. `rest` and
        `inputs` are used up.

        Chunks of a context are gone back through from the last to the first; `dkv` holds in fp32 what later ones
        found, and has no values yet where this is the last. A context of one chunk needs none.
        """
        out_NC = dstream_NC if out_NC is None else out_NC
        linears = self.linears(self.model, weights, inputs)
        linears.mlp_backward(grads, fresh, rest, dstream_NC, out_NC)
        n, qkv = len(inp_NC), self.width + 2 * self.kv_width
        # The gate's and up's slopes are done with: what comes now lies in their memory.
        dout_NA, dqkv_NX, room_NC = _carved(rest.h13_N2F, (n, self.width), (n, qkv), (n, self.model.hidden))
        linears.output_backward(grads, fresh, attn.out_NA, out_NC, dout_NA)
        self._attention_backward(dout_NA, kv, attn, rest, dkv, fresh_dkv, spans, cos_ND, sin_ND, dqkv_NX)
        linears.project_backward(grads, fresh, dqkv_NX, inp_NC, out_NC, room_NC)

    def _project(
        self,
        linears: Linears,
        inp_NC: Tensor,
        kv: KeyValues,
        spans: Sequence[Span],
        cos_ND: Tensor,
        sin_ND: Tensor,
        q_NA: Tensor,
    ) -> None:
        """Queries, keys and values, each where it belongs."""
        own = rows_of(spans)
        k_NW, v_NW = kv.k_TW[own], kv.v_TW[own]
        linears.project(inp_NC, (q_NA, k_NW, v_NW))
        for x in (q_NA, k_NW):
            rotate_in_place(self._heads(x), cos_ND, sin_ND)

    def _attend(self, q_NA: Tensor, kv: KeyValues, spans: Sequence[Span], attn: Attn | None) -> Attn:
        q, k, v = (self._heads(x) for x in (q_NA, *kv))
        into = None if attn is None else (self._heads(attn.out_NA), attn.lse_HN)
        out, lse_HN = attend(q, k, v, spans, self.scale, self.keys_at_once, into)
        return Attn(out.flatten(1), lse_HN)

    def _attention_backward(
        self,
        dout_NA: Tensor,
        kv: KeyValues,
        attn: Attn,
        rest: Rest,
        dkv: KeyValues | None,
        fresh_dkv: bool,
        spans: Sequence[Span],
        cos_ND: Tensor,
        sin_ND: Tensor,
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
            turned_dq, turned_dk, made_dv = squares_backward(dout, q, k, v, out, attn.lse_HN, spans, self.scale)
            rotate_into(dq, turned_dq, cos_ND, sin_ND, inverse=True)
            rotate_into(own_dk, turned_dk, cos_ND, sin_ND, inverse=True)
            _copy(own_dv, made_dv)
            return
        assert dkv is not None, "a context of several chunks has slopes of keys and values to be added up"
        (k, v), (dk, dv) = ([self._heads(x) for x in pair] for pair in (kv, dkv))
        attend_backward(dout, q, k, v, out, attn.lse_HN, spans, dq, dk, dv, fresh_dkv, self.scale, self.keys_at_once)
        rotate_in_place(dq, cos_ND, sin_ND, inverse=True)
        rotate_into(own_dk, dk[own], cos_ND, sin_ND, inverse=True)
        own_dv.copy_(dv[own])

    def _heads(self, x_NA: Tensor) -> Tensor:
        """[N, H, D] over the same memory, D the whole width of a head."""
        return x_NA.unflatten(1, (-1, self.model.head_dim))


def _copy(into_NHD: Tensor, x_NHD: Tensor) -> None:
    """In words of 8 bytes: torch copies what does not lie in one piece number by number, at a third of the speed."""
    if into_NHD.dtype == x_NHD.dtype and x_NHD.shape[-1] * x_NHD.element_size() % WORD.itemsize == 0:
        into_NHD, x_NHD = into_NHD.view(WORD), x_NHD.view(WORD)
    into_NHD.copy_(x_NHD)


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
