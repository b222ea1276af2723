"""FLOP counts against worked examples, published constants and closed forms."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_models import ALL, DEEPSEEK, GPT_OSS_20B, GROK, LLAMA_1B, LLAMA_8B, LLAMA_70B, LLAMA_405B, NEMOTRON

from llmb.config.model import MambaConfig, Model
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel import block_costs, flops, params


def flops_per_token(model: Model, seqlen: int, convention: flops.Convention) -> float:
    """Return the training FLOPs per token, averaged over the positions of a sequence."""
    return flops.train_flops_per_sequence(model, seqlen, convention) / seqlen


@pytest.mark.parametrize("model", ALL, ids=lambda m: m.name)
def test_breakdowns_sum_to_their_totals(model: Model) -> None:
    assert sum(params.parameter_breakdown(model).values()) == params.parameters(model)
    parts = flops.flops_breakdown(model, 4096, "full")
    assert sum(parts.values()) == flops.train_flops_per_sequence(model, 4096, "full")


def test_nemotron_h_worked_example() -> None:
    """Numbers of NVIDIA's Nemotron-H recipe, which counts full attention and prints MACs under the name flops."""
    assert flops.forward_macs(NEMOTRON, 8192, "full") == {
        "mlp": 237_494_511_599_616,
        "attention": 23_364_622_090_240,
        "mamba": 199_690_209_460_224,
        "lm_head": 8_796_093_022_208,
    }
    assert f"{flops.train_flops_per_sequence(NEMOTRON, 8192, 'full'):.3e}" == "2.816e+15"


def test_grok1_worked_example() -> None:
    """Numbers of NVIDIA's Grok-1 recipe in FLOPs per token; it counts causal attention and no router."""
    per_token = {part: flops / 8192 for part, flops in flops.flops_breakdown(GROK, 8192, "causal").items()}
    assert per_token == {"attention": 53_150_220_288, "experts": 463_856_467_968, "lm_head": 4_728_029_184}
    assert f"{flops.train_flops_per_sequence(GROK, 8192, 'causal'):.2E}" == "4.27E+15"


@pytest.mark.parametrize(
    ("model", "seqlen", "printed"),
    [
        (LLAMA_405B, 8192, "2524"),
        (LLAMA_70B, 8192, "449"),
        (LLAMA_8B, 8192, "51.47"),
        (LLAMA_8B, 65536, "96.57"),
    ],
)
def test_published_gflop_per_token(model: Model, seqlen: int, printed: str) -> None:
    digits = len(printed.partition(".")[2])
    assert f"{flops_per_token(model, seqlen, 'causal') / 1e9:.{digits}f}" == printed


def test_deepseek_published_gflop_per_token() -> None:
    """249.7 is printed for DeepSeek-V3 without its prediction layer: ours is 0.04 % more, with the router 0.3 %."""
    assert flops_per_token(DEEPSEEK, 4096, "causal") / 1e9 == pytest.approx(249.7, rel=5e-4)


@pytest.mark.parametrize(("model", "percent"), [(GROK, "0.004"), (DEEPSEEK, "0.3")])
def test_router_flops_left_out_are_as_small_as_stated(model: Model, percent: str) -> None:
    left_out = 6 * params.parameter_breakdown(model)["router"] / flops_per_token(model, 4096, "causal")
    assert f"{100 * left_out:.{len(percent) - 2}f}" == percent


def test_llama_equals_six_times_matrix_weights_plus_attention() -> None:
    weights = params.parameters(LLAMA_8B) - params.parameter_breakdown(LLAMA_8B)["embedding"] - 65 * 4096
    assert flops_per_token(LLAMA_8B, 8192, "causal") == 6 * weights + 6 * 32 * 4096 * 8192
    assert flops_per_token(LLAMA_8B, 8192, "full") == 6 * weights + 12 * 32 * 4096 * 8192


@pytest.mark.parametrize(
    ("model", "percent"),
    [(LLAMA_8B, "12.5"), (LLAMA_70B, "7.2"), (LLAMA_405B, "4.0"), (GROK, "3.7"), (NEMOTRON, "1.2")],
)
def test_effect_of_the_attention_convention_at_8192(model: Model, percent: str) -> None:
    causal, full = (flops_per_token(model, 8192, convention) for convention in ("causal", "full"))  # type: ignore[arg-type]
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
    assert every - none == flops.train_flops_per_sequence(LLAMA_8B, 8192, "causal") / 3 - head


