"""Library calls that one micro-batch needs: GEMMs, attention, the bytes of a scan.

Their best times, added up, are a row's ceiling; everything else a step does is above it. Products that take the same
input are one call (q, k and v; gate and up). Routed experts are one GEMM of all routed tokens with the weights of
one expert, which is as fast as balanced experts can be. A Mamba scan is the bytes that it must move. Attention is
without a softcap, which no library has. Embedding, router, norms, activations and the optimizer are left out, and so is
recomputation.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal, TypeVar

from llmb.config.model import MambaConfig, MlaConfig, Model
from llmb.config.spec import RunConfig, Training
from llmb.perfmodel.flops import attention_pairs
from llmb.perfmodel.params import BYTES

Way = Literal["forward", "input gradient", "weight gradient"]
WAYS: tuple[Way, ...] = ("forward", "input gradient", "weight gradient")
T = TypeVar("T")
HEAD_ROWS = 8192  # of the logits that exist at once
MANY_SCALES = ("rowwise", "blockwise")  # fp8 recipes whose GEMMs are other calls
TOKEN_MULTIPLE = 64  # of sequences that stand for others with a window


@dataclass(frozen=True)
class GemmCall:
    """x [rows, inputs] times the transpose of a weight [outputs, inputs], or one of its two gradients."""

    way: Way
    dtype: str
    rows: int
    outputs: int
    inputs: int
    scales: str = ""  # of fp8 operands, where there are many: the recipe

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.outputs * self.inputs

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order that does not depend on which operand is named first."""
        return tuple(sorted((self.rows, self.outputs, self.inputs)))

    def __str__(self) -> str:
        kind = " ".join(filter(None, (self.dtype, self.scales)))
        return f"{kind} {self.rows} x {self.inputs} -> {self.outputs}, {self.way}"


@dataclass(frozen=True)
class AttentionCall:
    """Causal attention of whole sequences, there or back."""

    backward: bool
    sequences: int
    seqlen: int
    heads: int
    kv_heads: int
    key: int  # width of a head's queries and keys
    value: int
    window: int | None = None  # sliding window, shorter than the sequence

    @property
    def flops(self) -> float:
        """Two products of each pair that counts going forward; five going back, three of them as wide as the keys."""
        pairs = self.sequences * attention_pairs(self.seqlen, "causal", self.window) * self.heads
        return 2.0 * pairs * (3 * self.key + 2 * self.value if self.backward else self.key + self.value)

    @property
    def causal_tokens(self) -> int:
        """Length of the sequence that has as many pairs without a window."""
        if self.window is None:
            return self.seqlen
        tokens = sqrt(2 * attention_pairs(self.seqlen, "causal", self.window))
        return max(1, round(tokens / TOKEN_MULTIPLE)) * TOKEN_MULTIPLE

    def __str__(self) -> str:
        width = f"{self.key}" if self.key == self.value else f"{self.key}/{self.value}"
        heads = f"{self.heads}/{self.kv_heads} heads of {width}"
        window = "" if self.window is None else f", window of {self.window}"
        way = "backward" if self.backward else "forward"
        return f"attention {way}, {self.sequences} x {self.seqlen}, {heads}{window}"


@dataclass(frozen=True)
class MemoryCall:
    """Bytes read and written."""

    name: str
    bytes: float

    def __str__(self) -> str:
        return f"{self.name}, {self.bytes / 1e6:.0f} MB moved"


TimedCall = GemmCall | AttentionCall  # by a clock; the rest by its bytes
Call = TimedCall | MemoryCall


