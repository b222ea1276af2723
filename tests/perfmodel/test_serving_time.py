"""The serving predictor: published rows in aggregate, bounds, monotonicity, layouts and refusals."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.errors import ConfigError
from llmb.perfmodel.serving_time.cache_slots import cache_slots, request_bytes
from llmb.perfmodel.serving_time.native_step import NativeStep
from llmb.perfmodel.serving_time.serving_bounds import ServedFigures, serving_limits
from llmb.perfmodel.serving_time.serving_constants import (
    CONSTANTS_FILE,
    ENGINES,
    calibrated_serving,
    engine_generation,
    parse_engine,
    serving_constants,
    serving_interval,
)
from llmb.perfmodel.serving_time.serving_predictor import log_half_width, predict_serving, unproven_note
from llmb.perfmodel.serving_time.serving_rows import read_serving_rows
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import active_experts, serving_rates
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.cluster_fabric import device
from llmb.perfmodel.step_time.setup_fields import changed_device

PUBLISHED = Path(__file__).parent.parent / "golden" / "published_serving_rows.csv"
LLAMA_70B = ServingSetup(
    shape=find_model("llama3.1-70b"), gpu="h200", dtype="fp8", kv_dtype="fp8", isl=1024, osl=1024, concurrency=64, tp=2
)  # fmt: skip
DEEPSEEK = ServingSetup(
    shape=find_model("deepseek-v3"), gpu="b200", dtype="nvfp4", kv_dtype="fp8", isl=1024, osl=1024, concurrency=64,
    tp=8, ep=8, engine="sglang",
)  # fmt: skip
GPT_OSS = ServingSetup(
    shape=find_model("gpt-oss-120b"), gpu="h100", dtype="nvfp4", isl=8192, osl=1024, concurrency=32, tp=4, moe_tp=4
)
SETUPS = (LLAMA_70B, DEEPSEEK, GPT_OSS)


def test_published_rows_are_predicted_within_the_stated_errors():
    rows = read_serving_rows(PUBLISHED)
    assert all(row.setup is not None for row in rows), [row.reason for row in rows]
    predictions = [predict_serving(row.setup) for row in rows]
    errors = {
        name: sorted(abs(getattr(p, name) / getattr(row, name) - 1) for p, row in zip(predictions, rows, strict=True))
        for name in ("ttft_ms", "tpot_ms")
    }
    assert len(rows) >= 40
    assert statistics.median(errors["tpot_ms"]) < 0.06
    assert errors["tpot_ms"][math.ceil(0.9 * len(rows)) - 1] < 0.25
    assert statistics.median(errors["ttft_ms"]) < 0.25


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.shape.model.name)
def test_a_prediction_is_consistent(setup):
    p = predict_serving(setup)
    assert p.e2e_ms == pytest.approx(p.ttft_ms + (setup.osl - 1) * p.tpot_ms)
    assert p.output_tokens_per_s == pytest.approx(setup.concurrency * setup.osl / p.e2e_ms * 1e3)
    assert p.output_tokens_per_s_per_gpu == pytest.approx(p.output_tokens_per_s / setup.gpus)
    assert all(low < getattr(p, name) < high for name, (low, high) in p.interval_80.items())
    decode, waiting = p.terms["decode_step"], p.terms["scheduler"]
    assert 1e3 * (sum(decode.values()) + waiting["prefill_of_others_per_token"]) == pytest.approx(p.tpot_ms)
    assert p.batch == setup.concurrency


@settings(max_examples=60, deadline=None)
@given(
    setup=st.sampled_from(SETUPS),
    isl=st.integers(1, 30_000),
    osl=st.integers(2, 8192),
    concurrency=st.integers(1, 512),
)
def test_a_decode_step_is_never_faster_than_memory_is_read(setup, isl, osl, concurrency):
    setup = replace(setup, isl=isl, osl=osl, concurrency=concurrency)
    p, work = predict_serving(setup), serving_work(setup)
    weights = work.low_bytes + work.high_bytes + work.head_bytes + work.expert_bytes * work.routed
    assert p.tpot_ms / 1e3 > weights / device(setup.gpu).memory_bandwidth
    assert 0 < p.ttft_ms < math.inf
    assert p.batch <= concurrency
    assert p.memory_gib > 0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "native"])
def test_one_output_token_has_no_tpot_and_waits_for_the_prompts_of_others(engine):
    """64 prompts of 1,024 tokens are 64 x 143 TFLOP: no two H200 prefill more than 20 of them a second in fp8."""
    setup = replace(LLAMA_70B, osl=1, engine=engine)
    p, two = predict_serving(setup), predict_serving(replace(setup, osl=2))
    assert (p.tpot_ms, p.interval_80["tpot_ms"]) == (None, None)
    assert p.e2e_ms == p.ttft_ms <= 1.1 * two.e2e_ms
    limits = serving_limits(setup, ServedFigures(output_tokens_per_s=p.output_tokens_per_s))
    assert all(limit.needed < limit.limit for limit in limits)
    assert 0.8 * setup.concurrency < p.output_tokens_per_s * p.e2e_ms / 1e3 < 1.01 * setup.concurrency
    alone = predict_serving(replace(setup, concurrency=1))
    assert alone.ttft_ms < p.ttft_ms / 10


def test_a_decode_step_of_a_mixture_reads_the_experts_of_one_token_at_least():
    """A request that is in prefill nearly all the time still decodes whole steps."""
    setup = ServingSetup(
        shape=find_model("mixtral-8x22b"), gpu="h100-pcie", dtype="fp8", isl=120_000, osl=1024, concurrency=4096,
        pp=2, engine="trtllm", kv_dtype="fp8",
    )  # fmt: skip
    p, work = predict_serving(setup), serving_work(setup)
    weights = work.low_bytes + work.high_bytes + work.expert_bytes * work.routed
    assert p.tpot_ms / 1e3 > weights / device(setup.gpu).memory_bandwidth


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.shape.model.name)
def test_more_work_takes_longer(setup):
    base = predict_serving(setup)
    longer = predict_serving(replace(setup, isl=4 * setup.isl))
    crowded = predict_serving(replace(setup, concurrency=2 * setup.concurrency))
    assert longer.tpot_ms > base.tpot_ms
    assert longer.ttft_ms > base.ttft_ms
    assert crowded.tpot_ms > base.tpot_ms
    assert crowded.output_tokens_per_s > base.output_tokens_per_s


def test_fp8_attention_shortens_prefill_of_the_native_engine_only():
    setup = replace(LLAMA_70B, engine="native", isl=20000, concurrency=4)
    plain, fp8 = predict_serving(setup), predict_serving(replace(setup, attention_dtype="fp8"))
    ratio = plain.terms["prefill"]["attention"] / fp8.terms["prefill"]["attention"]
    assert ratio == pytest.approx(serving_constants()["attention_fp8_native"].value)
    assert plain.terms["decode_step"] == fp8.terms["decode_step"]
    for changes in ({"engine": "vllm"}, {"kv_dtype": "bf16"}):
        with pytest.raises(ConfigError, match="of the native engine beside kv_dtype=fp8"):
            replace(setup, attention_dtype="fp8", **changes)


def test_experts_of_the_native_engine_compute_whole_tiles():
    """128 experts, 8 of them for a token: 16 a token in 512 tiles of 16 rows, and of 128 rows beyond 64 a expert."""
    setup = replace(LLAMA_70B, shape=find_model("qwen3-30b-a3b"), engine="native", tp=1)
    work, c = serving_work(setup), calibrated_serving()
    steps = NativeStep.of(setup, work, serving_rates(setup, device("h200"), c), device("h200"), c)
    small = 1 / c["small_tiles_native"]
    assert steps._expert_rows(2) == pytest.approx(16 * small, rel=0.01)
    assert 64 * small < steps._expert_rows(896) < 80 * small  # 56 rows on average; some experts have a second tile
    assert steps._expert_rows(8192) == pytest.approx(512 + 64, rel=0.01)  # half a tile more on average
    assert steps._expert_rows(0) == 0


def test_few_tokens_take_small_tiles_of_gemms_with_block_scales():
    setup = replace(LLAMA_70B, shape=find_model("deepseek-v3"), engine="native", tp=8, moe_tp=8)
    work, c = serving_work(setup), calibrated_serving()
    steps = NativeStep.of(setup, work, serving_rates(setup, device("h200"), c), device("h200"), c)
    assert [steps._rows(tokens) for tokens in (1, 17, 64, 65)] == [16, 32, 64, 128]
    gemm = [steps.terms(decodes=tokens, context=1000)["gemm"] for tokens in (16, 17)]
    assert gemm[1] - gemm[0] > work.low_gemms * c["ramp_native"]  # weights are loaded before the input is there


def test_tensor_parallelism_and_faster_memory_shorten_a_large_model():
    times = [predict_serving(replace(LLAMA_70B, tp=tp)).tpot_ms for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    faster = predict_serving(LLAMA_70B, changed_device(device("h200"), "gpu.hbm_bw=2x"))
    assert faster.tpot_ms < predict_serving(LLAMA_70B).tpot_ms
    across_nodes = predict_serving(replace(LLAMA_70B, gpu="h100", tp=16)).ttft_ms
    assert across_nodes > predict_serving(replace(LLAMA_70B, gpu="h100", tp=8)).ttft_ms


def test_pipeline_stages_share_the_memory_and_keep_the_step():
    two = predict_serving(replace(LLAMA_70B, tp=1, pp=2))
    alone = predict_serving(replace(LLAMA_70B, tp=1))
    assert two.memory_gib < 0.7 * alone.memory_gib
    assert two.tpot_ms < alone.tpot_ms


def test_accepted_drafts_shorten_a_token_and_refused_ones_lengthen_it():
    base, speculative, refused = (
        predict_serving(replace(DEEPSEEK, concurrency=4, draft_tokens=drafts, acceptance=acceptance)).tpot_ms
        for drafts, acceptance in ((0, 0.8), (1, 0.8), (1, 0.01))
    )
    assert 0.5 * base < speculative < 0.8 * base
    assert refused > base


def test_requests_that_do_not_fit_wait():
    setup = replace(LLAMA_70B, tp=1, isl=8192, concurrency=256)
    slots = cache_slots(setup, serving_work(setup))
    p = predict_serving(setup)
    assert p.batch == slots < 256
    assert p.terms["scheduler"]["kv_cache_queue"] > 1
    assert p.ttft_ms > 1e3 * p.terms["scheduler"]["kv_cache_queue"]
    unlimited = predict_serving(replace(setup, concurrency=slots))
    assert p.output_tokens_per_s == pytest.approx(unlimited.output_tokens_per_s, rel=0.05)


def test_the_cache_of_a_request_counts_windows_and_latents():
    dense = replace(LLAMA_70B, tp=1)
    assert request_bytes(dense, serving_work(dense)) == 80 * 2 * 8 * 128 * (1024 + 512)
    latents = replace(DEEPSEEK, kv_dtype="bf16")
    assert request_bytes(latents, serving_work(latents)) == 61 * 576 * 2 * (1024 + 512)
    windowed = replace(GPT_OSS, tp=1, moe_tp=1, isl=1024)
    per_token = 2 * 8 * 64 * 2
    assert request_bytes(windowed, serving_work(windowed)) == 18 * per_token * (1024 + 512) + 18 * per_token * 128


def test_weights_of_a_rank_add_up_to_the_model():
    whole = serving_work(replace(LLAMA_70B, tp=1)).weight_bytes
    assert whole == pytest.approx(69.5e9, rel=0.02)
    assert serving_work(replace(LLAMA_70B, tp=8)).weight_bytes == pytest.approx(whole / 8)
    experts = serving_work(replace(DEEPSEEK, dtype="fp8"))
    assert experts.expert_bytes == 58 * 256 * 3 * 7168 * 2048 / 8


def test_active_experts_grow_with_tokens_up_to_all():
    fractions = [active_experts(8 / 256, tokens, 1.3) for tokens in (1, 8, 64, 100_000)]
    assert fractions == sorted(fractions)
    assert fractions[0] == 8 / 256
    assert fractions[-1] > 0.98
    uniform = 1 - (1 - 8 / 256) ** 64
    assert active_experts(8 / 256, 64, 1e-6) == pytest.approx(uniform, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "tp 3 does not divide 64 attention heads; possible: [1, 2, 4, 8, 16, 32, 64]"),
        ({"ep": 2}, "has no experts: ep 2 is not possible"),
        ({"isl": 0}, "isl must be a whole number, 1 or more, got 0"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"engine": "vlm"}, "unknown engine 'vlm'"),
        ({"gpu": "h300"}, "unknown GPU type 'h300'"),
        ({"pp": 81}, "pp 81 for 80 layers"),
        ({"memory_fraction": 1.5}, "memory_fraction must be above 0 and at most 1, got 1.5"),
        ({"draft_tokens": -1}, "draft_tokens must be a whole number, 0 to 16, got -1"),
    ],
)
def test_impossible_setups_say_what_is_possible(changes, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[").replace("]", r"\]")):
        replace(LLAMA_70B, **changes)


def test_experts_are_split_over_all_ranks():
    with pytest.raises(ConfigError, match="ep=8 moe_tp=1, or ep=1 moe_tp=8"):
        replace(DEEPSEEK, ep=4)
    with pytest.raises(ConfigError, match="ep 3 does not divide 256 experts"):
        replace(DEEPSEEK, tp=1, attention_dp=3, ep=3)


def test_a_model_that_does_not_fit_says_so():
    with pytest.raises(ConfigError, match=r"needs 1.. GiB .* an h100 has 71 .* use more GPUs or a smaller dtype"):
        predict_serving(replace(LLAMA_70B, gpu="h100", dtype="bf16", tp=1))


def test_versions_belong_to_a_generation():
    assert engine_generation("vllm", "0.11.2") == "vllm_2025"
    assert engine_generation("vllm", "0.15.1") == "vllm_2026"
    assert engine_generation("trtllm", "1.2.0rc6.post2") == "trtllm_2026"
    assert engine_generation("trtllm", "1.1.0rc2.post2") == "trtllm_2025"
    assert engine_generation("sglang", "0.5.6.post2") == "sglang_2025"
    assert engine_generation("sglang", "") == "sglang_2026"
    assert engine_generation("native", "3") == "native"


def test_every_constant_has_a_unit_a_meaning_and_a_use():
    source = "".join(path.read_text() for path in CONSTANTS_FILE.parent.glob("*.py"))
    for name, constant in serving_constants().items():
        assert constant.prior > 0
        assert constant.value is None or constant.value > 0
        assert constant.unit
        assert constant.meaning
        stem = name
        for ending in ("2025", "2026", *ENGINES, "ampere", "hopper", "blackwell"):
            stem = stem.removesuffix(f"_{ending}")
        assert f'"{stem}' in source, name


def test_the_interval_is_wider_for_experts_and_unseen_gpus():
    assert log_half_width(LLAMA_70B, "tpot_ms") < log_half_width(DEEPSEEK, "tpot_ms")
    assert log_half_width(LLAMA_70B, "tpot_ms") < log_half_width(LLAMA_70B, "ttft_ms")
    assert log_half_width(replace(LLAMA_70B, gpu="b300"), "e2e_ms") > log_half_width(LLAMA_70B, "e2e_ms")
    ttft = [log_half_width(replace(LLAMA_70B, engine=engine), "ttft_ms") for engine in ("vllm", "trtllm", "sglang")]
    assert ttft == sorted(ttft)
    data = serving_interval()
    for metric, kinds in data["unseen_half_width"].items():
        assert all(width > 1.05 * data["half_width"][metric][kind] for kind, width in kinds.items())


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_gb200_is_predicted_and_called_unproven(engine):
    setup = replace(LLAMA_70B, gpu="gb200", engine=engine)
    p = predict_serving(setup)
    assert p.tpot_ms < predict_serving(replace(setup, gpu="h200")).tpot_ms
    assert "no measured TTFT or TPOT of any engine on a gb200" in unproven_note(setup)
    assert unproven_note(replace(setup, gpu="b200")) is None
    assert unproven_note(replace(setup, gpu="b200", engine="native")) is not None


def test_engines_have_the_names_of_their_projects():
    assert [parse_engine(name) for name in ("TensorRT-LLM", "vLLM", "sglang")] == ["trtllm", "vllm", "sglang"]


@pytest.mark.parametrize(("gpu", "ultra"), [("b200", "b300"), ("gb200", "gb300")])
def test_blackwell_ultra_prefills_faster_than_blackwell(gpu, ultra):
    plain, faster = (predict_serving(replace(DEEPSEEK, gpu=name)) for name in (gpu, ultra))
    assert faster.ttft_ms < plain.ttft_ms
    assert faster.tpot_ms <= plain.tpot_ms


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-30b-a3b"])
def test_a_pipeline_serves_no_more_per_gpu_than_copies_of_one_gpu(name, engine):
    """A rank of pp 4 holds a quarter of the layers and computes four times as many steps: nothing is gained."""
    alone = ServingSetup(
        shape=find_model(name), gpu="h200", dtype="bf16", isl=1024, osl=256, concurrency=144, engine=engine
    )
    rates = [
        predict_serving(replace(alone, pp=pp, concurrency=144 * pp)).output_tokens_per_s_per_gpu for pp in (1, 2, 4, 8)
    ]
    assert rates == sorted(rates, reverse=True)


def test_clients_beyond_the_cache_wait_and_decode_no_faster():
    full = replace(LLAMA_70B, tp=1, isl=8192, osl=64, concurrency=256)
    times = [predict_serving(replace(full, concurrency=clients)).tpot_ms for clients in (256, 512, 2048)]
    assert times == pytest.approx([times[0]] * 3)
