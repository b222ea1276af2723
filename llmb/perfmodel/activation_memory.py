"""Bytes that the native engine's blocks save for backward on one rank, and their working memory.

Inside a block a rank has all tokens of its sequence chunk; of the residual between blocks only its share among the tp
ranks (sequence parallelism). A GEMM saves its input: in the dtype of the residual, or in fp8 one byte per value. Fused
attention saves q, k, v, its output and the fp32 logsumexp of each query and head.
"""

from dataclasses import dataclass
from functools import cached_property

from llmb.config.spec import Model, Parallel, RunConfig, Training
from llmb.perfmodel.params import BYTES
from llmb.perfmodel.shards import gradient_bytes, is_fused, is_sharded, layer_blocks, layer_weights

CHUNK_TOKENS, VOCAB_PARALLEL_CHUNK_TOKENS = 8192, 2048  # of the chunked loss: the full logits never exist


@dataclass(frozen=True)
class ActivationSizes:
    """Sizes of one micro-batch on one rank, in bytes."""

    config: RunConfig

    @property
    def work(self) -> Training:
        assert isinstance(self.config.workload, Training)
        return self.config.workload

    @property
    def model(self) -> Model:
        return self.config.model

    @property
    def parallel(self) -> Parallel:
        return self.config.parallel

    @cached_property
    def value_bytes(self) -> float:
        """Bytes per value of the residual."""
        return BYTES["fp32" if self.config.precision.dtype == "fp32" else "bf16"]

    @property
    def is_fp8(self) -> bool:
        """Return whether the GEMMs of the layers are fp8."""
        return self.config.precision.dtype == "fp8"

    @cached_property
    def gemm_bytes(self) -> float:
        """Bytes per saved value of a GEMM's input."""
        return BYTES["fp8"] if self.is_fp8 else self.value_bytes

    @cached_property
    def expert_gemm_bytes(self) -> float:
        """The same of a routed expert's GEMM."""
        return self.value_bytes if self.work.fp8_experts is False else self.gemm_bytes

    @cached_property
    def tokens(self) -> float:
        """Tokens of this rank inside a block."""
        return self.work.mbs * self.work.seqlen / self.parallel.cp

    @cached_property
    def residual(self) -> float:
        """Bytes of the residual between blocks."""
        return self.tokens / self.parallel.tp * self.model.hidden * self.value_bytes

    def layer(self, layer: int) -> float:
        """Return the bytes that a layer saves."""
        if is_fused(self.config):
            return self._fused_layer()
        return sum(self.block(kind) for kind in layer_blocks(self.model, layer))

    @property
    def recomputed_layer(self) -> float:
        """Bytes that a recomputed layer saves: its input, and of a fused one also K, V and the attention output."""
        if not is_fused(self.config):
            return self.residual
        m = self.model
        values = m.hidden + (m.heads + 2 * m.kv_heads) * m.head_dim
        rope = 4 * m.head_dim if self.work.mbs > 1 else 0  # one table for all sequences
        return self.tokens * (values * self.value_bytes + 4 * m.heads + rope)

    def _fused_layer(self) -> float:
        """Also queries, the residual after attention, gate and up, and GEMM inputs with `save_norm_outputs`."""
        m, width = self.model, self.model.heads * self.model.head_dim
        saved = self.tokens * (width + m.hidden + 2 * m.ffn) * self.value_bytes
        if self.work.save_norm_outputs:  # in fp8 the attention output by columns instead of the MLP activation
            values = 2 * m.hidden + (m.ffn if self.gemm_bytes == self.value_bytes else width)
            saved += self.tokens * values * self.gemm_bytes
        return self.recomputed_layer + saved

    def block(self, kind: str) -> float:
        """Return the bytes that a block saves, including the norms before and after it."""
        norms = self.residual * (2 if self.model.post_norms else 1)  # each saves its input
        return (
            norms
            + {
                "attention": self._attention,
                "mla": self._mla,
                "mlp": self._mlp,
                "experts": self._moe,
                "mamba": self._mamba,
            }[kind]()
        )

    def _gathered(self) -> float:
        """Normed residual of all tp ranks, as the first GEMMs save it."""
        return self.tokens * self.model.hidden * self.gemm_bytes

    def _attention(self) -> float:
        m, tp = self.model, self.parallel.tp
        width, kv_width = m.heads * m.head_dim / tp, m.kv_heads * m.head_dim / tp
        rope = 2 * self.work.seqlen / self.parallel.cp * m.head_dim * self.value_bytes if m.rope else 0.0
        return self._gathered() + rope + self._fused_attention(width, 2 * kv_width, width, m.heads / tp)

    def _fused_attention(self, query: float, key_value: float, out: float, heads: float) -> float:
        """Fused attention and the input of the output projection; keys and values are those of the whole sequence."""
        all_tokens = self.work.mbs * self.work.seqlen
        copied = self.gemm_bytes != self.value_bytes or self.parallel.cp > 1  # else both save the same tensor
        saved = self.tokens * (query + out) * self.value_bytes + all_tokens * key_value * self.value_bytes
        return saved + self.tokens * (4 * heads + out * self.gemm_bytes * copied)

    def _mla(self) -> float:
        assert self.model.mla is not None
        ranks, tp, heads = self.model.mla, self.parallel.tp, self.model.heads / self.parallel.tp
        key, latent = ranks.nope_dim + ranks.rope_dim, ranks.q_rank + ranks.kv_rank
        down = self.tokens / tp * (self.model.hidden * self.gemm_bytes + ranks.q_rank * self.value_bytes)
        latents = self.tokens * (latent * self.gemm_bytes + (ranks.kv_rank + ranks.rope_dim) * self.value_bytes)
        value = ranks.nope_dim + ranks.value_dim  # a view into the output of kv_up
        attention = self._fused_attention(heads * key, heads * (key + value), heads * ranks.value_dim, heads)
        return down + latents + attention

    def _mlp(self) -> float:
        if self.model.gated:
            return self._gathered() + self._gated_mlp(self.model.ffn / self.parallel.tp)
        values = self.model.ffn / self.parallel.tp * (self.value_bytes + self.gemm_bytes)
        return self._gathered() + self.tokens * values

    def _gated_mlp(self, ffn: float) -> float:
        """In bf16 gate and up only: silu(gate) * up is recomputed."""
        if self.config.precision.dtype == "bf16" and self.model.activation == "silu":
            return self.tokens * ffn * 2 * self.value_bytes
        return self._gated(self.tokens, ffn, self.gemm_bytes)

    def _gated(self, rows: float, ffn: float, gemm_bytes: float) -> float:
        """Gate and up, and the input of the down projection."""
        return rows * ffn * (2 * self.value_bytes + gemm_bytes)

    def _moe(self) -> float:
        """With balanced routing: router input, scores and weights; expert inputs, inner values and outputs."""
        assert self.model.experts is not None
        moe, parallel, hidden = self.model.experts, self.parallel, self.model.hidden
        tokens = self.tokens / parallel.tp
        pairs, weights = tokens * moe.top_k, 8.0 if moe.renormalise else 4.0
        received = pairs * parallel.etp
        saved = tokens * (hidden * self.value_bytes + 4 * moe.count + (4 if moe.renormalise else 0))  # and weight sum
        saved += pairs * (hidden * self.value_bytes + 8 + 4 + weights)  # expert id and row index
        saved += received * (hidden * self.expert_gemm_bytes + (4 if parallel.ep * parallel.etp > 1 else 0))
        if moe.shared:
            saved += self._gated_mlp(moe.shared * moe.ffn / parallel.tp)
            saved += self._gathered() if self.gemm_bytes != self.value_bytes or parallel.tp > 1 else 0
        return saved + self._gated(received, moe.ffn / parallel.etp, self.expert_gemm_bytes)

    def _mamba(self) -> float:
        assert self.model.mamba is not None
        m, tp = self.model.mamba, self.parallel.tp
        inner, conv = m.heads * m.head_dim / tp, (m.heads * m.head_dim + 2 * m.groups * m.state) / tp
        heads = m.heads / tp
        values = inner + conv + heads + conv + inner  # input projection, convolution output, scan output
        return self._gathered() + self.tokens * (values * self.value_bytes + inner * self.gemm_bytes + 12 * heads)

    def working(self, layer: int, forward: bool, accumulated: bool = False) -> float:
        """Return about the most that a layer needs while it runs, besides what it saves.

        A few of its widest activations; in backward also the fp32 gradient of its largest matrix. The gradient of a
        weight that is not gathered is computed in the dtype of the residual first, when most of those activations are
        freed. `accumulated`: there are gradients of an earlier micro-batch, to which GEMMs of routed experts may add.
        """
        weights = [weight.on_rank(self.parallel) for weight in layer_weights(self.model, layer)]
        if is_fused(self.config):
            return self._fused_working(forward)
        matrices = [weight for weight in weights if len(weight.shape) > 1 and not weight.replicated]
        widest = max(self.model.hidden, *(weight.shape[-2] for weight in matrices))
        activation = self.tokens * widest * self.value_bytes
        if forward:
            return 4 * activation
        in_place, grad_bytes = accumulated and self._accumulates_in_place, gradient_bytes(self.config)
        gradient = grad_bytes * max(weight.size for weight in weights if not (in_place and weight.routed))
        return max(3 * activation + gradient, activation + self._cast_gradient(layer, in_place))

    def _fused_working(self, forward: bool) -> float:
        """Output of the MLP's activation; in fp8 backward its gradient in both layouts."""
        if forward or self.gemm_bytes == self.value_bytes:
            return self.tokens * (self.model.ffn * self.value_bytes + 3 * self.model.hidden * self.value_bytes)
        return self.tokens * (7 * self.model.ffn + 6 * self.model.hidden)

    @property
    def _accumulates_in_place(self) -> bool:
        """Whether GEMMs of experts add to the gradient in memory: only where it is not a shard of a larger one."""
        return self.parallel.dp_cp_size == self.parallel.tp == 1

    def _cast_gradient(self, layer: int, in_place: bool) -> float:
        """Gradient of the largest weight that is not gathered, in both dtypes, or only the residual's if in place."""
        local = [weight for weight in layer_weights(self.model, layer) if not is_sharded(weight, self.parallel)]
        grad_bytes = gradient_bytes(self.config)
        second_copy = 0.0 if in_place or self.value_bytes == grad_bytes else grad_bytes
        largest = max((weight.on_rank(self.parallel).size for weight in local), default=0)
        return (self.value_bytes + second_copy) * largest

    @property
    def loss(self) -> float:
        """Bytes that the loss saves: the input of the final norm and both gradients, which it computes in forward."""
        gradient = BYTES[self.work.gradients] * self.head
        return self.residual + self.tokens * self.model.hidden * self.value_bytes + gradient

    @property
    def head(self) -> float:
        """Number of weights of the LM head on this rank."""
        return self.model.vocab / self.parallel.tp * self.model.hidden

    def loss_working(self, cast: bool) -> float:
        """Return the working memory of the loss: the LM head cast to the residual's dtype, the input, a chunk's logits.

        Logits are replaced by their gradients in place. With a vocabulary split over tp they are fp32, and so are their
        exponentials.
        """
        at_once = CHUNK_TOKENS if self.parallel.tp == 1 else VOCAB_PARALLEL_CHUNK_TOKENS
        chunk = min(at_once, self.tokens) * self.model.vocab / self.parallel.tp
        logits, local = (8 * chunk, self.residual) if self.parallel.tp > 1 else (self.value_bytes * chunk, 0.0)
        gathered = self.tokens * self.model.hidden * self.value_bytes
        return logits + gathered + local + (self.value_bytes * self.head if cast and self.value_bytes < 4 else 0.0)
