"""Published models: their config.json, as far as it matters, and their numbers of parameters, FLOPs and bytes."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmb.config.huggingface.hf_config import from_hf_config, to_hf_config
from llmb.config.spec import Precision
from llmb.models.architectures import build_model
from llmb.perfmodel.flops import decode_flops
from llmb.perfmodel.params import active_parameters, decode_bytes, parameters


def _config(model_type: str, sizes: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = dict(zip((*names, "num_key_value_heads"), sizes, strict=True))
    defaults = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False}
    return {"model_type": model_type, **defaults, **config, **fields}


GEMMA: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
# Counts as public records print them to the last digit: `safetensors.total` of the Hub, parameter counts of GGUF files,
# presets of Keras Hub; of Gemma 2 the sums of its technical report (embedding and non-embedding parameters).
PUBLISHED: dict[str, tuple[dict[str, Any], int, str]] = {  # config.json, parameters, attention pattern
    "Qwen2.5-7B": (
        _config("qwen2", (152_064, 3584, 18_944, 28, 28, 4), rope_theta=1e6, use_sliding_window=False,
                sliding_window=131_072, max_window_layers=28),
        7_615_616_512, "F",
    ),
    "Qwen3-8B": (
        _config("qwen3", (151_936, 4096, 12_288, 36, 32, 8), rope_theta=1e6, head_dim=128, use_sliding_window=False,
                sliding_window=None, max_window_layers=36),
        8_190_735_360, "F",
    ),
    "Mistral-7B-v0.1": (
        _config("mistral", (32_000, 4096, 14_336, 32, 32, 8), rms_norm_eps=1e-5, sliding_window=4096),
        7_241_732_096, "S",
    ),
    "SmolLM3-3B": (
        _config("smollm3", (128_256, 2048, 11_008, 36, 16, 4), rope_theta=5e6, no_rope_layer_interval=4,
                use_sliding_window=False, tie_word_embeddings=True, mlp_bias=False),
        3_075_098_624, "FFFN",
    ),
    "phi-4": (
        _config("phi3", (100_352, 5120, 17_920, 40, 40, 10), rms_norm_eps=1e-5, rope_theta=250_000,
                sliding_window=None, partial_rotary_factor=1.0),
        14_659_507_200, "F",
    ),
    "OLMo-2-1124-7B": (
        _config("olmo2", (100_352, 4096, 11_008, 32, 32, 32), rope_theta=500_000),
        7_298_617_344, "F",
    ),
    "Olmo-3-7B": (
        _config("olmo3", (100_278, 4096, 11_008, 32, 32, 32), rope_theta=500_000, sliding_window=4096,
                layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8, max_position_embeddings=65_536,
                rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                              "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}),
        7_298_011_136, "SSSF",
    ),
    "EXAONE-4.0-32B": (  # the pattern as text, beside the list that it stands for
        _config("exaone4", (102_400, 5120, 27_392, 64, 40, 8), rms_norm_eps=1e-5, rope_theta=1e6, head_dim=128,
                sliding_window=4096, sliding_window_pattern="LLLG",
                layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16,
                rope_scaling={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 8192}),
        32_003_216_384, "SSSN",
    ),
    "gemma-2-9b": (
        _config("gemma2", (256_000, 3584, 14_336, 42, 16, 8), query_pre_attn_scalar=256, sliding_window=4096,
                attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **GEMMA),
        9_241_705_984, "SF",
    ),
    "gemma-3-1b": (
        _config("gemma3_text", (262_144, 1152, 6912, 26, 4, 1), query_pre_attn_scalar=256, sliding_window=512,
                sliding_window_pattern=6, rope_theta=1_000_000, rope_local_base_freq=10_000, **GEMMA),
        999_885_952, "SSSSSF",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_and_layers(name: str) -> None:
    config, count, pattern = PUBLISHED[name]
    model = from_hf_config(config, name)
    assert parameters(model) == count
    assert [model.attention_kind(layer) for layer in range(6)] == list((pattern * 6)[:6])
    assert model.window == (config["sliding_window"] if "S" in pattern else None)
    assert from_hf_config(to_hf_config(model), name) == model
    with torch.device("meta"):
        network = build_model(model)
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(model)))
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    assert reference.num_parameters() == count


TIED = {"tie_word_embeddings": True}
PHI = {"rms_norm_eps": 1e-5, "sliding_window": None}
QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
GEMMA2 = GEMMA | {"query_pre_attn_scalar": 256, "sliding_window": 4096}
GEMMA3 = {"query_pre_attn_scalar": 256, "sliding_window": 1024, **GEMMA}
GRANITE3 = TIED | {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
}  # fmt: skip
QKV_BIAS = {"attention_bias": True, "head_dim": 128}
OTHER_SIZES: dict[str, tuple[str, tuple[int, ...], dict[str, Any], int]] = {
    "Qwen2.5-0.5B": ("qwen2", (151_936, 896, 4864, 24, 14, 2), TIED, 494_032_768),
    "Qwen2.5-1.5B": ("qwen2", (151_936, 1536, 8960, 28, 12, 2), TIED, 1_543_714_304),
    "Qwen2.5-3B": ("qwen2", (151_936, 2048, 11_008, 36, 16, 2), TIED, 3_085_938_688),
    "Qwen2.5-14B": ("qwen2", (152_064, 5120, 13_824, 48, 40, 8), {}, 14_770_033_664),
    "Qwen2.5-32B": ("qwen2", (152_064, 5120, 27_648, 64, 40, 8), {}, 32_763_876_352),
    "Qwen2.5-72B": ("qwen2", (152_064, 8192, 29_568, 80, 64, 8), {}, 72_706_203_648),
    "Qwen3-0.6B": ("qwen3", (151_936, 1024, 3072, 28, 16, 8), TIED, 596_049_920),
    "Qwen3-4B": ("qwen3", (151_936, 2560, 9728, 36, 32, 8), TIED, 4_022_468_096),
    "Qwen3-14B": ("qwen3", (151_936, 5120, 17_408, 40, 40, 8), {}, 14_768_307_200),
    "Qwen3-32B": ("qwen3", (151_936, 5120, 25_600, 64, 64, 8), {}, 32_762_123_264),
    "Qwen3-235B-A22B": (
        "qwen3_moe", (151_936, 4096, 12_288, 94, 64, 4), QWEN3_MOE | {"moe_intermediate_size": 1536}, 235_093_634_560
    ),
    "Mistral-7B-v0.3": ("mistral", (32_768, 4096, 14_336, 32, 32, 8), PHI, 7_248_023_552),
    "Mistral-Nemo": ("mistral", (131_072, 5120, 14_336, 40, 32, 8), PHI | {"head_dim": 128}, 12_247_782_400),
    "Mistral-Small-24B": ("mistral", (131_072, 5120, 32_768, 40, 32, 8), PHI | {"head_dim": 128}, 23_572_403_200),
    "Mixtral-8x22B": (
        "mixtral", (32_768, 6144, 16_384, 56, 48, 8), PHI | {"num_local_experts": 8, "num_experts_per_tok": 2},
        140_630_071_296,
    ),
    "gemma-2-2b": ("gemma2", (256_000, 2304, 9216, 26, 8, 4), GEMMA2, 2_614_341_888),
    "gemma-2-27b": (
        "gemma2", (256_000, 4608, 36_864, 46, 32, 16), GEMMA2 | {"head_dim": 128, "query_pre_attn_scalar": 144},
        27_227_128_320,
    ),
    # Published with a vision tower: theirs is taken off.
    "gemma-3-4b": ("gemma3_text", (262_208, 2560, 10_240, 34, 8, 4), GEMMA3, 4_300_079_472 - 419_816_304),
    "gemma-3-12b": ("gemma3_text", (262_208, 3840, 15_360, 48, 16, 8), GEMMA3, 12_187_325_040 - 421_290_864),
    "gemma-3-27b": (
        "gemma3_text", (262_208, 5376, 21_504, 62, 32, 16), GEMMA3 | {"head_dim": 128, "query_pre_attn_scalar": 168},
        27_432_406_640 - 423_060_336,
    ),
    "Phi-3-mini-4k": ("phi3", (32_064, 3072, 8192, 32, 32, 32), PHI | {"sliding_window": 2047}, 3_821_079_552),
    "Phi-4-mini": ("phi3", (200_064, 3072, 8192, 32, 24, 8), PHI | TIED, 3_836_021_760),
    "EXAONE-4.0-1.2B": (
        "exaone4", (102_400, 2048, 4096, 30, 32, 8), TIED | {"head_dim": 64, "sliding_window": None}, 1_279_391_488,
    ),
    "granite-3.1-2b": (
        "granite", (49_155, 2048, 8192, 40, 32, 8), GRANITE3 | {"attention_multiplier": 1 / 64, "logits_scaling": 8.0},
        2_533_531_648,
    ),
    "granite-3.1-8b": ("granite", (49_155, 4096, 12_800, 40, 32, 8), GRANITE3, 8_170_848_256),
    "granite-3.3-8b": ("granite", (49_159, 4096, 12_800, 40, 32, 8), GRANITE3, 8_170_864_640),
    "Seed-OSS-36B": (
        "seed_oss", (155_136, 5120, 27_648, 64, 80, 8), QKV_BIAS | {"attention_dropout": 0.1, "residual_dropout": 0.1},
        36_151_104_512,
    ),
    "glm-4-9b-hf": ("glm", (151_552, 4096, 13_696, 40, 32, 2), QKV_BIAS, 9_399_951_360),
    "GLM-4-9B-0414": ("glm4", (151_552, 4096, 13_696, 40, 32, 2), QKV_BIAS, 9_400_279_040),
    "GLM-4-32B-0414": ("glm4", (151_552, 6144, 23_040, 61, 48, 2), {"head_dim": 128}, 32_566_081_536),
    "ERNIE-4.5-0.3B": ("ernie4_5", (103_424, 1024, 3072, 18, 16, 2), TIED, 360_748_032),
    "OLMoE-1B-7B": (
        "olmoe", (50_304, 2048, 1024, 16, 16, 16), {"num_experts": 64, "num_experts_per_tok": 8}, 6_919_161_856
    ),
    "ERNIE-4.5-21B-A3B": (
        "ernie4_5_moe", (103_424, 2560, 12_288, 28, 20, 4),
        {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "moe_layer_end_index": 27, "tie_word_embeddings": True},
        21_825_437_888,
    ),
    "dots.llm1": (
        "dots1", (152_064, 4096, 10_944, 62, 32, 32),
        {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
         "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
        142_774_381_696,
    ),
    "OLMo-2-0425-1B": ("olmo2", (100_352, 2048, 8192, 16, 16, 16), {}, 1_484_916_736),
    "OLMo-2-1124-13B": ("olmo2", (100_352, 5120, 13_824, 40, 40, 40), {}, 13_716_198_400),
    "OLMo-2-0325-32B": ("olmo2", (100_352, 5120, 27_648, 64, 40, 8), {}, 32_234_279_936),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_published_parameters_of_other_sizes(name: str) -> None:
    model_type, sizes, fields, count = OTHER_SIZES[name]
    model = from_hf_config(_config(model_type, sizes, **fields), name)
    assert parameters(model) == count
    # A generated token multiplies with every active weight once; the embedding is looked up, norms and biases are few.
    looked_up = 0 if model.tied_embeddings else model.vocab * model.hidden
    routers = model.layers * model.hidden * model.experts.count if model.experts else 0  # left out, as in publications
    multiplied = pytest.approx(2 * (active_parameters(model) - looked_up - routers), rel=1e-3)
    assert decode_flops(model, 1) == multiplied
    assert decode_bytes(model, Precision(dtype="bf16"), 1, 1) == multiplied
