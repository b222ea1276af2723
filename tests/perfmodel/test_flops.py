"""The cost formulas against printed worked examples, published constants and real models."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_models import ALL, DEEPSEEK, GROK, LLAMA_1B, LLAMA_8B, LLAMA_70B, LLAMA_405B, NEMOTRON

from llmb.config.spec import (
    Experts,
    Latent,
    Mamba,
    Model,
    Precision,
)
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import flops

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
    assert flops.parameters(model) == expected


def test_parameter_counts_the_names_promise() -> None:
    assert flops.parameters(NEMOTRON) == pytest.approx(56e9, rel=0.01)
    assert flops.parameters(GROK) == pytest.approx(314e9, rel=0.01)
    assert flops.active_parameters(DEEPSEEK) == pytest.approx(37e9, rel=0.02)
    assert flops.active_parameters(LLAMA_8B) == flops.parameters(LLAMA_8B)


@pytest.mark.parametrize("model", ALL, ids=lambda m: m.name)
def test_breakdowns_sum_to_their_totals(model: Model) -> None:
    assert sum(flops.parameter_breakdown(model).values()) == flops.parameters(model)
    parts = flops.flops_breakdown(model, 4096, "full")
    assert sum(parts.values()) == flops.train_flops_per_sequence(model, 4096, "full")
    assert 3 * flops.forward_flops_per_sequence(model, 4096, "full") == pytest.approx(sum(parts.values()), rel=1e-15)


def _numel(model) -> int:
    """Parameters, and the router's correction bias, which transformers keeps as a buffer."""
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
    assert flops.parameters(small) == _numel(real)


def test_parameters_of_a_real_deepseek() -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    small = replace(
        DEEPSEEK, layers=4, hidden=64, ffn=112, heads=4, kv_heads=4, head_dim=24, vocab=256,
        experts=Experts(count=8, top_k=2, ffn=48, shared=2, dense_layers=1, groups=4, top_groups=2, score="sigmoid"),
        latent=Latent(q_rank=40, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=20),
    )  # fmt: skip
    real = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            num_hidden_layers=4, hidden_size=64, intermediate_size=112, moe_intermediate_size=48,
            num_attention_heads=4, num_key_value_heads=4, vocab_size=256, n_routed_experts=8, n_shared_experts=2,
            num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=40, kv_lora_rank=32,
            qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20,
        )
    )  # fmt: skip
    assert flops.parameters(small) == _numel(real)


def test_parameters_of_a_real_nemotron_h() -> None:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    small = replace(
        NEMOTRON, layers=6, hidden=64, ffn=144, heads=4, kv_heads=2, head_dim=16, vocab=256, pattern="M-M*M-",
        mamba=Mamba(heads=8, head_dim=16, groups=2, state=24, chunk=16, conv=4),
    )  # fmt: skip
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    real = NemotronHForCausalLM(
        NemotronHConfig(
            layers_block_type=[kinds[letter] for letter in "M-M*M-"], hidden_size=64, intermediate_size=144,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256, mamba_num_heads=8,
            mamba_head_dim=16, n_groups=2, ssm_state_size=24, chunk_size=16, conv_kernel=4, expand=2,
        )
    )  # fmt: skip
    assert flops.parameters(small) == _numel(real)


# FLOPs


def test_nemotron_h_worked_example() -> None:
    """The Nemotron-H document's own numbers; it counts attention in full and prints MACs under the name flops."""
    assert flops.forward_macs(NEMOTRON, 8192, "full") == {
        "mlp": 237_494_511_599_616,
        "attention": 23_364_622_090_240,
        "mamba": 199_690_209_460_224,
        "lm_head": 8_796_093_022_208,
    }
    assert f"{flops.train_flops_per_sequence(NEMOTRON, 8192, 'full'):.3e}" == "2.816e+15"


def test_grok1_worked_example() -> None:
    """The Grok-1 document's own numbers, FLOPs a token; it counts attention at half and no router."""
    per_token = {part: flops / 8192 for part, flops in flops.flops_breakdown(GROK, 8192, "causal").items()}
    assert per_token == {"attention": 53_150_220_288, "experts": 463_856_467_968, "lm_head": 4_728_029_184}
    assert f"{flops.train_flops_per_sequence(GROK, 8192, 'causal'):.2E}" == "4.27E+15"


