"""Bytes that the native engine's blocks save for backward on one rank, and their working memory.

Inside a block a rank has all tokens of its sequence chunk; of the residual between blocks only its share among the tp
ranks (sequence parallelism). A GEMM saves its input: in the dtype of the residual, or in fp8 one byte per value. Fused
attention saves q, k, v, its output and the fp32 logsumexp of each query and head.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from llmb.config.model import Model
from llmb.config.spec import Parallel, RunConfig, Training
from llmb.perfmodel.expert_capacity import dispatched_rows
from llmb.perfmodel.params import BYTES, FP8_ALIGNMENT, FP8_BLOCK
from llmb.perfmodel.shards import Weight, has_explicit_layers, layer_blocks, layer_weights, weight_buckets

CHUNK_TOKENS = 8192  # of the chunked loss: the full logits never exist


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

    @property
    def has_many_scales(self) -> bool:
        """Return whether the fp8 operands of explicit layers have a scale per row or per 128 values."""
        return self.is_fp8 and self.config.precision.fp8_recipe in ("rowwise", "blockwise")

    @cached_property
    def gemm_bytes(self) -> float:
        """Bytes per saved value of a GEMM's input; with a scale per 128 values these count, too."""
        if self.is_fp8 and self.config.precision.fp8_recipe == "blockwise":
            return BYTES["fp8"] + BYTES["fp32"] / FP8_BLOCK
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
        if has_explicit_layers(self.config):
            return self._explicit_layer()
        return sum(self.block(kind) for kind in layer_blocks(self.model, layer))

    @property
    def recomputed_layer(self) -> float:
        """Bytes that a recomputed layer saves: its input, and of an explicit one also K, V and the attention output."""
        if not has_explicit_layers(self.config):
            return self.residual
        m, width, kv_width, _ = self.model, *self._local_widths
        all_tokens = self.tokens * self.parallel.cp  # whose keys and values are gathered
        values = self.tokens * width + 2 * all_tokens * kv_width
        return self.residual + values * self.value_bytes + 4 * self.tokens * m.heads / self.parallel.tp

    def _explicit_layer(self) -> float:
        """Also queries, the residual after attention, gate and up, and GEMM inputs with `save_norm_outputs`."""
        hidden, width, kv_width, ffn = self.model.hidden, *self._local_widths
        unnormed = 0 if self.model.qk_norm is None else kv_width  # queries are saved before their norm only
        blocks = 2 if self.model.post_norms else 0  # what post-norms take
        saved = (1 + blocks) * self.residual + self.tokens * (width + unnormed + 2 * ffn) * self.value_bytes
        if self.work.save_norm_outputs:  # in fp8 the attention output by columns instead of the MLP activation
            values = 2 * hidden + (ffn if self.gemm_bytes == self.value_bytes else width)
            saved += self.tokens * values * self.gemm_bytes
        return self.recomputed_layer + saved

    @property
    def _local_widths(self) -> tuple[float, float, float]:
        """Widths of queries, keys and MLP of a Llama layer on this rank."""
        m, tp = self.model, self.parallel.tp
        return m.heads * m.head_dim / tp, m.kv_heads * m.head_dim / tp, m.ffn / tp

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
        unnormed = self.tokens * (width + kv_width) * self.value_bytes if m.qk_norm else 0.0  # what the norms save
        return self._gathered() + rope + unnormed + self._fused_attention(width, 2 * kv_width, width, m.heads / tp)

    def _fused_attention(self, query: float, key_value: float, out: float, heads: float) -> float:
        """Fused attention and the input of the output projection; keys and values are those of the whole sequence."""
        all_tokens = self.work.mbs * self.work.seqlen
        chunked = self.parallel.cp > 1 and self.model.attn_logit_softcap is not None
        copied = self.gemm_bytes != self.value_bytes or chunked  # else both save the same tensor
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
        """In bf16 gate and up only: activation(gate) * up is recomputed."""
        if self.config.precision.dtype == "bf16":
            return self.tokens * ffn * 2 * self.value_bytes
        return self._gated(self.tokens, ffn, self.gemm_bytes)

    def _gated(self, rows: float, ffn: float, gemm_bytes: float) -> float:
        """Gate and up, and the input of the down projection."""
        return rows * ffn * (2 * self.value_bytes + gemm_bytes)

    def _moe(self) -> float:
        """Router input, scores and weights; expert inputs, inner values and outputs, with the padding of ep."""
        assert self.model.experts is not None
        moe, parallel, hidden = self.model.experts, self.parallel, self.model.hidden
        tokens = self.tokens / parallel.tp
        pairs, weights = tokens * moe.top_k, 8.0 if moe.renormalise else 4.0
        sent = dispatched_rows(self.config)
        received = sent * parallel.etp
        saved = tokens * (hidden * self.value_bytes + 4 * moe.count + (4 if moe.renormalise else 0))  # and weight sum
        saved += sent * hidden * self.value_bytes + pairs * (8 + 4 + weights)  # expert id and row index
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

    def working(self, layer: int, forward: bool) -> float:
        """Return about the most that a layer needs while it runs, besides what it saves.

        A few of its widest activations; in backward also the gradient of its largest expert matrix, which a grouped
        GEMM does not write in place. Layers of the same blocks are alike.
        """
        key = layer_blocks(self.model, layer), forward
        if key not in self._working:
            self._working[key] = self._working_of(layer, forward)
        return self._working[key]

    @cached_property
    def _working(self) -> dict[tuple[tuple[str, ...], bool], float]:
        return {}

    def _working_of(self, layer: int, forward: bool) -> float:
        if has_explicit_layers(self.config):
            return self._explicit_working(layer, forward)
        rows, expert_size = _largest_matrices(tuple(layer_weights(self.model, layer)), self.parallel)
        activation = self.tokens * max(self.model.hidden, rows) * self.value_bytes
        if forward:
            return 4 * activation
        return 3 * activation + self.value_bytes * expert_size

    def _explicit_working(self, layer: int, forward: bool) -> float:
        """Output of the MLP's activation, and the output of the layer; in backward their gradients.

        In fp8 the gradients are in both layouts, and so are weights that are quantized for each pass.
        """
        hidden, width, kv_width, ffn = self.model.hidden, *self._local_widths
        is_fp8, is_tp = self.gemm_bytes != self.value_bytes, self.parallel.tp > 1
        gathered = self.tokens * hidden * self.value_bytes * is_tp
        if self.has_many_scales:
            return self.residual + gathered + self._many_scales_working(layer, forward)
        if forward:
            return self.residual + self.tokens * ffn * self.gemm_bytes + gathered
        if is_fp8:
            down = hidden * ffn * BYTES["fp8"] if self.is_gathered(layer) else 0.0
            return self.residual + self.tokens * (7 * ffn + 2 * hidden) + down
        all_tokens = self.tokens * self.parallel.cp
        attention = self.tokens * (width + 2 * kv_width)
        if self.parallel.cp > 1:
            attention += self.tokens * (width + 4 * kv_width) + 4 * all_tokens * kv_width
        return self.residual + max(self.tokens * ffn * self.value_bytes + gathered, attention * self.value_bytes)

    def _many_scales_working(self, layer: int, forward: bool) -> float:
        """Operands in bf16 before they are quantized, or both layouts of gradients; what a gradient is added from."""
        hidden, _, _, ffn = self.model.hidden, *self._local_widths
        if forward:
            return self.tokens * ffn * (self.value_bytes + self.gemm_bytes)
        is_gathered = self.is_gathered(layer)  # then gradients are reduced after each micro-batch, not added to
        down = hidden * ffn * BYTES["fp8"] if is_gathered else 0.0
        added = hidden * ffn * BYTES[self.work.gradients] if self.work.ga > 1 and not is_gathered else 0.0
        at_down, at_gate_up = 5 * ffn + 2 * hidden, 4 * ffn + hidden
        return down + max(
            self.tokens * at_down * self.gemm_bytes + added, self.tokens * at_gate_up * self.gemm_bytes + 2 * added
        )

    def is_gathered(self, layer: int) -> bool:
        """Return whether matrices of a layer are gathered for each pass."""
        if not self.parallel.fsdp:
            return False
        return any(bucket.ranks > 1 for bucket in weight_buckets(layer_weights(self.model, layer), self.parallel))

    def fp8_cache(self, layer: int) -> float:
        """Bytes of weights quantized once per step, in both layouts: those of explicit layers and of experts."""
        if not self.is_fp8:
            return 0.0
        return 2 * BYTES["fp8"] * sum(weight.size for weight in self._cached_weights(layer))

    def _cached_weights(self, layer: int) -> list[Weight]:
        """Return the local matrices that stay in memory and are cached in fp8."""
        explicit = has_explicit_layers(self.config)
        matrices = [weight for weight in layer_weights(self.model, layer) if weight.is_matrix]
        cached = [weight for weight in matrices if explicit or (weight.routed and self.work.fp8_experts is not False)]
        if self.parallel.fsdp and any(bucket.ranks > 1 for bucket in weight_buckets(cached, self.parallel)):
            return []
        local = [weight.on_rank(self.parallel) for weight in cached]
        return [weight for weight in local if all(length % FP8_ALIGNMENT == 0 for length in weight.shape[-2:])]

    @property
    def loss(self) -> float:
        """Bytes that the loss saves: the input of the final norm and both gradients, which it computes in forward."""
        return self.residual + self.tokens * self.model.hidden * self.value_bytes + self.head_gradient

    @property
    def head_gradient(self) -> float:
        """Bytes of the gradient of the LM head, summed over chunks."""
        return BYTES[self.work.gradients] * self.model.vocab / self.parallel.tp * self.model.hidden

    @property
    def loss_working(self) -> float:
        """Working memory of the loss: its input and a chunk's logits.

        Logits are replaced by their gradients in place.
        """
        logits = self.value_bytes * min(CHUNK_TOKENS, self.tokens) * self.model.vocab / self.parallel.tp
        if self.parallel.tp > 1 and self.model.logit_softcap is not None:
            logits *= 2  # the derivative of the softcap, which else is computed with the gradient
        local = self.residual if self.parallel.tp > 1 else 0.0
        return logits + self.tokens * self.model.hidden * self.value_bytes + local


@lru_cache(maxsize=64)
def _largest_matrices(weights: tuple[Weight, ...], parallel: Parallel) -> tuple[int, int]:
    """Return the rows of a layer's widest matrix on a rank, and the values of its largest routed one."""
    matrices = [weight.on_rank(parallel) for weight in weights if weight.is_matrix]
    rows = max((weight.shape[-2] for weight in matrices), default=0)
    return rows, max((weight.size for weight in matrices if weight.routed), default=0)
