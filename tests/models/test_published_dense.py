"""Published dense models: their config.json, as far as it matters, and their numbers of parameters."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmb.config.huggingface.hf_config import from_hf_config, to_hf_config
from llmb.models.architectures import build_model
from llmb.perfmodel.params import parameters


def _config(model_type: str, sizes: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = dict(zip((*names, "num_key_value_heads"), sizes, strict=True))
    defaults = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False}
    return {"model_type": model_type, **defaults, **config, **fields}


GEMMA: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
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
