"""What the step time depends on in config.json beyond sizes: prediction layers, latent experts, windows, biases."""

import json

import pytest

from llmb.errors import ConfigError
from llmb.perfmodel.step_time.hf_shape import read_hf_shape

BASE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "intermediate_size": 1024,
}
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


@pytest.fixture
def shape(tmp_path):
    def read(**fields):
        (tmp_path / "config.json").write_text(json.dumps(BASE | fields))
        return read_hf_shape(tmp_path)

    return read


def test_a_plain_model_has_no_extras(shape):
    plain = shape()
    assert (plain.window, plain.window_layers, plain.mtp_depth, plain.mtp_blocks) == (None, 0, 0, ())
    assert not plain.expert_bias


def test_prediction_layers_are_like_the_last_layer(shape):
    assert shape(num_nextn_predict_layers=1).mtp_blocks == ("attention", "mlp")
    mixture = shape(num_nextn_predict_layers=1, first_k_dense_replace=1, **EXPERTS)
    assert (mixture.mtp_depth, mixture.mtp_blocks, mixture.mtp_layers) == (1, ("attention", "experts"), 1)


def test_hybrids_have_their_own_pattern(shape):
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 16}
    mtp = {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"}
    hybrid = shape(hybrid_override_pattern="ME*E", moe_latent_size=128, **mamba, **mtp, **EXPERTS)
    assert hybrid.mtp_blocks == ("attention", "experts")
    assert hybrid.mtp_layers == 4
    assert hybrid.model.experts.latent == 128
    with pytest.raises(ConfigError, match="mtp_hybrid_override_pattern must be letters"):
        shape(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*X")


def test_windows_and_chunks(shape):
    kinds = ["sliding_attention", "full_attention"] * 2
    sliding = shape(layer_types=kinds, sliding_window=128, model_type="gpt_oss", **EXPERTS)
    assert (sliding.window, sliding.window_layers, sliding.expert_bias) == (128, 2, True)
    chunked = shape(layer_types=["chunked_attention"] * 3 + ["full_attention"], attention_chunk_size=8192)
    assert (chunked.window, chunked.window_layers) == (4096, 3)
