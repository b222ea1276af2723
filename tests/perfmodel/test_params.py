"""Parameter and byte counts against published figures and real models."""

from dataclasses import replace

import pytest
from published_models import DEEPSEEK, GROK, LLAMA_1B, LLAMA_8B, LLAMA_70B, LLAMA_405B, NEMOTRON

from llmb.config.spec import (
    MambaConfig,
    MlaConfig,
    Model,
    MoEConfig,
    Precision,
)
from llmb.perfmodel import params

# Parameters


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LLAMA_1B, 1_235_814_400),
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496),
        (LLAMA_405B, 405_853_388_800),
        (DEEPSEEK, 671_026_419_200),
    ],
)
def test_published_parameter_counts(model: Model, expected: int) -> None:
    assert params.parameters(model) == expected


def test_parameter_counts_match_model_names() -> None:
    assert params.parameters(NEMOTRON) == pytest.approx(56e9, rel=0.01)
    assert params.parameters(GROK) == pytest.approx(314e9, rel=0.01)
    assert params.active_parameters(DEEPSEEK) == pytest.approx(37e9, rel=0.02)
    assert params.active_parameters(LLAMA_8B) == params.parameters(LLAMA_8B)


def _numel(model) -> int:
    """Count parameters, and the router's correction bias, which transformers stores as a buffer."""
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(p.numel() for p in model.parameters()) + biases


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_a_real_llama(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = replace(
        LLAMA_8B, layers=3, hidden=96, ffn=200, heads=6, kv_heads=2, head_dim=16, vocab=320, tied_embeddings=tied
    )
    real = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=3, hidden_size=96, intermediate_size=200, num_attention_heads=6, num_key_value_heads=2,
            head_dim=16, vocab_size=320, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    assert params.parameters(small) == _numel(real)


def test_parameters_of_a_real_deepseek() -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    small = replace(
        DEEPSEEK, layers=4, hidden=64, ffn=112, heads=4, kv_heads=4, head_dim=24, vocab=256,
        experts=MoEConfig(count=8, top_k=2, ffn=48, shared=2, dense_layers=1, groups=4, top_groups=2, score="sigmoid"),
        mla=MlaConfig(q_rank=40, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=20),
    )  # fmt: skip
    real = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            num_hidden_layers=4, hidden_size=64, intermediate_size=112, moe_intermediate_size=48,
            num_attention_heads=4, num_key_value_heads=4, vocab_size=256, n_routed_experts=8, n_shared_experts=2,
            num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=40, kv_lora_rank=32,
            qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20,
        )
    )  # fmt: skip
    assert params.parameters(small) == _numel(real)


def test_parameters_of_a_real_nemotron_h() -> None:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    small = replace(
        NEMOTRON, layers=6, hidden=64, ffn=144, heads=4, kv_heads=2, head_dim=16, vocab=256, pattern="M-M*M-",
        mamba=MambaConfig(heads=8, head_dim=16, groups=2, state=24, chunk=16, conv=4),
    )  # fmt: skip
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    real = NemotronHForCausalLM(
        NemotronHConfig(
            layers_block_type=[kinds[letter] for letter in "M-M*M-"], hidden_size=64, intermediate_size=144,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256, mamba_num_heads=8,
            mamba_head_dim=16, n_groups=2, ssm_state_size=24, chunk_size=16, conv_kernel=4, expand=2,
        )
    )  # fmt: skip
    assert params.parameters(small) == _numel(real)


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