@pytest.mark.parametrize("recompute_layers", [-1, 33])
def test_more_recomputed_layers_than_the_model_has(recompute_layers: int) -> None:
    with pytest.raises(ConfigError, match="0 to 32"):
        flops.hardware_flops_per_sequence(LLAMA_8B, 8192, "causal", recompute_layers)


@pytest.mark.parametrize("seqlen", [0, -1, 1.5, float("nan")])
def test_invalid_lengths_are_rejected(seqlen: int) -> None:
    with pytest.raises(ConfigError, match="seqlen must be"):
        flops_per_token(LLAMA_8B, seqlen, "causal")
    with pytest.raises(ConfigError, match="context must be"):
        flops.decode_flops(LLAMA_8B, seqlen)


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(UnknownName, match="causal, full"):
        flops_per_token(LLAMA_8B, 8192, "half")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="bf16"):
        params.kv_bytes_per_token(LLAMA_8B, "int3")


@pytest.mark.parametrize("missing", ["mamba", "mla", "experts"])
def test_block_without_its_configuration_is_rejected(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"needs the field {missing}"):
        block_costs.BLOCK_COSTS[missing](LLAMA_8B)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (replace(LLAMA_8B, layers=0), "layers must be 1 or more"),
        (replace(NEMOTRON, pattern="M-*"), "must be 118 letters of M"),
        (replace(NEMOTRON, layers=3, pattern="M-X"), "must be 3 letters of M"),
        (replace(NEMOTRON, layers=3, pattern="M-E"), "an expert block needs the field experts"),
        (
            replace(NEMOTRON, mamba=MambaConfig(heads=1, head_dim=1, groups=1, state=1, chunk=0)),
            "chunk must be 1 or more",
        ),
    ],
)
def test_invalid_models_are_rejected(broken: Model, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        params.parameters(broken)


@given(st.sampled_from(ALL), st.integers(1, 2**20))
def test_causal_is_between_half_of_full_and_full(model: Model, seqlen: int) -> None:
    causal = flops_per_token(model, seqlen, "causal")
    full = flops_per_token(model, seqlen, "full")
    assert full / 2 < causal < full


# Inference


def test_decode_uses_every_active_weight_once() -> None:
    weights = flops_per_token(LLAMA_8B, 8192, "full") / 6 - 2 * 32 * 4096 * 8192
    assert flops.decode_flops(LLAMA_8B, 1000) == 2 * weights + 2 * 2 * 32 * 4096 * 1000


def test_prefill_costs_as_much_as_decoding_its_tokens() -> None:
    """Position by position: the same MACs, but for half the diagonal and the LM heads that are not needed."""
    isl, pair_flops, head_flops = 64, 2 * 2 * 32 * 4096, 2 * 4096 * 128256
    one_by_one = sum(flops.decode_flops(LLAMA_8B, context) for context in range(1, isl + 1))
    assert flops.prefill_flops(LLAMA_8B, isl, "causal") == one_by_one - pair_flops * isl / 2 - head_flops * (isl - 1)


def test_mla_cache_is_compressed_but_its_decode_costs_more() -> None:
    longer = flops.decode_flops(DEEPSEEK, 1001) - flops.decode_flops(DEEPSEEK, 1000)
    assert longer == 2 * 61 * 128 * (512 + 64 + 512)
    assert params.kv_bytes_per_token(DEEPSEEK, "bf16") == 61 * (512 + 64) * 2
    assert params.kv_bytes_per_token(DEEPSEEK, "fp8") == 61 * (512 + 2 * 64)  # the rotated key stays in bf16


def test_sliding_windows_limit_the_pairs() -> None:
    full, windowed = (flops.attention_pairs(4096, "causal", window) for window in (None, 128))
    assert full == flops.attention_pairs(4096, "causal", 4096) == 4096**2 / 2
    assert windowed == 4096 * 128 - 128**2 / 2  # but for half a token of each query: 1 + 2 + ... + 128 + 128 + ...
    assert flops.attention_pairs(4096, "full", 128) == 4096 * 128
    attention = flops.forward_macs(GPT_OSS_20B, 4096, "causal")["attention"]
    weights = 2 * 2880 * (64 + 8) * 64
    assert attention == 24 * 4096 * weights + 2 * 64 * 64 * 12 * (full + windowed)
    decode = [flops.decode_flops(GPT_OSS_20B, context) for context in (128, 1128)]
    assert decode[1] - decode[0] == 2 * 12 * 1000 * 2 * 64 * 64  # full layers only
