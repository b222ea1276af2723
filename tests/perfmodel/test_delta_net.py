"""Gated DeltaNet layers in predictions: published rows without constants of their own, and their cost in serving."""

from dataclasses import replace

import pytest

from llmb.errors import ConfigError
from llmb.perfmodel.flops import forward_macs
from llmb.perfmodel.params import kv_bytes_per_token, state_bytes_per_sequence
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.predictor import model_flops, predict
from llmb.perfmodel.step_time.published_rows import parse_row
from llmb.perfmodel.step_time.step_setup import StepSetup

# Verification cards of Megatron Bridge of August 2026; the first names no sequence length, its tokens/s do.
MIXTURE = {
    "source": "NVIDIA-NeMo/Megatron-Bridge", "model": "qwen3_6_35b_a3b", "gpu": "h100", "dtype": "bf16", "gpus": "16",
    "gbs": "512", "mbs": "1", "tp": "1", "pp": "2", "cp": "1", "ep": "8", "etp": "1",
    "cuda_graphs": "transformer_engine", "step_time_s": "22.2712", "tokens_per_s_per_gpu": "5885.264",
    "notes": "verified=2026-08-05",
}  # fmt: skip
DENSE = {
    "source": "NVIDIA-NeMo/Megatron-Bridge", "model": "qwen3_8_27b", "gpu": "gb200", "dtype": "bf16", "gpus": "16",
    "seqlen": "4096", "gbs": "32", "mbs": "2", "tp": "2", "pp": "1", "cp": "1", "step_time_s": "1.67946",
    "notes": "verified=2026-08-20",
}  # fmt: skip


@pytest.mark.parametrize(("cells", "gflops"), [(MIXTURE, 23.04), (DENSE, 167.94)])
def test_published_rows_are_predicted(cells, gflops):
    row = parse_row(cells)
    assert row.setup.seqlen == 4096
    assert predict(row.setup).step_time_s == pytest.approx(row.step_time_s, rel=0.05)
    assert model_flops(row.setup) / row.setup.gbs / 4096 / 1e9 == pytest.approx(gflops, rel=0.02)


def test_a_sequence_length_must_agree_with_the_measured_figures():
    assert parse_row(MIXTURE | {"tokens_per_s_per_gpu": "5850"}).reason == "no seqlen"
    assert parse_row(MIXTURE | {"tokens_per_s_per_gpu": ""}).reason == "no seqlen"


def test_flops_of_the_delta_rule_grow_with_tokens_and_those_of_attention_with_pairs():
    model = find_model("qwen3-next-80b-a3b").model
    short, long = (forward_macs(model, seqlen, "causal") for seqlen in (4096, 8192))
    assert long["delta_net"] == 2 * short["delta_net"]
    assert long["attention"] > 2 * short["attention"]
    layer = 32 * (64 * (3 * 128 + 2 * 128) + 3 * 128 * 128)  # inside of one layer, by token
    weights = 2048 * (2 * 2048 + 3 * 4096 + 2 * 32)
    assert short["delta_net"] == 36 * 4096 * (weights + layer)


def test_a_request_has_a_state_in_delta_nets_and_a_cache_in_attention():
    model = find_model("qwen3-next-80b-a3b").model
    assert kv_bytes_per_token(model, "bf16") == 12 * 2 * 2 * 256 * 2
    assert state_bytes_per_sequence(model) == 36 * (32 * 128 * 128 + 3 * (2 * 2048 + 4096)) * 4


def test_long_contexts_slow_decoding_less_than_with_attention_alone():
    def tpot(shape, isl):
        return predict_serving(
            ServingSetup(shape=shape, gpu="h200", dtype="bf16", isl=isl, osl=256, concurrency=1)
        ).tpot_ms

    hybrid = find_model("qwen3.5-9b")
    full = replace(hybrid, model=replace(hybrid.model, delta_net=None, attention_pattern="F"))
    growth = [tpot(shape, 32768) - tpot(shape, 1024) for shape in (hybrid, full)]
    assert 0 < growth[0] < growth[1] / 3


def test_the_native_engine_is_not_predicted_with_blocks_that_it_has_not():
    shape = find_model("qwen3.5-9b")
    message = "the native engine has no delta_net .*, no output_gate .*; predict it for another engine"
    with pytest.raises(ConfigError, match=message):
        StepSetup(shape=shape, gpu="h200", gpus=1, dtype="bf16", seqlen=4096, mbs=1, gbs=1, engine="native")
    with pytest.raises(ConfigError, match=message):
        ServingSetup(shape=shape, gpu="h200", dtype="bf16", isl=128, osl=128, concurrency=1, engine="native")
