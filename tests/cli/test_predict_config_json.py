"""`llmb-run predict --model` with a config.json of Hugging Face."""

import json

import pytest

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip


def test_a_config_json_is_the_model_it_describes(llmb_run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    args = ["--gpu-type", "h100", "--scale", "8", "--json"]
    described = json.loads(llmb_run("predict", "--model", str(path), *args)[1])
    named = json.loads(llmb_run("predict", "--model", "qwen3-8b", *args)[1])
    assert described["step_time_s"] == pytest.approx(named["step_time_s"])


def test_a_config_json_with_experts_and_mla(llmb_run, tmp_path):
    path = tmp_path / "config.json"
    mla = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
    sizes = {"hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432, "num_attention_heads": 64,
             "vocab_size": 163840, "first_k_dense_replace": 1, "model_type": "kimi_k2"}  # fmt: skip
    path.write_text(json.dumps(sizes | mla | experts))
    args = ["--gpu-type", "gb300", "--scale", "256", "--set", "pp=4", "--set", "ep=64", "--json"]
    described = json.loads(llmb_run("predict", "--model", str(path), *args)[1])
    named = json.loads(llmb_run("predict", "--model", "kimi-k2", *args)[1])
    assert described["step_time_s"] == pytest.approx(named["step_time_s"], rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number, 1 or more, got 0"),
        ({"intermediate_size": "x"}, "intermediate_size='x' is not a whole number"),
        ({"q_lora_rank": 8, "kv_lora_rank": 8}, "qk_nope_head_dim must be a whole number"),
        ({"layer_types": 3}, "layer_types: expected a list, got 3"),
    ],
)
def test_a_wrong_field_of_config_json_is_one_line(llmb_run, tmp_path, fields, message):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"intermediate_size": 128} | fields))
    code, out, err = llmb_run("predict", "--model", tmp_path, "--gpu-type", "h100", "--scale", "8")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 64}, "num_key_value_heads=64 does not divide 32 attention heads"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 9},
            "9 experts per token of 8; at most 8",
        ),
    ],
)
def test_a_config_json_that_contradicts_itself_is_refused(llmb_run, tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B | changes))
    code, out, err = llmb_run("predict", "--model", path, "--gpu-type", "h100", "--scale", "8")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err
