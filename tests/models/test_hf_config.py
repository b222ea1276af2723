"""config.json: published ones are read correctly, and conversion is lossless in both directions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import published_models
import pytest
from small_models import nemotron_h_model

from llmb.config.huggingface.hf_config import (
    HF_ARCHITECTURES,
    check_trainable,
    from_hf_config,
    load_hf_config,
    to_hf_config,
)
from llmb.config.model import Model, RopeConfig
from llmb.errors import ConfigError
from llmb.perfmodel.params import parameters

# Fields and values as the publishers print them; those without influence on the network are left out.
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK = replace(
    published_models.DEEPSEEK,
    name="DeepSeek-V3",
    head_dim=128,
    norm_eps=1e-6,
    rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=4096, mscale_all_dim=1.0),
    experts=replace(published_models.DEEPSEEK.experts, scale=2.5),
)
NEMOTRON = nemotron_h_model(name="nemotron", hidden=48, ffn=80, head_dim=16, vocab=97, pattern="M-*-")


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def test_published_configs_match_the_recipes(recipes) -> None:
    assert from_hf_config(LLAMA_8B, "Llama-3.1-8B") == recipes["pretrain_llama3.1"].model("8b", {})
    assert from_hf_config(DEEPSEEK_V3 | {"quantization_config": FP8}, "DeepSeek-V3") == DEEPSEEK
    assert from_hf_config(DEEPSEEK_V3, "DeepSeek-V3") == DEEPSEEK


def test_config_roundtrip_of_every_shipped_model(recipes) -> None:
    architectures = set()
    for recipe in recipes.values():
        for size in recipe.models:
            model = recipe.model(size, {})
            if model.architecture in HF_ARCHITECTURES:
                back = from_hf_config(json.loads(json.dumps(to_hf_config(model))), model.name)
                assert back == model
                architectures.add(model.architecture)
    assert architectures == {"llama", "deepseek", "nemotron_h"} <= set(HF_ARCHITECTURES)


def test_model_is_named_after_the_folder(tmp_path: Path) -> None:
    (tmp_path / "Llama-3.1-8B").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        load_hf_config(tmp_path / "Llama-3.1-8B")
    (tmp_path / "Llama-3.1-8B" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"Llama-3\.1-8B is a LoRA adapter; name the folder of its base model"):
        load_hf_config(tmp_path / "Llama-3.1-8B")
    (tmp_path / "Llama-3.1-8B" / "config.json").write_text(json.dumps(LLAMA_8B))
    assert load_hf_config(tmp_path / "Llama-3.1-8B").name == "Llama-3.1-8B"


OTHERS = (
    "gpt2",
    "falcon",
    "llama4",
    "glm_moe_dsa",
    "cohere",
    "phi3small",
    "phimoe",
    "deepseek_v2",
    "qwen3_next",
    "ministral3",
)
UNSUPPORTED = [
    *(
        (LLAMA_8B | {"model_type": name}, f"unknown model_type of config.json: '{name}'; choices are: llama, ")
        for name in OTHERS
    ),
    (LLAMA_8B | {"mlp_bias": True}, "mlp_bias=True is not supported; only False is"),
    (LLAMA_8B | {"sliding_window": 4096}, "sliding_window=4096 is not supported; only None is"),
    (LLAMA_8B | {"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types="),
    (
        LLAMA_8B | {"model_type": "phi3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "unknown rope_type of config.json: 'yarn'; choices are: default, longrope",
    ),
    (
        LLAMA_8B | {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
        "field 'short_factor' is missing",
    ),
    (LLAMA_8B | {"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window=True is not supported"),
    (
        LLAMA_8B | {"model_type": "smollm3", "sliding_window": 4096, "layer_types": ["sliding_attention"] * 32},
        "layer_types with sliding_attention is not supported; only full_attention is",
    ),
    (LLAMA_8B | {"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 32 layers"),
    (LLAMA_8B | {"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (LLAMA_8B | {"model_type": "gemma2", "sliding_window_pattern": 6}, "sliding_window_pattern=6 is not supported"),
    *(
        (
            LLAMA_8B | {"model_type": "phi3", "rope_scaling": None, "partial_rotary_factor": factor},
            f"partial_rotary_factor={factor} is not supported: it rotates {channels} of 128 channels",
        )
        for factor, channels in ((0.5742, 73), (0.01, 1), (0.0, 0))
    ),
    (
        LLAMA_8B | {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 32},
        "chunked_attention is not",
    ),
    *(
        (
            LLAMA_8B | {"model_type": model_type, "sliding_window": None, "layer_types": ["sliding_attention"] * 32},
            "field 'sliding_window' is missing",
        )
        for model_type in ("gemma2", "gemma3_text", "olmo3", "exaone4")
    ),
    (LLAMA_8B | {"hidden_act": "relu"}, "unknown hidden_act of config.json: 'relu'"),
    (LLAMA_8B | {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "unknown rope_type of config.json: 'dynamic'"),
    (LLAMA_8B | {"rope_scaling": {"rope_type": "llama3"}}, "field 'factor' is missing"),
    (LLAMA_8B | {"hidden_size": None}, "field 'hidden_size' is missing"),
    (LLAMA_8B | {"hidden_size": "wide"}, "config.json.hidden_size: expected a whole number, got 'wide'"),
    (LLAMA_8B | {"vocab_size": 1.5}, "config.json.vocab: expected a whole number, got 1.5"),
    (LLAMA_8B | {"num_attention_heads": 0}, "config.json.num_attention_heads: 0 must be at least 1"),
    (LLAMA_8B | {"rope_scaling": "yarn"}, "config.json.rope_scaling: expected a mapping, got 'yarn'"),
    (LLAMA_8B | {"model_type": ["llama"]}, "unknown model_type of config.json"),
    ([LLAMA_8B], "config.json: expected a mapping"),
    (LLAMA_8B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    (LLAMA_8B | {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
    (LLAMA_8B | {"attention_bias": True, "model_type": "phi3"}, "attention_bias=True is not supported"),
    (LLAMA_8B | {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported; only 0.0 is"),
    (LLAMA_8B | {"model_type": "seed_oss", "mlp_bias": True}, "mlp_bias=True is not supported; only False is"),
    (LLAMA_8B | {"model_type": "ernie4_5", "use_bias": True}, "use_bias=True is not supported; only False is"),
    (LLAMA_8B | {"model_type": "granite", "logits_scaling": 0}, "logits_scaling: 0 divides the logits"),
    (LLAMA_8B | {"model_type": "granite", "residual_multiplier": "a"}, "residual_multiplier: expected a number"),
    (
        LLAMA_8B | {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 262_144}},
        "dual_chunk_attention",
    ),
    (LLAMA_8B | {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not"),
    (
        LLAMA_8B | {"quantization_config": {"bits": 4, "quant_method": "gptq"}},
        "unknown quant_method of config.json's quantization_config: 'gptq'; choices are: fp8",
    ),
    *(
        (
            LLAMA_8B | {"quantization_config": {"quant_method": method}},
            f"unknown quant_method of config.json's quantization_config: '{method}'; choices are: fp8",
        )
        for method in ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "modelopt", "mxfp4")
    ),
    (
        LLAMA_8B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
        "weight_block_size=None is not supported; only [128, 128] is",
    ),
    (
        LLAMA_8B | {"auto_map": {"AutoModelForCausalLM": "modeling_mine.MyLlamaForCausalLM"}},
        "auto_map with the code of modeling_mine.MyLlamaForCausalLM is not supported; only LlamaForCausalLM is",
    ),
    (LLAMA_8B | {"auto_map": "modeling_mine"}, "config.json.auto_map: expected a mapping"),
    (LLAMA_8B | {"quantization_config": {"load_in_4bit": True}}, "quantization_config: 'None'; choices are: fp8"),
    (LLAMA_8B | {"quantization_config": "awq"}, "config.json.quantization_config: expected a mapping, got 'awq'"),
    (
        {"model_type": "gemma3", "quantization_config": {"quant_method": "awq"}, "text_config": {}},
        "quantization_config: 'awq'",
    ),
    (
        {"model_type": "gemma3", "text_config": {"quantization_config": {"quant_method": "gptq"}}},
        "quantization_config: 'gptq'",
    ),
    (LLAMA_8B | {"model_type": "mistral3"}, "field 'text_config' is missing"),
    ({"model_type": "mistral3", "text_config": "mistral"}, "config.json.text_config: expected a mapping"),
    ({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}, "model_type=ministral3 is not supported"),
    (LLAMA_8B | {"model_type": "olmo3", "rope_theta": 10_000.0}, "rope_theta=10000.0 is not supported"),
    (LLAMA_8B | {"per_layer_config": {"1": {"intermediate_size": 64}}}, "per_layer_config={'1'"),
    (LLAMA_8B | {"compression_config": {"format": "float-quantized"}}, "compression_config={'format'"),
    (
        DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
        "weight_block_size=[1, 128] is not supported; only [128, 128] is",
    ),
    (DEEPSEEK_V3 | {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_type of config.json: 'llama3'"),
    (DEEPSEEK_V3 | {"q_lora_rank": None}, "field 'q_lora_rank' is missing"),
    (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func=softmax is not supported; only sigmoid is"),
    (
        DEEPSEEK_V3 | {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.7}},
        "yarn with a factor on cosine and sine",
    ),
    (
        to_hf_config(NEMOTRON) | {"hybrid_override_pattern": "MEME"},
        "hybrid_override_pattern with E is not supported; only M, *, - are",
    ),
    (
        to_hf_config(NEMOTRON) | {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "moe"] * 2},
        "layers_block_type with moe is not supported; only linear_attention, mamba, full_attention, attention, mlp are",
    ),
    # Of the same model_type: a classifier, an embedding model, the draft of EAGLE-3.
    *(
        (
            LLAMA_8B | {"architectures": [name]},
            f"architectures={name} is not supported; only LlamaForCausalLM is",
        )
        for name in ("LlamaForSequenceClassification", "LlamaModel", "LlamaForCausalLMEagle3")
    ),
    (LLAMA_8B | {"architectures": "LlamaForCausalLM"}, "config.json.architectures: expected a list"),
    (to_hf_config(NEMOTRON) | {"hybrid_override_pattern": 4}, "hybrid_override_pattern: expected text, got 4"),
]


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED, ids=range(len(UNSUPPORTED)))
def test_unsupported_configs_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf_config(config)
    assert message in str(error.value)


def test_code_of_the_same_class_and_dtypes_are_no_other_network() -> None:
    """As files of DeepSeek-V3, Phi-3, MiniMax-M2 and ERNIE 4.5 name the code that they were published with."""
    plain = from_hf_config(LLAMA_8B)
    auto_map = {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "me/a--llama.LlamaForCausalLM"}
    for more in (
        {"auto_map": auto_map},
        {"torch_dtype": "float16"},
        {"dtype": "bfloat16"},
        {"quantization_config": {}},
    ):
        assert from_hf_config(LLAMA_8B | more) == plain
    ernie = LLAMA_8B | {"model_type": "ernie4_5", "rope_scaling": None}
    assert from_hf_config(ernie | {"architectures": ["Ernie4_5_ForCausalLM"]}) == from_hf_config(ernie)


def test_a_dropout_of_a_published_model_is_refused_in_training_only() -> None:
    config = LLAMA_8B | {"model_type": "seed_oss", "rope_scaling": None, "residual_dropout": 0.1}
    assert from_hf_config(config | {"attention_dropout": 0.1}) == from_hf_config(config)
    with pytest.raises(ConfigError, match=r"residual_dropout=0\.1 is not computed in training"):
        check_trainable(config)
    check_trainable(config | {"residual_dropout": 0.0, "attention_dropout": None})


def test_granite_factors_are_written_as_published() -> None:
    """Also those whose inverse of an inverse is another number."""
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22}
    for scaling in (49.0, 16.0, 1e-3):
        config = LLAMA_8B | factors | {"model_type": "granite", "rope_scaling": None, "logits_scaling": scaling}
        model = from_hf_config(config)
        assert (model.embedding_scale, model.attention_scale, model.residual_scale) == (12.0, 0.0078125, 0.22)
        written = to_hf_config(model)
        assert {name: written[name] for name in (*factors, "logits_scaling")} == factors | {"logits_scaling": scaling}


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"], ["LLaMAForCausalLM"]])
def test_language_models_are_told_by_their_class(architectures: list[str] | None) -> None:
    assert from_hf_config(LLAMA_8B | {"architectures": architectures}) == from_hf_config(LLAMA_8B)


def test_exaone_4_without_a_windowed_layer_has_no_rope_where_a_window_is_configured() -> None:
    config = LLAMA_8B | {"model_type": "exaone4", "layer_types": ["full_attention"] * 32}
    config["rope_scaling"] = None
    windowed, full = (from_hf_config(config | {"sliding_window": window}) for window in (4096, None))
    assert (windowed.attention_pattern, full.attention_pattern) == ("N", "F")
    assert [from_hf_config(to_hf_config(each), each.name) for each in (windowed, full)] == [windowed, full]


def test_kimi_k2_is_a_deepseek_of_another_model_type() -> None:
    sizes = {
        "vocab_size": 163_840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
        "rope_theta": 50_000.0, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    yarn = DEEPSEEK_V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}
    kimi = from_hf_config(DEEPSEEK_V3 | sizes | {"model_type": "kimi_k2", "rope_scaling": yarn}, "kimi")
    assert kimi == from_hf_config(DEEPSEEK_V3 | sizes | {"rope_scaling": yarn}, "kimi")
    assert parameters(kimi) == 1_026_408_232_448


LLAMA = from_hf_config(LLAMA_8B, "llama")
INEXPRESSIBLE = [
    (replace(LLAMA, attn_logit_softcap=30.0), "cannot express attn_logit_softcap=30.0"),
    (replace(LLAMA, post_norms=True, logit_scale=0.5), "cannot express post_norms=True, logit_scale=0.5"),
    (replace(LLAMA, rope=None), "cannot express rope=None"),
    (replace(DEEPSEEK, embedding_scale=2.0), "cannot express embedding_scale=2.0"),
    (replace(DEEPSEEK, mla=None), "field 'v_head_dim' is missing"),
    (replace(NEMOTRON, rope=RopeConfig()), "cannot express rope="),
    (replace(NEMOTRON, layers=5), "cannot express layers=5"),
    (
        replace(LLAMA, architecture="grok1"),
        "grok1 has no config.json; architectures with one: llama, qwen2, qwen3, mistral, smollm3, phi3, olmo2, olmo3",
    ),
]


@pytest.mark.parametrize(("model", "message"), INEXPRESSIBLE, ids=range(len(INEXPRESSIBLE)))
def test_models_that_a_config_cannot_express_are_rejected(model: Model, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        to_hf_config(model)
    assert message in str(error.value)
