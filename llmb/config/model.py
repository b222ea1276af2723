"""Frozen dataclasses of a model: Model, and the parts that some models have (RoPE, MoE, MLA, Mamba-2, DeltaNet)."""

from dataclasses import dataclass
from typing import Literal

Architecture = Literal[
    "llama", "qwen2", "qwen3", "mistral", "smollm3", "phi3", "olmo2", "olmo3", "gemma2", "gemma3", "exaone4",
    "granite", "seed_oss", "glm", "glm4", "ernie4_5", "arcee",
    "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "minimax_m2", "dots1", "olmoe", "ernie4_5_moe",
    "nemotron_h", "grok1", "deepseek",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoPE) and its context extension."""

    theta: float = 500_000.0
    # linear: all frequencies divided by the factor; longrope: each by its own.
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_tokens: int = 8192
    low_freq_factor: float = 1.0  # llama3: pairs with fewer periods in the original context are scaled by 1 / factor
    high_freq_factor: float = 4.0  # llama3: pairs with more periods are left as they are
    beta_fast: float = 32.0  # yarn: the same two bounds, as periods in the original context
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the pairs with these periods outwards
    mscale_all_dim: float = 0.0  # yarn: how strongly the softmax scale grows with the factor
    partial_rotary_factor: float = 1.0  # fraction of a head's channels with position embedding
    attention_factor: float = 1.0  # of cosine and sine
    short_factors: tuple[float, ...] = ()  # longrope: of each rotated pair, in sequences within the original context
    long_factors: tuple[float, ...] = ()  # longrope: the same in longer sequences


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of gated MLPs (MoE) in place of the dense MLP."""

    count: int
    top_k: int
    ffn: int  # intermediate width of one expert
    shared: int = 0  # experts that every token is routed to
    latent: int | None = None  # width of the routed experts, projected from hidden and back (LatentMoE); none: hidden
    dense_layers: int = 0  # leading layers with a dense MLP
    groups: int = 1  # group-limited routing: experts are chosen from `top_groups` of these groups
    top_groups: int = 1
    score: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid routers have a correction bias per expert
    correction_bias: bool = False  # a softmax router has one too
    renormalise: bool = True  # normalize the top-k routing weights to a sum of 1
    scale: float = 1.0  # of the combined output of the routed experts
    bias: bool = False  # the router and the projections of the experts have biases
    aux_loss: float = 0.0  # coefficient of the load-balancing loss; 0: none

    @property
    def has_correction_bias(self) -> bool:
        """Whether a bias per expert corrects the selection of experts, not their weights."""
        return self.score == "sigmoid" or self.correction_bias


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (MLA): low-rank queries, keys and values."""

    q_rank: int  # 0: queries have no latent (DeepSeek-V2-Lite), which is predicted and does not run
    kv_rank: int
    nope_dim: int  # per head, without RoPE
    rope_dim: int  # per head, with RoPE; one key shared by all heads
    value_dim: int
    # Sparse attention (DeepSeek-V3.2, GLM-5), predicted in serving only: an indexer scores all tokens before a query
    # with its own heads, and the query attends to the best `index_topk` of them. 0: none.
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Mamba-2 mixer; its inner width is heads * head_dim."""

    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int
    conv: int = 4


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """Gated DeltaNet mixer, a linear attention with the delta rule, which is predicted and does not run."""

    key_heads: int  # of queries and keys; each serves value_heads / key_heads heads
    value_heads: int
    key_dim: int  # per head
    value_dim: int
    gate_rank: int = 0  # Kimi Delta Attention: low rank of the output gate and of a decay for each key channel
    conv: int = 4


ATTENTION_KINDS = ("F", "S", "N")  # letters of Model.attention_pattern
# Letters more, of models that are predicted and do not run -> the mixer that such a layer has in place of attention.
MIXERS = {"D": "delta_net", "M": "mamba"}
BLOCKS_BY_LETTER = {"M": "mamba", "-": "mlp", "E": "experts", "*": "attention"}  # of Model.pattern


@dataclass(frozen=True, kw_only=True)
class Model:
    """Architecture and sizes of a model."""

    name: str
    architecture: Architecture
    layers: int
    hidden: int
    ffn: int  # intermediate width of the dense MLP
    gated: bool = True  # gate, up and down projections instead of up and down
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    activation: Literal["silu", "gelu", "squared_relu", "swigluoai"] = "silu"  # of the MLPs and experts
    tied_embeddings: bool = False
    norm_eps: float = 1e-5
    pre_norms: bool = True  # a norm on the input of each block
    post_norms: bool = False  # a norm on the output of each block before the residual add
    qkv_bias: bool = False  # of the query, key and value projections
    o_bias: bool = False  # of the attention's output projection
    qk_norm: Literal["head", "projection"] | None = None  # norm of queries and keys: each head, or all heads as one
    rope: RopeConfig | None = RopeConfig()  # none: attention without position embedding
    # Attention of each layer, repeated over the layers: F full, S sliding window, N full without position embedding,
    # D gated DeltaNet, M Mamba-2 instead.
    attention_pattern: str = "F"
    window: int | None = None  # sliding window: tokens that a token attends to, itself included
    local_rope: RopeConfig | None = None  # RoPE of the layers with a sliding window; none: as the others
    attention_scale: float | None = None  # of attention logits; none: 1 / sqrt(head_dim)
    attention_sinks: bool = False  # a learned logit of each head joins the softmax, without a value
    output_gate: bool = False  # a sigmoid gate on the attention's output, projected with the queries (predicted only)
    attn_logit_softcap: float | None = None  # cap * tanh(logits / cap) before the softmax
    residual_scale: float = 1.0  # of what each block adds to the residual
    embedding_scale: float = 1.0  # of the embedding's output
    logit_scale: float = 1.0  # of the logits
    logit_softcap: float | None = None  # of the logits: cap * tanh(logits / cap)
    pattern: str | None = None  # hybrids, one letter per layer: M mamba, * attention, - MLP, E experts
    experts: MoEConfig | None = None
    mla: MlaConfig | None = None
    mamba: MambaConfig | None = None
    delta_net: DeltaNetConfig | None = None

    def attention_kind(self, layer: int) -> str:
        """Return the letter of a layer in the attention pattern."""
        return self.attention_pattern[layer % len(self.attention_pattern)]

    @property
    def window_layers(self) -> int:
        """Number of layers with a sliding window."""
        return sum(self.attention_kind(layer) == "S" for layer in range(self.layers)) if self.window else 0

    @property
    def softmax_scale(self) -> float:
        """Factor of attention logits."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def blocks(self) -> dict[str, int]:
        """Number of blocks of each kind."""
        if self.pattern is not None:
            return {kind: self.pattern.count(letter) for letter, kind in BLOCKS_BY_LETTER.items()}
        dense = self.experts.dense_layers if self.experts else self.layers
        attention = "mla" if self.mla else "attention"
        mixers = {attention: self.layers}
        if self.delta_net is not None or self.mamba is not None:
            kinds = [MIXERS.get(self.attention_kind(layer), attention) for layer in range(self.layers)]
            mixers = {kind: kinds.count(kind) for kind in dict.fromkeys([attention, *kinds])}
        return {**mixers, "mlp": dense, "experts": self.layers - dense}
