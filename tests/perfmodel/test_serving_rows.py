"""Rows of serving benchmarks: names, layouts, settings that no column tells, and rules that leave rows out."""

import pytest

from llmb.errors import ConfigError
from llmb.perfmodel.serving_time.row_rules import FASTER, IMPOSSIBLE, REPEATED, SERIES, WAITED, left_out_rows
from llmb.perfmodel.serving_time.serving_fields import build_serving_setup, parse_concurrencies, parse_serving_settings
from llmb.perfmodel.serving_time.serving_rows import default_kv_dtype, parse_serving_row, read_serving_rows
from llmb.perfmodel.shapes.model_catalog import find_model

LLAMA = {"model": "Llama-3.1-8B-Instruct-FP8", "backend": "vllm", "backend_version": "0.12.0", "system": "h200_sxm",
         "precision": "fp8", "isl": "1000", "osl": "100", "concurrency": "112", "tp": "1", "pp": "1",
         "attention_dp": "", "moe_tp": "1", "moe_ep": "1", "ttft_ms": "72", "tpot_ms": "11.25"}  # fmt: skip
DEEPSEEK = {"model": "DeepSeek-R1", "backend": "trtllm", "backend_version": "1.2.0rc6.post2", "system": "b200_sxm",
            "precision": "fp4", "isl": "1024", "osl": "8192", "concurrency": "64", "tp": "64", "pp": "1",
            "attention_dp": "1", "moe_tp": "8", "moe_ep": "8", "ttft_ms": "232", "tpot_ms": "16.3"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", 80),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", 32),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", 94),
        ("Qwen3-32B", 64),
        ("DeepSeek-R1-0528-NVFP4-v2", 61),
        ("openai/gpt-oss-20b", 24),
        ("QWEN3_32B", 64),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 40),
        ("meta-llama/Llama-2-70b-chat-hf", 80),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 48),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", 52),
        ("moonshotai/Kimi-K2-Instruct-0905", 61),
        ("google/gemma-3-27b-it", 62),
    ],
)
def test_models_are_found_by_their_names_on_hugging_face(name, layers):
    assert find_model(name).model.layers == layers


def test_products_of_expert_dimensions_are_the_ranks():
    setup = parse_serving_row(DEEPSEEK).setup
    assert (setup.tp, setup.ep, setup.moe_tp, setup.attention_dp, setup.gpus) == (8, 8, 1, 1, 8)
    replicas = parse_serving_row(DEEPSEEK | {"tp": "1", "attention_dp": "64"}).setup
    assert (replicas.tp, replicas.ep, replicas.attention_dp, replicas.gpus) == (1, 8, 8, 8)
    plain = parse_serving_row(DEEPSEEK | {"tp": "8", "moe_ep": "1"}).setup
    assert (plain.tp, plain.ep, plain.moe_tp) == (8, 1, 8)


def test_settings_of_the_recipes_fill_what_no_column_tells():
    recipe = parse_serving_row(DEEPSEEK).setup
    assert recipe.length_ratio == 0.9
    assert recipe.max_num_tokens == 64 + 1024 + 64
    assert recipe.kv_dtype == "fp8"
    other = parse_serving_row(LLAMA).setup
    assert other.length_ratio == 1.0
    assert other.dtype == "fp8"
    assert recipe.draft_tokens == 0
    assert parse_serving_row(DEEPSEEK | {"backend_version": "1.2.0rc6.post3"}).setup.draft_tokens == 1
    explicit = parse_serving_row(DEEPSEEK | {"kv_dtype": "bf16", "max_num_tokens": "4096", "length_ratio": "1"}).setup
    assert (explicit.kv_dtype, explicit.max_num_tokens, explicit.length_ratio) == ("bf16", 4096, 1.0)


@pytest.mark.parametrize("layout", [{"tp": "8"}, {"attention_dp": "8", "moe_ep": "8"}], ids=["tp", "replicas"])
def test_a_load_without_published_columns_is_that_of_predict(layout):
    """Neither the lengths and settings of InferenceMAX, nor an engine of 2025."""
    load = {"model": "deepseek-r1", "backend": "trtllm", "system": "b200", "precision": "nvfp4", "isl": "1024",
            "osl": "1024", "concurrency": "64", **layout}  # fmt: skip
    names = {"moe_ep": "ep"}
    values = parse_serving_settings([f"{names.get(name, name)}={value}" for name, value in layout.items()])
    row = parse_serving_row(load).setup
    assert row == build_serving_setup(
        find_model("deepseek-v3-671b"), "b200", "nvfp4", "trtllm", (1024, 1024), 64, values
    )


