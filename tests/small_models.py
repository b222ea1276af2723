"""One tiny model of each architecture, for what must hold for all of them."""

from llmb.config.spec import Experts, Latent, Mamba, Model, Rope

SIZES = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 128}
LATENT = Latent(q_rank=16, kv_rank=16, nope_dim=16, rope_dim=16, value_dim=16)

SMALL_MODELS = {
    "llama": Model(name="llama", architecture="llama", **SIZES),
    "grok1": Model(
        name="grok1",
        architecture="grok1",
        **SIZES,
        activation="gelu",
        tied_embeddings=True,
        post_norms=True,
        attention_cap=30.0,
        embedding_scale=5.0,
        logit_scale=0.5,
        experts=Experts(count=4, top_k=2, ffn=48, renormalise=False, aux_loss=0.01),
    ),
    "deepseek": Model(
        name="deepseek",
        architecture="deepseek",
        **(SIZES | {"kv_heads": 4}),
        latent=LATENT,
        rope=Rope(theta=10_000.0),
        experts=Experts(count=8, top_k=2, ffn=32, shared=1, dense_layers=1, groups=2, top_groups=1, score="sigmoid"),
    ),
    "nemotron_h": Model(
        name="nemotron_h",
        architecture="nemotron_h",
        **(SIZES | {"layers": 5}),
        gated=False,
        activation="squared_relu",
        rope=None,
        pattern="M-M*-",
        mamba=Mamba(heads=4, head_dim=16, groups=2, state=16, chunk=16),
    ),
}
