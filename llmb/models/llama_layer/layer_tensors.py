"""The tensors of a Llama layer, by name.

Shapes: N tokens of a chunk, S of them in the residual of a tensor-parallel rank (all on one rank), T tokens of a
context, C hidden size; and of this rank: A width of all query heads, W of all KV heads, H heads, F width of the MLP.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor

# Inputs of linear layers by name, in the layout that their weight gradients take; missing ones are recomputed.
SavedInputs = dict[str, Any]
Block = Literal["attn", "mlp"]  # of a layer: each adds its output to the residual


class LayerWeights(NamedTuple):
    """Weights of one layer, or their gradients; linear layers are x @ weight.T.

    With LoRA matrices are `AdaptedWeight`s, their gradients `Adapter`s, and gradients of vectors None.
    """

    wqkv_XC: Tensor  # X: A for the queries, W for the keys, W for the values
    wo_CA: Tensor
    w13_2FC: Tensor  # gate, then up
    w2_CF: Tensor
    norm1_C: Tensor
    norm2_C: Tensor
    bqkv_X: Tensor | None = None
    q_norm_D: Tensor | None = None  # of each head
    k_norm_D: Tensor | None = None
    post_norm1_C: Tensor | None = None  # of what attention adds to the residual
    post_norm2_C: Tensor | None = None  # of what the MLP adds

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.wqkv_XC, self.wo_CA, self.w13_2FC, self.w2_CF

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """Those that the layer has, in order."""
        return tuple(vector for vector in self[4:] if vector is not None)

    def post_norm(self, block: Block) -> Tensor | None:
        """Return the norm of a block's output, if it has any."""
        return self.post_norm1_C if block == "attn" else self.post_norm2_C


class KeyValues(NamedTuple):
    """Keys (after RoPE) and values of a context in one layer, or their gradients."""

    k_TW: Tensor
    v_TW: Tensor


class AttentionOutput(NamedTuple):
    """Attention output of a chunk and its log-sum-exps."""

    out_NA: Tensor
    lse_HN: Tensor  # fp32


class SavedActivations(NamedTuple):
    """Other activations of a chunk that the backward pass needs."""

    q_NA: Tensor  # after RoPE; before their norms, if queries have any
    residual_SC: Tensor  # after the attention
    gate_up_N2F: Tensor  # gate, then up
    k_NW: Tensor | None = None  # keys before their norms, if they have any
    attn_SC: Tensor | None = None  # what attention adds to the residual, before its norm, if it has any
    mlp_SC: Tensor | None = None  # what the MLP adds, likewise

    def output(self, block: Block) -> Tensor | None:
        """Return what a post-norm takes, if there is any."""
        return self.attn_SC if block == "attn" else self.mlp_SC