def test_a_gpu_without_fp8_units_caches_in_bf16():
    """Otherwise an A100 would hold a larger batch of quantized weights than an H100 of the same memory."""
    kinds = {gpu: default_kv_dtype("vllm", gpu, "nvfp4") for gpu in ("a100", "h100", "h200", "b200")}
    assert kinds == {"a100": "bf16", "h100": "bf16", "h200": "fp8", "b200": "fp8"}


def test_an_unversioned_row_is_of_the_older_generation():
    assert parse_serving_row(DEEPSEEK | {"backend_version": ""}).setup.generation == "trtllm_2025"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": ""}, "no model"),
        ({"model": "nobody-8b"}, "unknown model 'nobody-8b'"),
        ({"backend": "lmdeploy"}, "engine lmdeploy is not modelled"),
        ({"precision": "int4"}, "precision int4 is not modelled"),
        ({"concurrency": ""}, "no concurrency"),
        ({"isl": "many"}, "isl must be a whole number, 1 or more, got 'many'"),
        ({"ttft_ms": "-1"}, "ttft_ms must be a number above 0, got '-1'"),
        ({"tp": "36", "moe_tp": "36", "moe_ep": "1"}, "36 GPUs: disaggregated prefill and decode"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(changes, reason):
    row = parse_serving_row(DEEPSEEK | changes)
    assert row.setup is None
    assert row.reason.startswith(reason)


def test_rules_leave_rows_out_by_reason():
    tainted = parse_serving_row(LLAMA | {"isl": "8000", "concurrency": "16", "ttft_ms": "447", "tpot_ms": "15.5"}, 3)
    slower = parse_serving_row(DEEPSEEK | {"backend_version": "1.3.0"}, 4)
    speculative = parse_serving_row(DEEPSEEK | {"tpot_ms": "9.67"}, 5)
    waiting = parse_serving_row(DEEPSEEK | {"ttft_ms": "400000", "concurrency": "8"}, 6)
    rows = [parse_serving_row(LLAMA, 2), tainted, slower, speculative, waiting, parse_serving_row(DEEPSEEK, 7)]
    rows.append(parse_serving_row(DEEPSEEK, 8))
    numbers = {reason: [row.number for row in members] for reason, members in left_out_rows(rows).items()}
    assert numbers == {IMPOSSIBLE: [2], SERIES: [3], FASTER: [5], WAITED: [6], REPEATED: [8]}


def test_files_without_rows_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_serving_rows(tmp_path / "rows.csv")
    (tmp_path / "rows.csv").write_text("model,backend\n")
    with pytest.raises(ConfigError, match="has no rows"):
        read_serving_rows(tmp_path / "rows.csv")


def test_concurrencies_are_numbers_lists_and_ranges():
    assert parse_concurrencies("64") == [64]
    assert parse_concurrencies("1,4,16..128") == [1, 4, 16, 32, 64, 128]
    for text in ("0", "8..4", "a", "1,,2", "99999999"):
        with pytest.raises(ConfigError, match="--concurrency: expected clients"):
            parse_concurrencies(text)


def test_settings_are_checked():
    assert parse_serving_settings(["tp=2", "memory_fraction=0.95", "kv_dtype=FP8"]) == {
        "tp": 2, "memory_fraction": 0.95, "kv_dtype": "fp8",
    }  # fmt: skip
    for text, message in (
        ("tp", "expected FIELD=VALUE"),
        ("mbs=1", "unknown field of --set 'mbs'"),
        ("tp=0", "tp must be a whole number"),
        ("length_ratio=2", "length_ratio must be above 0"),
        ("kv_dtype=int8", "unknown value of kv_dtype"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_serving_settings([text])


def test_experts_follow_the_ranks_unless_given():
    def layout(**values):
        setup = build_serving_setup(find_model("deepseek-v3"), "b200", "fp8", "sglang", (8, 8), 1, values)
        return setup.ep, setup.moe_tp

    assert layout(tp=8) == (1, 8)
    assert layout(tp=8, ep=8) == (8, 1)
    assert layout(tp=8, moe_tp=2) == (4, 2)
    assert layout(attention_dp=8, ep=8) == (8, 1)