def calls_of(config: RunConfig) -> dict[Call, int]:
    """Return how often each call occurs in a micro-batch."""
    model, work = config.model, config.workload
    assert isinstance(work, Training)
    tokens, precision = work.mbs * work.seqlen, config.precision
    scales = precision.fp8_recipe if precision.fp8_recipe in MANY_SCALES else ""
    calls: dict[Call, int] = {}

    def add(call: Call, count: int) -> None:
        calls[call] = calls.get(call, 0) + count

    for kind, count in model.blocks.items():
        for rows, outputs, inputs in _products(model, kind, tokens) if count else ():
            for way in WAYS:
                add(GemmCall(way, precision.dtype, rows, outputs, inputs, scales), count)
        for call, layers in _mixing(model, kind, count, work) if count else ():
            add(call, layers)
    rows = min(tokens, HEAD_ROWS)
    for way in WAYS:
        add(GemmCall(way, "bf16", rows, model.vocab, model.hidden), tokens // rows)
    return calls


def step_seconds(config: RunConfig, seconds: dict[Call, float]) -> float:
    """Return the seconds of all calls of a step, which is the row's ceiling."""
    work = config.workload
    assert isinstance(work, Training)
    return work.ga * sum(count * seconds[call] for call, count in calls_of(config).items())


def _products(model: Model, kind: str, tokens: int) -> list[tuple[int, int, int]]:
    """Return rows, outputs and inputs of the GEMMs of a block."""
    hidden, width, kv_width = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    match kind:
        case "attention":
            return [(tokens, width + 2 * kv_width, hidden), (tokens, hidden, width)]
        case "mla":
            return [(tokens, *shape) for shape in _latent_shapes(model, _present(model.mla))]
        case "mlp":
            return _mlp(tokens, hidden, model.ffn, 2 if model.gated else 1)
        case "experts":
            experts = _present(model.experts)
            routed = _mlp(tokens * experts.top_k, hidden, experts.ffn, 2)
            return routed + (_mlp(tokens, hidden, experts.shared * experts.ffn, 2) if experts.shared else [])
        case "mamba":
            mamba = _present(model.mamba)
            inner = mamba.heads * mamba.head_dim
            inward = 2 * inner + 2 * mamba.groups * mamba.state + mamba.heads
            return [(tokens, inward, hidden), (tokens, hidden, inner)]
    raise AssertionError(f"no GEMMs are known for a block of kind {kind}")


def _mlp(rows: int, hidden: int, ffn: int, inward: int) -> list[tuple[int, int, int]]:
    return [(rows, inward * ffn, hidden), (rows, hidden, ffn)]


def _latent_shapes(model: Model, latent: MlaConfig) -> list[tuple[int, int]]:
    key = latent.nope_dim + latent.rope_dim
    return [
        (latent.q_rank + latent.kv_rank + latent.rope_dim, model.hidden),
        (model.heads * key, latent.q_rank),
        (model.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        (model.hidden, model.heads * latent.value_dim),
    ]


def _mixing(model: Model, kind: str, count: int, work: Training) -> list[tuple[Call, int]]:
    """Return attention or scan of the blocks of a kind, forward and backward, and how many blocks have each."""
    windowed = 0
    if kind == "attention":
        widths = (model.heads, model.kv_heads, model.head_dim, model.head_dim)
        windowed = model.window_layers if model.window is not None and model.window < work.seqlen else 0
    elif kind == "mla":
        latent = _present(model.mla)
        widths = (model.heads, model.heads, latent.nope_dim + latent.rope_dim, latent.value_dim)
    elif kind == "mamba":
        return [(_scan(_present(model.mamba), work.mbs * work.seqlen, backward), count) for backward in (False, True)]
    else:
        return []
    layers = {None: count - windowed, model.window: windowed} if windowed else {None: count}
    return [
        (AttentionCall(backward, work.mbs, work.seqlen, *widths, window), number)
        for window, number in layers.items()
        for backward in (False, True)
        if number
    ]


def _scan(mamba: MambaConfig, tokens: int, backward: bool) -> MemoryCall:
    """The forward pass reads x, B, C and dt and writes y; the backward pass also reads dy and writes four gradients."""
    inner = mamba.heads * mamba.head_dim
    read = (inner + 2 * mamba.groups * mamba.state) * BYTES["bf16"] + mamba.heads * BYTES["fp32"]
    written = inner * BYTES["bf16"]
    return MemoryCall(
        f"scan {'backward' if backward else 'forward'}", tokens * (read * (2 if backward else 1) + written)
    )


def _present(part: T | None) -> T:
    assert part is not None
    return part