@pytest.mark.parametrize(
    ("model", "seqlen", "printed"),
    [
        (LLAMA_405B, 8192, "2524"),
        (LLAMA_70B, 8192, "449"),
        (LLAMA_8B, 8192, "51.5"),
        (LLAMA_8B, 8192, "51.47"),
        (LLAMA_8B, 65536, "96.57"),
    ],
)
def test_published_gflop_per_token(model: Model, seqlen: int, printed: str) -> None:
    digits = len(printed.partition(".")[2])
    assert f"{flops.train_flops_per_token(model, seqlen, 'causal') / 1e9:.{digits}f}" == printed


def test_deepseek_published_gflop_per_token() -> None:
    """249.7 is printed for DeepSeek-V3 without its prediction layer: ours is 0.04 % more, with the router 0.3 %."""
    assert flops.train_flops_per_token(DEEPSEEK, 4096, "causal") / 1e9 == pytest.approx(249.7, rel=5e-4)


@pytest.mark.parametrize(("model", "percent"), [(GROK, "0.004"), (DEEPSEEK, "0.3")])
def test_router_left_out_is_as_small_as_stated(model: Model, percent: str) -> None:
    left_out = 6 * flops.parameter_breakdown(model)["router"] / flops.train_flops_per_token(model, 4096, "causal")
    assert f"{100 * left_out:.{len(percent) - 2}f}" == percent


def test_llama_equals_six_times_matrix_weights_plus_attention() -> None:
    weights = flops.parameters(LLAMA_8B) - flops.parameter_breakdown(LLAMA_8B)["embedding"] - 65 * 4096
    assert flops.train_flops_per_token(LLAMA_8B, 8192, "causal") == 6 * weights + 6 * 32 * 4096 * 8192
    assert flops.train_flops_per_token(LLAMA_8B, 8192, "full") == 6 * weights + 12 * 32 * 4096 * 8192


@pytest.mark.parametrize(
    ("model", "percent"),
    [(LLAMA_8B, "12.5"), (LLAMA_70B, "7.2"), (LLAMA_405B, "4.0"), (GROK, "3.7"), (NEMOTRON, "1.2")],
)
def test_what_the_convention_is_worth_at_8192(model: Model, percent: str) -> None:
    causal, full = (flops.train_flops_per_token(model, 8192, convention) for convention in ("causal", "full"))  # type: ignore[arg-type]
    assert f"{100 * (full / causal - 1):.1f}" == percent


def test_tied_head_still_costs_flops() -> None:
    untied = replace(LLAMA_1B, tied_embeddings=False)
    assert flops.forward_macs(LLAMA_1B, 512, "full") == flops.forward_macs(untied, 512, "full")


def test_hardware_flops_match_the_published_ratio() -> None:
    """Out-of-core, Llama 8B at 8,192 on 75/78 GiB: MFU 0.594, HFU 0.606, nothing recomputed but q x k (0.020)."""
    model_flops = flops.train_flops_per_sequence(LLAMA_8B, 8192, "causal")
    done = flops.hardware_flops_per_sequence(LLAMA_8B, 8192, "causal", 0)
    assert f"{1 - model_flops / done:.3f}" == "0.020"
    assert f"{0.594 * done / model_flops:.3f}" == "0.606"


def test_full_recompute_adds_one_forward_without_the_head() -> None:
    none = flops.hardware_flops_per_sequence(LLAMA_8B, 8192, "causal", 0)
    every = flops.hardware_flops_per_sequence(LLAMA_8B, 8192, "causal", 32)
    head = 2 * 8192 * 4096 * 128256
    assert every - none == flops.forward_flops_per_sequence(LLAMA_8B, 8192, "causal") - head


@pytest.mark.parametrize("recompute_layers", [-1, 33])
def test_more_recomputed_layers_than_there_are(recompute_layers: int) -> None:
    with pytest.raises(ConfigError, match="0 to 32"):
        flops.hardware_flops_per_sequence(LLAMA_8B, 8192, "causal", recompute_layers)


@pytest.mark.parametrize("seqlen", [0, -1, 1.5, float("nan")])
def test_nonsense_lengths_are_named(seqlen: int) -> None:
    with pytest.raises(ConfigError, match="seqlen must be"):
        flops.train_flops_per_token(LLAMA_8B, seqlen, "causal")
    with pytest.raises(ConfigError, match="context must be"):
        flops.decode_flops(LLAMA_8B, seqlen)


