"""config.json of Mixtral, Qwen3-MoE and gpt-oss: published ones are read, and what is not supported is named."""

from dataclasses import replace
from typing import Any

import pytest
from published_models import GPT_OSS_20B, GPT_OSS_120B, MIXTRAL, QWEN3_30B

from llmb.config.huggingface.hf_config import from_hf_config, to_hf_config
from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.architectures import build_model

# Fields and values as the publishers print them; those without influence on the network are left out.
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_LARGE = GPT_OSS | {
    "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18
}  # fmt: skip
PUBLISHED = [
    (MIXTRAL_8X7B, MIXTRAL),
    (QWEN3_30B_A3B, QWEN3_30B),
    (GPT_OSS, GPT_OSS_20B),
    (GPT_OSS_LARGE, GPT_OSS_120B),
]


@pytest.mark.parametrize(("config", "model"), PUBLISHED, ids=lambda x: x.name if isinstance(x, Model) else "")
def test_published_configs_are_read_and_written_back(config: dict[str, Any], model: Model) -> None:
    assert from_hf_config(config, model.name) == model
    assert from_hf_config(to_hf_config(model), model.name) == model


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        (QWEN3_30B_A3B, {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        (GPT_OSS, {"layer_types": ["chunked_attention"]}, "layer_types: chunked_attention is not supported"),
        (GPT_OSS, {"quantization_config": {"quant_method": "awq"}}, "quantization_config: 'awq'; choices are: mxfp4"),
        (GPT_OSS, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type of config.json: 'linear'"),
        (GPT_OSS, {"rope_scaling": GPT_OSS["rope_scaling"] | {"mscale": 0.5}}, "mscale=0.5 is not supported"),
        (GPT_OSS, {"num_local_experts": None}, "'num_local_experts' is missing"),
    ],
)
def test_unsupported_features_are_named(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf_config(config | changes)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (MIXTRAL, {"qk_norm": "head"}, "a mixtral cannot have qk_norm=head"),
        (MIXTRAL, {"attention_sinks": True}, "a mixtral cannot have attention_sinks=true"),
        (QWEN3_30B, {"qkv_bias": True}, "a qwen3_moe cannot have qkv_bias=true"),
        (QWEN3_30B, {"experts": None}, "a qwen3_moe needs the field experts"),
        (GPT_OSS_20B, {"post_norms": True}, "a gpt_oss cannot have post_norms=true"),
        (GPT_OSS_20B, {"attention_pattern": "SX"}, "must be letters of F"),
        (GPT_OSS_20B, {"window": None}, "need model.window"),
    ],
)
def test_fields_without_effect_are_refused(model: Model, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(replace(model, layers=2, hidden=32, vocab=64, **changes))
