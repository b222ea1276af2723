"""One Llama layer over one sequence chunk, with explicit forward and backward and named saved activations.

    layer = LlamaLayer(model, PlainLinears)
    layer.forward(weights, input_SC, kv, segments, cos_ND, sin_ND, out_SC, attn, saved)
    layer.recompute(weights, input_SC, kv, segments, cos_ND, sin_ND, attn, saved, attn_saved=True)
    layer.backward(weights, grads, accumulate, input_SC, kv, attn, saved, dkv, accumulate_dkv, segments, cos_ND, sin_ND,
                   d_residual_SC)

Autograd decides by itself what it saves and for how long; here the caller does: nothing but the input, keys and values;
the attention too; or all but the outputs of norms and of the activation; or these as well. Keys and values are those of
the chunk's whole context, of which the forward pass writes the chunk's rows. Queries, keys and values that are columns
of one matrix, side by side, take one GEMM and one pass of RoPE. Cosine and sine are fp32, of each token's position in
its document. Allocations in between are counted in `llmb/perfmodel/offload/workspace.py`.

On several ranks `model` has this rank's heads and channels (`linears.py`), and with context parallelism a chunk is the
rank's tokens, a segment those of one sequence: keys and values of all ranks are gathered after RoPE.

Shapes as in `layer_tensors.py`; D half of head_dim.
"""

from collections.abc import Sequence
from typing import Generic

from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import aligned, check_llama_layers
from llmb.models.blocks import attention_window
from llmb.models.llama_layer.head_norms import add_bias_, bias_backward, norm_heads, norm_heads_backward_
from llmb.models.llama_layer.layer_collectives import ContextParallel, TensorParallel
from llmb.models.llama_layer.layer_tensors import (
    AttentionOutput,
    KeyValues,
    LayerWeights,
    SavedActivations,
    SavedInputs,
)
from llmb.models.llama_layer.linears import LayerLinears, LinearsFactory, Weights
from llmb.ops.attention.segment_attention import (
    KEY_BLOCK,
    Segment,
    causal_backward,
    chunk_rows,
    segment_attention_backward,
    segment_attention_forward,
)
from llmb.ops.rope.rope import apply_rope_, qkv_rope_backward
from llmb.ops.tensor_layout import merge_columns


