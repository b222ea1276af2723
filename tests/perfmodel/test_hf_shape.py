"""Fields of config.json beyond sizes that change the step time: prediction layers, latent experts, windows, biases."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmb.errors import ConfigError
from llmb.perfmodel.block_costs import BLOCK_COSTS
from llmb.perfmodel.params import parameters
from llmb.perfmodel.shapes.hf_shape import read_hf_shape
from llmb.perfmodel.step_time.gemm_shapes import block_gemms
from llmb.perfmodel.step_time.step_setup import StepSetup

BASE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "intermediate_size": 1024,
}
MIXERS = {"kimi_linear": "self_attn"}  # attribute of a layer with linear attention
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
    kinds = ["mamba", "moe", "attention", "moe"]
    assert shape(layers_block_type=kinds, **mamba, **EXPERTS).model.pattern == "ME*E"
    assert shape(layers_block_type=kinds, num_hidden_layers=None, **mamba, **EXPERTS).model.layers == 4
    with pytest.raises(ConfigError, match="layers_block_type: rwkv is not modelled"):
        shape(layers_block_type=["rwkv", *kinds[1:]], **mamba, **EXPERTS)
    with pytest.raises(ConfigError, match="mtp_hybrid_override_pattern must be letters"):
        shape(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*X")


def test_windows_and_chunks(shape):
    kinds = ["sliding_attention", "full_attention"] * 2
    sliding = shape(layer_types=kinds, sliding_window=128, model_type="gpt_oss", **EXPERTS)
    assert (sliding.window, sliding.window_layers, sliding.expert_bias) == (128, 2, True)
    chunked = shape(layer_types=["chunked_attention"] * 3 + ["full_attention"], attention_chunk_size=8192)
    assert (chunked.window, chunked.window_layers) == (4096, 3)


def test_windows_of_mixtures_that_run_here_are_those_of_the_run(shape):
    """Without a list of layers every other one of a gpt-oss has a window, and all of a Mixtral."""
    sizes = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "sliding_window": 128, "num_experts_per_tok": 2}
    mixtures = {"gpt_oss": 2, "mixtral": 4}
    for model_type, windowed in mixtures.items():
        mixture = shape(model_type=model_type, num_local_experts=8, hidden_act="silu", **sizes)
        assert (mixture.window, mixture.window_layers) == (128, windowed)


def test_gpt2_falcon_and_dbrx_name_their_sizes_otherwise(tmp_path):
    def read(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_hf_shape(tmp_path).model

    gpt2 = read(model_type="gpt2", n_embd=1600, n_layer=48, n_head=25, vocab_size=50257)
    assert (gpt2.hidden, gpt2.layers, gpt2.heads, gpt2.ffn, gpt2.gated) == (1600, 48, 25, 6400, False)
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
              "vocab_size": 65024, "num_kv_heads": 71, "multi_query": True}  # fmt: skip
    assert read(**falcon).kv_heads == 1
    assert read(**falcon, new_decoder_architecture=True).kv_heads == 71
    dbrx = read(model_type="dbrx", d_model=6144, n_heads=48, n_layers=40, vocab_size=100352,
                attn_config={"kv_n_heads": 8},
                ffn_config={"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4})  # fmt: skip
    assert (dbrx.kv_heads, dbrx.experts.count, dbrx.experts.top_k, dbrx.experts.ffn) == (8, 16, 4, 10752)


def test_the_text_model_beside_a_vision_tower_has_the_defaults_of_its_type(tmp_path):
    """The published Gemma 3 has no vocab_size."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16}  # fmt: skip
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_hf_shape(tmp_path)
    assert (shape.model.vocab, shape.model.tied_embeddings, shape.window_layers) == (262_208, True, 5)


def test_models_without_a_gate_have_two_projections(shape):
    assert not shape(model_type="starcoder2").model.gated
    assert not shape(model_type="phi").model.gated

    assert not shape(model_type="apertus").model.gated


