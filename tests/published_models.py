"""Sizes of the published models, independent of the recipes so that neither hides a mistake of the other."""

from math import log

from llmb.config.model import MambaConfig, MlaConfig, Model, MoEConfig, RopeConfig


def llama(name: str, layers: int, hidden: int, ffn: int, heads: int, head_dim: int = 128, tied: bool = False) -> Model:
    return Model(
        name=name, architecture="llama", layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=8,
        head_dim=head_dim, vocab=128256, tied_embeddings=tied,
    )  # fmt: skip


LLAMA_1B = llama("llama3.2 1b", 16, 2048, 8192, 32, head_dim=64, tied=True)
LLAMA_8B = llama("llama3.1 8b", 32, 4096, 14336, 32)
LLAMA_70B = llama("llama3.1 70b", 80, 8192, 28672, 64)
LLAMA_405B = llama("llama3.1 405b", 126, 16384, 53248, 128)
DEEPSEEK = Model(
    name="deepseek-r1 671b", architecture="deepseek", layers=61, hidden=7168, ffn=18432, heads=128, kv_heads=128,
    head_dim=192, vocab=129280,
    experts=MoEConfig(
        count=256, top_k=8, ffn=2048, shared=1, dense_layers=3, groups=8, top_groups=4, score="sigmoid"
    ),
    mla=MlaConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)  # fmt: skip
NEMOTRON = Model(
    name="nemotron-h 56b", architecture="nemotron_h", layers=118, hidden=8192, ffn=32768, gated=False, heads=64,
    kv_heads=8, head_dim=128, vocab=131072, pattern="M-" * 54 + "*" * 10,
    mamba=MambaConfig(heads=256, head_dim=64, groups=8, state=256, chunk=256),
)  # fmt: skip
GROK = Model(
    name="grok1 314b", architecture="grok1", layers=64, hidden=6144, ffn=32768, heads=48, kv_heads=8, head_dim=128,
    vocab=128256, experts=MoEConfig(count=8, top_k=2, ffn=32768),
)  # fmt: skip
MIXTRAL = Model(
    name="mixtral 8x7b", architecture="mixtral", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128,
    vocab=32000, rope=RopeConfig(theta=1_000_000.0), experts=MoEConfig(count=8, top_k=2, ffn=14336),
)  # fmt: skip
QWEN3_30B = Model(
    name="qwen3 30b-a3b", architecture="qwen3_moe", layers=48, hidden=2048, ffn=6144, heads=32, kv_heads=4,
    head_dim=128, vocab=151936, norm_eps=1e-6, qk_norm="head", rope=RopeConfig(theta=1_000_000.0),
    experts=MoEConfig(count=128, top_k=8, ffn=768),
)  # fmt: skip


def gpt_oss(name: str, layers: int, experts: int) -> Model:
    return Model(
        name=name, architecture="gpt_oss", layers=layers, hidden=2880, ffn=2880, heads=64, kv_heads=8, head_dim=64,
        vocab=201088, qkv_bias=True, o_bias=True, attention_sinks=True, attention_pattern="SF", window=128,
        attention_scale=64**-0.5 * (0.1 * log(32) + 1) ** 2, activation="swigluoai",
        rope=RopeConfig(theta=150_000.0, scaling="yarn", factor=32.0, original_tokens=4096, truncate=False),
        experts=MoEConfig(count=experts, top_k=4, ffn=2880, bias=True),
    )  # fmt: skip


GPT_OSS_20B, GPT_OSS_120B = gpt_oss("gpt-oss 20b", 24, 32), gpt_oss("gpt-oss 120b", 36, 128)
GLM_AIR = Model(
    name="glm-4.5-air", architecture="glm4_moe", layers=46, hidden=4096, ffn=10944, heads=96, kv_heads=8, head_dim=128,
    vocab=151552, qkv_bias=True, rope=RopeConfig(theta=1_000_000.0, partial_rotary_factor=0.5),
    experts=MoEConfig(count=128, top_k=8, ffn=1408, shared=1, dense_layers=1, score="sigmoid"),
)  # fmt: skip
MINIMAX_M2 = Model(
    name="minimax-m2", architecture="minimax_m2", layers=62, hidden=3072, ffn=1536, heads=48, kv_heads=8, head_dim=128,
    vocab=200064, norm_eps=1e-6, qk_norm="projection", rope=RopeConfig(theta=5_000_000.0, partial_rotary_factor=0.5),
    experts=MoEConfig(count=256, top_k=8, ffn=1536, score="sigmoid"),
)  # fmt: skip
MIXTURES = (MIXTRAL, QWEN3_30B, GPT_OSS_20B, GPT_OSS_120B, GLM_AIR, MINIMAX_M2)
ALL = (LLAMA_1B, LLAMA_8B, LLAMA_70B, LLAMA_405B, DEEPSEEK, NEMOTRON, GROK, *MIXTURES)
