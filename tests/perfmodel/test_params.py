"""Parameter and byte counts against published figures; real models: tests/models/test_architectures.py."""

import pytest
from published_models import (
    DEEPSEEK,
    GPT_OSS_20B,
    GPT_OSS_120B,
    GROK,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MIXTRAL,
    NEMOTRON,
    QWEN3_30B,
)

from llmb.config.model import Model
from llmb.config.spec import Precision
from llmb.perfmodel import params


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LLAMA_1B, 1_235_814_400),
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496),
        (LLAMA_405B, 405_853_388_800),
        (DEEPSEEK, 671_026_419_200),
        (MIXTRAL, 46_702_792_704),
        (QWEN3_30B, 30_532_122_624),
        (GPT_OSS_20B, 20_914_757_184),
        (GPT_OSS_120B, 116_829_156_672),
    ],
)
def test_published_parameter_counts(model: Model, expected: int) -> None:
    assert params.parameters(model) == expected


def test_parameter_counts_match_model_names() -> None:
    assert params.parameters(NEMOTRON) == pytest.approx(56e9, rel=0.01)
    assert params.parameters(GROK) == pytest.approx(314e9, rel=0.01)
    assert params.active_parameters(DEEPSEEK) == pytest.approx(37e9, rel=0.02)
    assert params.active_parameters(LLAMA_8B) == params.parameters(LLAMA_8B)
    # As the model card of gpt-oss counts: without the embedding.
    for model, active in ((GPT_OSS_20B, 3.61e9), (GPT_OSS_120B, 5.13e9)):
        assert params.active_parameters(model) - model.vocab * model.hidden == pytest.approx(active, rel=2e-3)
    assert params.active_parameters(MIXTRAL) == pytest.approx(12.9e9, rel=5e-3)
    assert params.active_parameters(QWEN3_30B) == pytest.approx(3.3e9, rel=0.02)


def test_kv_cache_of_plain_and_hybrid_models() -> None:
    assert params.kv_bytes_per_token(LLAMA_8B, "bf16") == params.kv_bytes_per_token(LLAMA_8B, None) == 131_072
    assert params.kv_bytes_per_token(NEMOTRON, "bf16") == 10 * 2 * 1024 * 2
    assert params.state_bytes_per_sequence(NEMOTRON) == 54 * 4 * (16384 * 256 + 3 * (16384 + 4096))
    assert params.state_bytes_per_sequence(LLAMA_8B) == 0


def test_decode_bytes() -> None:
    bf16 = Precision(dtype="bf16")
    dense = params.decode_bytes(LLAMA_8B, bf16, 1, 1000)
    assert dense == 2 * (6_979_321_856 + 525_336_576) + 1000 * 131_072
    assert params.decode_bytes(LLAMA_8B, bf16, 8, 1000) == dense + 7 * 1000 * 131_072
    experts = params.parameter_breakdown(DEEPSEEK)["experts"]
    item, many = (params.decode_bytes(DEEPSEEK, bf16, batch, 1) for batch in (1, 10_000))
    assert item < 2 * params.active_parameters(DEEPSEEK)
    assert many - 9_999 * params.kv_bytes_per_token(DEEPSEEK, None) - item == pytest.approx(2 * experts * 248 / 257)
    state = params.state_bytes_per_sequence(NEMOTRON)
    assert params.decode_bytes(NEMOTRON, bf16, 2, 1) - params.decode_bytes(NEMOTRON, bf16, 1, 1) == 2 * state + 40_960