def test_heads_share_the_embedding_where_their_type_does(shape):
    """A file leaves tie_word_embeddings out where it has the default of its class."""
    assert shape(model_type="cohere").model.tied_embeddings
    assert not shape(model_type="cohere", tie_word_embeddings=False).model.tied_embeddings
    assert not shape(model_type="glm4").model.tied_embeddings


def test_experts_are_named_in_several_ways(shape):
    ernie = {"moe_num_experts": 16, "moe_k": 3, "moe_intermediate_size": 256, "moe_num_shared_experts": 2}
    experts = shape(**ernie, moe_layer_start_index=1, moe_layer_end_index=2, moe_layer_interval=1).model.experts
    assert (experts.count, experts.top_k, experts.shared, experts.dense_layers) == (16, 3, 2, 2)
    leading = {
        "first_k_dense_replace": 2,
        "num_dense_layers": 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "moe_layer_freq": 2,
    }
    assert {name: shape(**{name: value}, **EXPERTS).model.experts.dense_layers for name, value in leading.items()} == (
        dict.fromkeys(leading, 2)
    )
    assert shape(num_shared_experts=1, **EXPERTS).model.experts.shared == 1
    hunyuan = {"num_experts": 16, "moe_topk": [2] * 4, "num_shared_expert": [1] * 4, "moe_intermediate_size": [256] * 4}
    experts = shape(**hunyuan).model.experts
    assert (experts.top_k, experts.shared, experts.ffn) == (2, 1, 256)
    with pytest.raises(ConfigError, match="a mixture of experts needs num_experts_per_tok"):
        shape(num_experts=16, moe_intermediate_size=256)


def test_a_list_of_softmax_layers_is_no_linear_attention(shape):
    assert shape(attn_type_list=[1] * 4).model == shape().model


def test_mla_may_have_no_latent_of_queries(shape):
    """DeepSeek-V2-Lite: q_lora_rank is null, and queries are projected from the hidden state."""
    dims = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    model = shape(q_lora_rank=None, **dims).model
    assert model.mla.q_rank == 0
    queries, keys_and_values, output = 512 * 8 * 48, 512 * (64 + 16) + 64 * 8 * (32 + 32), 8 * 32 * 512
    assert BLOCK_COSTS["mla"](model).dense_weights == queries + keys_and_values + output
    setup = StepSetup(shape=shape(q_lora_rank=None, **dims), gpu="h100", gpus=1, dtype="bf16", seqlen=64, mbs=1, gbs=1)
    assert sum(gemm.weights for gemm in block_gemms(setup, "mla")) == queries + keys_and_values + output


def test_chunks_and_windows_without_a_list_of_layers(shape):
    assert (shape(attention_chunk_size=8192).window, shape(attention_chunk_size=8192).window_layers) == (4096, 3)
    sliding = shape(model_type="cohere2", sliding_window=256, sliding_window_pattern=4)
    assert (sliding.window, sliding.window_layers) == (256, 3)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]  # EXAONE 4 has both
    listed = shape(model_type="exaone4", sliding_window=256, sliding_window_pattern="LLLG", layer_types=kinds)
    assert (listed.window, listed.window_layers) == (256, 3)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"])
def test_gated_delta_nets_have_the_weights_of_transformers(tmp_path, model_type):
    """Of the published models; leaves out norms of heads and the gate of shared experts."""
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    model = read_hf_shape(tmp_path).model
    assert parameters(model) == pytest.approx(sum(weight.numel() for weight in network.parameters()), rel=1e-5)
    mixer = next(layer for layer in network.model.layers if hasattr(layer, MIXERS.get(model_type, "linear_attn")))
    matrices = [w for w in getattr(mixer, MIXERS.get(model_type, "linear_attn")).parameters() if w.dim() == 2]
    assert BLOCK_COSTS["delta_net"](model).dense_weights == sum(weight.numel() for weight in matrices)
    setup = StepSetup(shape=read_hf_shape(tmp_path), gpu="h100", gpus=1, dtype="bf16", seqlen=64, mbs=1, gbs=1)
    assert sum(gemm.weights for gemm in block_gemms(setup, "delta_net")) == sum(weight.numel() for weight in matrices)


