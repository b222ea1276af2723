"""What the native engine's blocks keep for their backward pass on one rank, in bytes, and what they need as they run.

Inside a block a rank sees all tokens of its piece of the sequence, in the stream between blocks only its share of them
among the ranks of tp. A matrix product keeps what it takes: in the format of the stream, or in fp8 one byte a value.
Fused attention keeps q, k, v, its output and one fp32 number a query and head.
"""

from dataclasses import dataclass
from functools import cached_property

from llmb.config.spec import Model, Parallel, RunConfig, Training
from llmb.perfmodel.flops import BYTES
from llmb.perfmodel.shards import gradient_bytes, is_fused, is_sharded, layer_blocks, layer_weights

CHUNK_TOKENS, AGREED_TOKENS = 8192, 2048  # of the loss: the logits never exist whole


@dataclass(frozen=True)
class Activations:
    """Sizes of one micro-batch on one rank."""

    config: RunConfig

    @property
    def work(self) -> Training:
        assert isinstance(self.config.workload, Training)
        return self.config.workload

    @property
    def model(self) -> Model:
        return self.config.model

    @property
    def split(self) -> Parallel:
        return self.config.parallel

    @cached_property
    def value(self) -> float:
        """Bytes of a value of the stream."""
        return BYTES["fp32" if self.config.precision.dtype == "fp32" else "bf16"]

    @property
    def in_fp8(self) -> bool:
        """Whether the products of the stack take 8-bit operands."""
        return self.config.precision.dtype == "fp8"

    @cached_property
    def taken(self) -> float:
        """Bytes of a value that a matrix product of the stack keeps."""
        return BYTES["fp8"] if self.in_fp8 else self.value

    @cached_property
    def inside(self) -> float:
        """Tokens that a block of this rank sees."""
        return self.work.mbs * self.work.seqlen / self.split.cp

    @cached_property
    def stream(self) -> float:
        """Bytes of the stream between blocks."""
        return self.inside / self.split.tp * self.model.hidden * self.value

    def layer(self, layer: int) -> float:
        """What a layer keeps."""
        if is_fused(self.config):
            return self._fused_layer()
        return sum(self.block(kind) for kind in layer_blocks(self.model, layer))

    @property
    def recomputed_layer(self) -> float:
        """What one keeps whose insides are computed again: its input, or also what its attention took and made."""
        if not is_fused(self.config):
            return self.stream
        m = self.model
        values = m.hidden + (m.heads + 2 * m.kv_heads) * m.head_dim
        rope = 4 * m.head_dim if self.work.mbs > 1 else 0  # a table for all sequences
        return self.inside * (values * self.value + 4 * m.heads + rope)

    def _fused_layer(self) -> float:
        """Besides that the queries, the stream behind the attention, gate and up, and what products took if asked."""
        m, width = self.model, self.model.heads * self.model.head_dim
        kept = self.inside * (width + m.hidden + 2 * m.ffn) * self.value
        if self.work.keep_inputs:  # in fp8 the attention's columns instead of the activation
            kept += self.inside * (2 * m.hidden + (m.ffn if self.taken == self.value else width)) * self.taken
        return self.recomputed_layer + kept

    def block(self, kind: str) -> float:
        """What a block keeps, with the norm before it and the one behind it."""
        norms = self.stream * (2 if self.model.post_norms else 1)  # each keeps what it takes
        return (
            norms
            + {
                "attention": self._attention,
                "latent_attention": self._latent_attention,
                "mlp": self._mlp,
                "experts": self._experts,
                "mamba": self._mamba,
            }[kind]()
        )

    def _gathered(self) -> float:
        """The normed stream of all tp ranks, as the first products keep it."""
        return self.inside * self.model.hidden * self.taken

    def _attention(self) -> float:
        m, tp = self.model, self.split.tp
        width, kv_width = m.heads * m.head_dim / tp, m.kv_heads * m.head_dim / tp
        rope = 2 * self.work.seqlen / self.split.cp * m.head_dim * self.value if m.rope else 0.0
        return self._gathered() + rope + self._attended(width, 2 * kv_width, width, m.heads / tp)

    def _attended(self, query: float, key_value: float, out: float, heads: float) -> float:
        """Fused attention and what the product behind it keeps; keys and values are those of the whole sequence."""
        whole = self.work.mbs * self.work.seqlen
        copied = self.taken != self.value or self.split.cp > 1  # else it keeps the very same output
        kept = self.inside * (query + out) * self.value + whole * key_value * self.value
        return kept + self.inside * (4 * heads + out * self.taken * copied)

    def _latent_attention(self) -> float:
        assert self.model.latent is not None
        low, tp, heads = self.model.latent, self.split.tp, self.model.heads / self.split.tp
        key, narrow = low.nope_dim + low.rope_dim, low.q_rank + low.kv_rank
        down = self.inside / tp * (self.model.hidden * self.taken + low.q_rank * self.value)
        latents = self.inside * (narrow * self.taken + (low.kv_rank + low.rope_dim) * self.value)
        value = low.nope_dim + low.value_dim  # a view into what kv_up makes
        return down + latents + self._attended(heads * key, heads * (key + value), heads * low.value_dim, heads)

    def _mlp(self) -> float:
        if self.model.gated:
            return self._gathered() + self._gated_mlp(self.model.ffn / self.split.tp)
        return self._gathered() + self.inside * self.model.ffn / self.split.tp * (self.value + self.taken)

    def _gated_mlp(self, ffn: float) -> float:
        """In bf16 gate and up: what silu makes of them is made again."""
        if self.config.precision.dtype == "bf16" and self.model.activation == "silu":
            return self.inside * ffn * 2 * self.value
        return self._gated(self.inside, ffn)

    def _gated(self, rows: float, ffn: float) -> float:
        """Gate and up, and what down takes."""
        return rows * ffn * (2 * self.value + self.taken)

    def _experts(self) -> float:
        """Balanced: the router's input and scores, what experts take, make on their way and give, and its weights."""
        assert self.model.experts is not None
        moe, split, hidden = self.model.experts, self.split, self.model.hidden
        tokens = self.inside / split.tp
        rows, weights = tokens * moe.top_k, 8.0 if moe.renormalise else 4.0
        arrived = rows * split.etp
        kept = tokens * (hidden * self.value + 4 * moe.count + (4 if moe.renormalise else 0))  # with the weights' sum
        kept += rows * (hidden * self.value + 8 + 4 + weights)  # which expert, which place
        kept += arrived * (hidden * self.taken + (4 if split.ep * split.etp > 1 else 0))
        if moe.shared:
            kept += self._gated_mlp(moe.shared * moe.ffn / split.tp)
            kept += self._gathered() if self.taken != self.value or split.tp > 1 else 0
        return kept + self._gated(arrived, moe.ffn / split.etp)

    def _mamba(self) -> float:
        assert self.model.mamba is not None
        m, tp = self.model.mamba, self.split.tp
        inner, mixed = m.heads * m.head_dim / tp, (m.heads * m.head_dim + 2 * m.groups * m.state) / tp
        heads = m.heads / tp
        values = inner + mixed + heads + mixed + inner  # what goes in, the convolution of it, the scan's output
        return self._gathered() + self.inside * (values * self.value + inner * self.taken + 12 * heads)

    def working(self, layer: int, forward: bool, later: bool = False) -> float:
        """About the most that a layer needs while it runs, besides what it keeps.

        A few of its widest activations; going backward also the gradient of its largest matrix, in fp32. For a weight
        that is not gathered it is made in the stream's format first, when most of those activations are gone. `later`:
        gradients of an earlier micro-batch are there, to which those of routed experts may be added as they are made.
        """
        weights = [one.on_rank(self.split) for one in layer_weights(self.model, layer)]
        if is_fused(self.config):
            return self._fused_working(forward)
        widest = max(self.model.hidden, *(one.shape[-2] for one in weights if len(one.shape) > 1 and not one.whole))
        few = self.inside * widest * self.value
        if forward:
            return 4 * few
        added, wide = later and self._adds_in_place, gradient_bytes(self.config)
        gradient = wide * max(one.size for one in weights if not (added and one.routed))
        return max(3 * few + gradient, few + self._cast_gradient(layer, added))

    def _fused_working(self, forward: bool) -> float:
        """What the MLP's activation makes; in fp8 going backward its slope in both forms."""
        if forward or self.taken == self.value:
            return self.inside * (self.model.ffn * self.value + 3 * self.model.hidden * self.value)
        return self.inside * (7 * self.model.ffn + 6 * self.model.hidden)

    @property
    def _adds_in_place(self) -> bool:
        """Whether experts' products add to gradients where these lie: of a weight that is no slice of a larger one."""
        return self.split.sharers == self.split.tp == 1

    def _cast_gradient(self, layer: int, added: bool) -> float:
        """Of the largest weight that is not gathered, in both formats, or in the stream's if it is added from there."""
        whole = [one for one in layer_weights(self.model, layer) if not is_sharded(one, self.split)]
        wide = gradient_bytes(self.config)
        wider = 0.0 if added or self.value == wide else wide
        return (self.value + wider) * max((one.on_rank(self.split).size for one in whole), default=0)

    @property
    def loss(self) -> float:
        """What the loss keeps: the last norm's input and both gradients, which it computes going forward."""
        gradient = BYTES[self.work.gradients] * self.head
        return self.stream + self.inside * self.model.hidden * self.value + gradient

    @property
    def head(self) -> float:
        """Numbers of the head that are on this rank."""
        return self.model.vocab / self.split.tp * self.model.hidden

    def loss_working(self, cast: bool) -> float:
        """Besides that: the head in the stream's format unless it comes so, the stream, and a chunk's logits.

        These are turned into their slopes where they lie. Of a part of the vocabulary they are fp32, and so are their
        exponentials beside them.
        """
        at_once = CHUNK_TOKENS if self.split.tp == 1 else AGREED_TOKENS
        chunk = min(at_once, self.inside) * self.model.vocab / self.split.tp
        logits, own = (8 * chunk, self.stream) if self.split.tp > 1 else (self.value * chunk, 0.0)
        whole = self.inside * self.model.hidden * self.value
        return logits + whole + own + (self.value * self.head if cast and self.value < 4 else 0.0)
