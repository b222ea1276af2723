"""config.json of mixtures of experts: published ones are read, and what is not supported is named."""

from dataclasses import replace
from typing import Any

import pytest
from published_models import GLM_AIR, GPT_OSS_20B, GPT_OSS_120B, MINIMAX_M2, MIXTRAL, QWEN3_30B
from small_models import ernie4_5_moe_model

from llmb.config.huggingface.hf_config import from_hf_config, to_hf_config
from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.params import parameters

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
GLM_45_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0, "first_k_dense_replace": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    "quantization_config": {"fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
PUBLISHED = [
    (GLM_45_AIR, GLM_AIR),
    (MINIMAX, MINIMAX_M2),
    (MIXTRAL_8X7B, MIXTRAL),
    (QWEN3_30B_A3B, QWEN3_30B),
    (GPT_OSS, GPT_OSS_20B),
    (GPT_OSS_LARGE, GPT_OSS_120B),
]


@pytest.mark.parametrize(("config", "model"), PUBLISHED, ids=lambda x: x.name if isinstance(x, Model) else "")
def test_published_configs_are_read_and_written_back(config: dict[str, Any], model: Model) -> None:
    assert from_hf_config(config, model.name) == model
    assert from_hf_config(to_hf_config(model), model.name) == model


def test_counts_are_those_of_the_published_files() -> None:
    """Files of GLM-4.5 also have a prediction layer with a projection, three norms, an embedding and a head of its own.

    Those of MiniMax-M2 have a scale for each 128 x 128 weights of attention and experts.
    """
    larger = {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
              "first_k_dense_replace": 3, "num_hidden_layers": 92, "use_qk_norm": True}  # fmt: skip
    for config, count in ((GLM_45_AIR, 110_468_824_832), (GLM_45_AIR | larger, 358_337_791_296)):
        deeper = from_hf_config(config | {"num_hidden_layers": config["num_hidden_layers"] + 1})
        extra = 2 * deeper.hidden**2 + 3 * deeper.hidden + 2 * deeper.vocab * deeper.hidden
        assert parameters(deeper) + extra == count
    costs = [block.dense_weights + block.routed_weights for _, _, block in block_stack(MINIMAX_M2)]
    assert parameters(MINIMAX_M2) + 62 * sum(costs) // 128**2 == 228_703_644_928


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        (QWEN3_30B_A3B, {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (QWEN3_30B_A3B, {"norm_topk_prob": "yes"}, "renormalise: expected true or false, got 'yes'"),
        (GLM_45_AIR, {"topk_group": 2}, "topk_group=2 is more than the groups, n_group=1"),
        (GLM_45_AIR, {"n_group": 32, "topk_group": 1}, "num_experts_per_tok=8 is more than the 4 experts in topk_gr"),
        (GLM_45_AIR, {"n_shared_experts": None}, "'n_shared_experts' is missing"),
        (MINIMAX, {"attn_type_list": [0, 1] * 31}, "attn_type_list with 0 .linear attention. is not supported"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type=per_head is not supported; only per_layer is"),
        (MINIMAX, {"use_routing_bias": False}, "use_routing_bias=False is not supported; only True is"),
        (MINIMAX, {"shared_intermediate_size": 512}, "shared_intermediate_size=512 is not supported; only 0 is"),
        (MINIMAX, {"rotary_dim": 65}, "rotates 65 of 128"),
        (MINIMAX, {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt=e5m2 is not supported"),
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
    ("changes", "message"),
    [
        ({"moe_layer_end_index": 0}, "moe_layer_end_index=0 is not supported; only 1, the last layer, is"),
        ({"moe_layer_interval": 2}, "moe_layer_interval=2 is not supported; only 1 is"),
        ({"moe_use_aux_free": False}, "moe_use_aux_free=False is not supported; only True is"),
        ({"use_bias": True}, "use_bias=True is not supported"),
    ],
)
def test_other_layers_of_ernie_are_named(changes: dict[str, Any], message: str) -> None:
    config = to_hf_config(ernie4_5_moe_model())
    assert from_hf_config(config | {"moe_layer_end_index": -1}) == from_hf_config(config | {"moe_layer_end_index": 1})
    with pytest.raises(ConfigError, match=message):
        from_hf_config(config | changes)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (MIXTRAL, {"qk_norm": "head"}, "a mixtral cannot have qk_norm=head"),
        (MIXTRAL, {"attention_sinks": True}, "a mixtral cannot have attention_sinks=true"),
        (QWEN3_30B, {"qkv_bias": True}, "a qwen3_moe cannot have qkv_bias=true"),
        (GLM_AIR, {"o_bias": True}, "a glm4_moe cannot have o_bias=true"),
        (GLM_AIR, {"experts": replace(GLM_AIR.experts, score="softmax")}, "a glm4_moe cannot have score=softmax"),
        (MINIMAX_M2, {"experts": replace(MINIMAX_M2.experts, shared=1)}, "a minimax_m2 cannot have shared=1"),
        (MIXTRAL, {"experts": replace(MIXTRAL.experts, latent=16)}, "a mixtral cannot have latent=16"),
        (QWEN3_30B, {"experts": None}, "a qwen3_moe needs the field experts"),
        (GPT_OSS_20B, {"post_norms": True}, "a gpt_oss cannot have post_norms=true"),
        (GPT_OSS_20B, {"attention_pattern": "SX"}, "must be letters of F"),
        (GPT_OSS_20B, {"window": None}, "need model.window"),
    ],
)
def test_fields_without_effect_are_refused(model: Model, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(replace(model, layers=2, hidden=32, vocab=64, **changes))