@pytest.mark.parametrize(
    ("model_type", "fields", "blocks"),
    [
        ("bamba", {"attn_layer_indices": [9, 18, 27]}, {"attention": 3, "mamba": 29, "mlp": 32, "experts": 0}),
        (
            "granitemoehybrid",
            {"intermediate_size": 512, "layer_types": ["mamba", "mamba", "mamba", "attention"] * 8},
            {"attention": 8, "mamba": 24, "mlp": 0, "experts": 32},
        ),
        ("granitemoehybrid", {"num_local_experts": 0}, {"attention": 0, "mamba": 32, "mlp": 32, "experts": 0}),
    ],
)
def test_mamba_in_place_of_attention_has_the_weights_of_transformers(tmp_path, model_type, fields, blocks):
    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | fields, default=str))
    model = read_hf_shape(tmp_path).model
    assert {kind: model.blocks.get(kind, 0) for kind in blocks} == blocks
    assert parameters(model) == sum(weight.numel() for weight in network.parameters())


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_indexers_have_the_weights_of_transformers(tmp_path, model_type):
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    fields = config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = read_hf_shape(tmp_path).model
    assert (model.mla.index_topk, model.mla.index_dim) == (2048, 128)
    assert parameters(model) == sum(weight.numel() for weight in network.parameters())
    shared = {"indexer_types": ["full", "shared"] * (config.num_hidden_layers // 2)}
    (tmp_path / "config.json").write_text(json.dumps(fields | shared))
    with pytest.raises(ConfigError, match="indexer_types: an indexer of several layers is not modelled"):
        read_hf_shape(tmp_path)


def test_layers_of_delta_nets_are_those_of_the_list_or_three_of_four(shape):
    sizes = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
    sizes |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
    fields = {"model_type": "qwen3_next", "head_dim": 64, **sizes, **EXPERTS}
    assert shape(**fields).model.blocks == {"attention": 1, "delta_net": 3, "mlp": 0, "experts": 4}
    half = shape(**fields, layer_types=["full_attention", "linear_attention"] * 2, mtp_num_hidden_layers=1)
    assert half.model.blocks["delta_net"] == 2
    assert (half.mtp_depth, half.mtp_blocks) == (1, ("attention", "experts"))
    kimi = {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    }
    latents = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    model = shape(model_type="kimi_linear", linear_attn_config=kimi, **latents).model
    assert model.attention_pattern == "DDDF"
    assert model.blocks == {"mla": 1, "delta_net": 3, "mlp": 4, "experts": 0}
    with pytest.raises(ConfigError, match="linear_attention of model_type minimax is not modelled"):
        shape(model_type="minimax", layer_types=["linear_attention", "full_attention"] * 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"hc_mult": 4},
        {"mamba_d_state": 16, "model_type": "jamba"},
        {"is_encoder_decoder": True},
        {"layer_types": ["rwkv", "full_attention"]},
        {"layer_types": ["mamba", "full_attention"]},
        {"model_type": "bert"},
        {"model_type": "jetmoe"},
        {"attn_type_list": [1, 0, 1, 1]},
        {"conv_L_cache": 3},
        {"hidden_size_per_layer_input": 256},
        {"per_layer_config": {"1": {"head_dim": 128}}},
        {"hybrid_layer_pattern": [0, 1, 1, 1]},
        {"use_residual": True, **EXPERTS},
        {"zero_expert_num": 8, **EXPERTS},
        {"moe_layers_enum": "2,3", **EXPERTS},
        {"v_head_dim": 32},
        {"intermediate_size": [1024, 1024, 512, 512]},
    ],
)
def test_blocks_that_are_not_modelled_are_refused_by_name(shape, fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}.* is not modelled"):
        shape(**fields)


def test_the_context_is_that_of_the_config(shape):
    assert shape(max_position_embeddings=4096).max_positions == 4096
    assert shape(n_positions=1024).max_positions == 1024
    assert shape().max_positions is None