class LlamaLayer(Generic[Weights]):
    """Arithmetic of the layer; weights come with each call, in the format that its linears take.

    A smaller key block takes less memory in the backward pass. `kind` is a letter of the model's attention pattern: a
    layer without RoPE takes cosine and sine all the same, and leaves them alone.
    """

    def __init__(
        self,
        model: Model,
        linears: LinearsFactory[Weights],
        key_block: int = KEY_BLOCK,
        tp: TensorParallel | None = None,
        cp: ContextParallel | None = None,
        kind: str = "F",
    ):
        check_llama_layers(model)
        self.window, self.has_rope = attention_window(model, kind), kind != "N"
        self.key_block, self.tp, self.cp = key_block, tp, cp
        self.model, self.linears = model, linears
        self.width, self.kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.qkv_widths = self.width, self.kv_width, self.kv_width
        self.scale, self.softcap = model.softmax_scale, model.attn_logit_softcap

    def forward(
        self,
        weights: Weights,
        input_SC: Tensor,
        kv: KeyValues,
        segments: Sequence[Segment],
        cos_ND: Tensor,
        sin_ND: Tensor,
        out_SC: Tensor,
        attn: AttentionOutput | None = None,
        saved: SavedActivations | None = None,
        inputs: SavedInputs | None = None,
        return_attn: bool = False,
    ) -> tuple[AttentionOutput, KeyValues] | None:
        """Fill `out`, the chunk's rows of `kv`, and those of `attn`, `saved` and `inputs` that are given.

        With `return_attn` returns the attention, newly allocated unless `attn` was given, and the keys and values that
        `backward` takes: `kv`, or with context parallelism those of all ranks.
        """
        linears = self.linears(self.model, weights, inputs, self.tp)
        q_NA = input_SC.new_empty(len(cos_ND), self.width) if saved is None else saved.q_NA
        q_NA = self._qkv(linears, input_SC, kv, segments, cos_ND, sin_ND, q_NA, saved)
        attn, kv = self._attend(q_NA, kv, segments, attn)
        residual_SC = out_SC if saved is None else saved.residual_SC  # unless saved, the MLP adds in place
        linears.o_proj(attn.out_NA, input_SC, residual_SC, saved)
        returned = (attn, kv) if return_attn else None
        del q_NA, attn
        gate_up_N2F = input_SC.new_empty(len(cos_ND), 2 * self.model.ffn) if saved is None else saved.gate_up_N2F
        linears.gate_up_proj(residual_SC, gate_up_N2F)
        linears.down_proj(gate_up_N2F, residual_SC, out_SC, saved)
        return returned

    def recompute(
        self,
        weights: Weights,
        input_SC: Tensor,
        kv: KeyValues,
        segments: Sequence[Segment],
        cos_ND: Tensor,
        sin_ND: Tensor,
        attn: AttentionOutput,
        saved: SavedActivations,
        attn_saved: bool,
    ) -> None:
        """Fill `saved` again, and `attn` unless it was saved. Keys and values are available."""
        linears = self.linears(self.model, weights, None, self.tp)
        outs = (saved.q_NA,) if saved.k_NW is None else (saved.q_NA, saved.k_NW)
        linears.qkv_proj(input_SC, outs)
        if linears.vectors.bqkv_X is not None:
            add_bias_(linears.vectors.bqkv_X, outs)
        if saved.k_NW is None and self.has_rope:
            apply_rope_(self._heads(saved.q_NA), cos_ND, sin_ND)
        if not attn_saved:
            self._attend(self._queries(linears, saved, cos_ND, sin_ND), kv, segments, attn)
        linears.o_proj(attn.out_NA, input_SC, saved.residual_SC, saved)
        linears.gate_up_proj(saved.residual_SC, saved.gate_up_N2F)
        if saved.mlp_SC is not None:
            linears.recompute_mlp(saved)

    def backward(
        self,
        weights: Weights,
        grads: LayerWeights,
        accumulate: bool,
        input_SC: Tensor,
        kv: KeyValues,
        attn: AttentionOutput,
        saved: SavedActivations,
        dkv: KeyValues | None,
        accumulate_dkv: bool,
        segments: Sequence[Segment],
        cos_ND: Tensor,
        sin_ND: Tensor,
        d_residual_SC: Tensor,
        out_SC: Tensor | None = None,
        inputs: SavedInputs | None = None,
    ) -> None:
        """Set `out`, or `d_residual`, to the gradient of `input`, and set or accumulate `grads`.

        `saved` and `inputs` are overwritten. Chunks of a context go backward from the last to the first; `dkv` holds in
        fp32 the gradients from later ones, and is set by the last. A context of one chunk needs none.
        """
        out_SC = d_residual_SC if out_SC is None else out_SC
        linears = self.linears(self.model, weights, inputs, self.tp)
        linears.mlp_backward(grads, accumulate, saved, d_residual_SC, out_SC)
        n, qkv = len(cos_ND), sum(self.qkv_widths)
        # The gradients of gate and up are no longer needed: their memory is reused.
        dout_NA, dqkv_NX, workspace_NC = _carve(saved.gate_up_N2F, (n, self.width), (n, qkv), (n, self.model.hidden))
        linears.o_proj_backward(grads, accumulate, attn.out_NA, saved, out_SC, dout_NA)
        q_NA = self._queries(linears, saved, cos_ND, sin_ND)
        self._attention_backward(dout_NA, kv, attn, q_NA, dkv, accumulate_dkv, segments, cos_ND, sin_ND, dqkv_NX)
        del q_NA
        self._vectors_backward(linears.vectors, grads, accumulate, saved, dqkv_NX)
        linears.qkv_proj_backward(grads, accumulate, dqkv_NX, input_SC, out_SC, workspace_NC)

    def _qkv(
        self,
        linears: LayerLinears,
        input_SC: Tensor,
        kv: KeyValues,
        segments: Sequence[Segment],
        cos_ND: Tensor,
        sin_ND: Tensor,
        q_NA: Tensor,
        saved: SavedActivations | None,
    ) -> Tensor:
        """Write queries, keys and values into their buffers; return the queries that attention takes."""
        rows, vectors = chunk_rows(segments), linears.vectors
        k_NW, v_NW = kv.k_TW[rows], kv.v_TW[rows]
        projected_k_NW = k_NW if saved is None or saved.k_NW is None else saved.k_NW
        linears.qkv_proj(input_SC, (q_NA, projected_k_NW, v_NW))
        if vectors.bqkv_X is not None:
            add_bias_(vectors.bqkv_X, (q_NA, projected_k_NW, v_NW))
        if vectors.q_norm_D is not None and vectors.k_norm_D is not None:
            eps = self.model.norm_eps
            q_NA = norm_heads(q_NA, vectors.q_norm_D, eps, out=q_NA if saved is None else None)
            norm_heads(projected_k_NW, vectors.k_norm_D, eps, out=k_NW)
        for x in merge_columns((q_NA, k_NW)) if self.has_rope else ():
            apply_rope_(self._heads(x), cos_ND, sin_ND)
        return q_NA

    def _queries(self, linears: LayerLinears, saved: SavedActivations, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
        """Return the queries that attention takes, given what is saved of them."""
        if linears.vectors.q_norm_D is None:
            return saved.q_NA
        q_NA = norm_heads(saved.q_NA, linears.vectors.q_norm_D, self.model.norm_eps)
        if self.has_rope:
            apply_rope_(self._heads(q_NA), cos_ND, sin_ND)
        return q_NA

    def _attend(
        self, q_NA: Tensor, kv: KeyValues, segments: Sequence[Segment], attn: AttentionOutput | None
    ) -> tuple[AttentionOutput, KeyValues]:
        """Return the attention, and the keys and values that its backward pass takes."""
        q, chunk_kv, context_kv = self._heads(q_NA), *self._chunk_and_context(kv, segments)
        if self.cp is not None:
            assert attn is None, "attention over several ranks is not recomputed"
            out, lse_HN, *context = self.cp.attention_forward(
                q, *chunk_kv, len(segments), self.scale, self.key_block, self.window, self.softcap
            )
            return AttentionOutput(out.flatten(1), lse_HN), KeyValues(*(x.flatten(1) for x in context))
        buffers = None if attn is None else (self._heads(attn.out_NA), attn.lse_HN)
        out, lse_HN = segment_attention_forward(
            q, *chunk_kv, *context_kv, segments, self.scale, self.key_block, buffers, self.window, self.softcap
        )
        return AttentionOutput(out.flatten(1), lse_HN), kv

    def _attention_backward(
        self,
        dout_NA: Tensor,
        kv: KeyValues,
        attn: AttentionOutput,
        q_NA: Tensor,
        dkv: KeyValues | None,
        accumulate_dkv: bool,
        segments: Sequence[Segment],
        cos_ND: Tensor,
        sin_ND: Tensor,
        dqkv_NX: Tensor,
    ) -> None:
        """Write the gradients of queries, keys and values side by side, as the projection takes them."""
        dout, q, out = (self._heads(x) for x in (dout_NA, q_NA, attn.out_NA))
        (k, v), (chunk_kv, context_kv) = map(self._heads, kv), self._chunk_and_context(kv, segments)
        # No other chunk of this rank sees these keys: nothing to accumulate.
        if self.cp is not None or (not accumulate_dkv and chunk_rows(segments).start == 0):
            if self.cp is None:
                dq, dk, dv = causal_backward(
                    dout, q, *chunk_kv, out, attn.lse_HN, segments, self.scale, self.window, self.softcap
                )
            else:
                dq, dk, dv = self.cp.attention_backward(
                    dout, q, k, v, out, attn.lse_HN, len(segments), self.scale, self.key_block, self.window,
                    self.softcap,
                )  # fmt: skip
        else:
            assert dkv is not None, "a context of several chunks accumulates gradients of keys and values"
            dq = self._heads(dqkv_NX[:, : self.width])
            (dk, dv), context_dkv = self._chunk_and_context(dkv, segments)
            segment_attention_backward(
                dout, q, *chunk_kv, *context_kv, out, attn.lse_HN, segments, dq, dk, dv, *context_dkv, accumulate_dkv,
                self.scale, self.key_block, self.window, self.softcap,
            )  # fmt: skip
        tables = (cos_ND, sin_ND) if self.has_rope else (None, None)
        qkv_rope_backward(dqkv_NX, dq, dk, dv, *tables)

    def _vectors_backward(
        self, vectors: LayerWeights, grads: LayerWeights, accumulate: bool, saved: SavedActivations, dqkv_NX: Tensor
    ) -> None:
        """Take the gradients of queries, keys and values through their norms, and set or add to those of vectors."""
        if vectors.q_norm_D is not None and vectors.k_norm_D is not None:
            assert saved.k_NW is not None
            dq_NA, dk_NW, _ = dqkv_NX.split(self.qkv_widths, dim=1)
            eps = self.model.norm_eps
            norm_heads_backward_(dq_NA, saved.q_NA, vectors.q_norm_D, eps, grads.q_norm_D, accumulate)
            norm_heads_backward_(dk_NW, saved.k_NW, vectors.k_norm_D, eps, grads.k_norm_D, accumulate)
        if grads.bqkv_X is not None:
            bias_backward(dqkv_NX, grads.bqkv_X, accumulate)

    def _chunk_and_context(self, kv: KeyValues, segments: Sequence[Segment]) -> tuple[KeyValues, KeyValues]:
        """View keys and values, or their gradients, of the chunk and of what precedes it as [N, heads, head_dim]."""
        rows = chunk_rows(segments)
        k, v = (self._heads(x) for x in kv)
        return KeyValues(k[rows], v[rows]), KeyValues(k[: rows.start], v[: rows.start])

    def _heads(self, x_NA: Tensor) -> Tensor:
        """View as [N, heads, head_dim]."""
        return x_NA.unflatten(1, (-1, self.model.head_dim))


def _carve(buffer: Tensor, *shapes: tuple[int, int]) -> list[Tensor]:
    """Return tensors inside the memory of a buffer; new ones where it is too small."""
    flat, tensors, offset = buffer.flatten(), [], 0
    for rows, width in shapes:
        size = rows * width
        if offset + size <= flat.numel():
            tensors.append(flat[offset : offset + size].view(rows, width))
            offset += aligned(size)
        else:
            tensors.append(buffer.new_empty(rows, width))
    return tensors