def test_wrong_names_list_the_right_ones() -> None:
    with pytest.raises(UnknownName, match="causal, full"):
        flops.train_flops_per_token(LLAMA_8B, 8192, "half")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="bf16"):
        flops.kv_bytes_per_token(LLAMA_8B, "int3")


@pytest.mark.parametrize("missing", ["mamba", "latent", "experts"])
def test_a_block_without_its_numbers(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"needs the field {missing}"):
        flops.BLOCKS["latent_attention" if missing == "latent" else missing](LLAMA_8B)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (replace(LLAMA_8B, layers=0), "layers must be 1 or more"),
        (replace(NEMOTRON, pattern="M-*"), "must be 118 letters of M"),
        (replace(NEMOTRON, layers=3, pattern="M-E"), "must be 3 letters of M"),
        (replace(NEMOTRON, mamba=Mamba(heads=1, head_dim=1, groups=1, state=1, chunk=0)), "chunk must be 1 or more"),
    ],
)
def test_broken_models_are_named(broken: Model, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        flops.parameters(broken)


@settings(deadline=None)  # the machine may be shared
@given(st.sampled_from(ALL), st.integers(1, 2**20))
def test_causal_is_between_half_of_full_and_full(model: Model, seqlen: int) -> None:
    causal = flops.train_flops_per_token(model, seqlen, "causal")
    full = flops.train_flops_per_token(model, seqlen, "full")
    assert full / 2 < causal < full


# Inference


def test_decode_reads_every_active_matrix_once() -> None:
    weights = flops.train_flops_per_token(LLAMA_8B, 8192, "full") / 6 - 2 * 32 * 4096 * 8192
    assert flops.decode_flops(LLAMA_8B, 1000) == 2 * weights + 2 * 2 * 32 * 4096 * 1000


def test_a_prompt_costs_what_its_tokens_would_cost_one_by_one() -> None:
    """For attention, position by position: the same MACs, but for half the diagonal and the heads not needed."""
    isl, pair_flops, head_flops = 64, 2 * 2 * 32 * 4096, 2 * 4096 * 128256
    one_by_one = sum(flops.decode_flops(LLAMA_8B, context) for context in range(1, isl + 1))
    assert flops.prefill_flops(LLAMA_8B, isl, "causal") == one_by_one - pair_flops * isl / 2 - head_flops * (isl - 1)


def test_latent_cache_is_compressed_but_its_decode_is_wider() -> None:
    longer = flops.decode_flops(DEEPSEEK, 1001) - flops.decode_flops(DEEPSEEK, 1000)
    assert longer == 2 * 61 * 128 * (512 + 64 + 512)
    assert flops.kv_bytes_per_token(DEEPSEEK, "bf16") == 61 * (512 + 64) * 2
    assert flops.kv_bytes_per_token(DEEPSEEK, "fp8") == 61 * (512 + 2 * 64)  # the rotated key stays in bf16


def test_kv_cache_of_plain_and_hybrid_models() -> None:
    assert flops.kv_bytes_per_token(LLAMA_8B, "bf16") == flops.kv_bytes_per_token(LLAMA_8B, None) == 131_072
    assert flops.kv_bytes_per_token(NEMOTRON, "bf16") == 10 * 2 * 1024 * 2
    assert flops.state_bytes_per_sequence(NEMOTRON) == 54 * 4 * (16384 * 256 + 3 * (16384 + 4096))
    assert flops.state_bytes_per_sequence(LLAMA_8B) == 0


def test_decode_bytes() -> None:
    bf16 = Precision(dtype="bf16")
    dense = flops.decode_bytes(LLAMA_8B, bf16, 1, 1000)
    assert dense == 2 * (6_979_321_856 + 525_336_576) + 1000 * 131_072
    assert flops.decode_bytes(LLAMA_8B, bf16, 8, 1000) == dense + 7 * 1000 * 131_072
    experts = flops.parameter_breakdown(DEEPSEEK)["experts"]
    one, many = (flops.decode_bytes(DEEPSEEK, bf16, batch, 1) for batch in (1, 10_000))
    assert one < 2 * flops.active_parameters(DEEPSEEK)
    assert many - 9_999 * flops.kv_bytes_per_token(DEEPSEEK, None) - one == pytest.approx(2 * experts * 248 / 257)
    state = flops.state_bytes_per_sequence(NEMOTRON)
    assert flops.decode_bytes(NEMOTRON, bf16, 2, 1) - flops.decode_bytes(NEMOTRON, bf16, 1, 1) == 2 * state + 40_960
