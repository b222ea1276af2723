"""Limits of chips: published figures that are possible, one that is not, and what would explain it."""

from dataclasses import replace

import pytest
from step_setups import step_setup

from llmb.perfmodel.chip_limits import HIGHEST_CLOCK, StepAmount, bandwidth_ceiling, flops_ceiling, training_limits
from llmb.perfmodel.explain.explanation import explain_serving, explain_training, step_amount, verdict_of
from llmb.perfmodel.explain.impossible_causes import holds, serving_causes, training_causes
from llmb.perfmodel.flops import train_flops_per_sequence
from llmb.perfmodel.serving_time.serving_bounds import L2_BYTES, ServedFigures, serving_limits
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.shapes.model_catalog import find_model


def served(isl=1000, osl=100, concurrency=112, **fields):
    return ServingSetup(
        shape=find_model("llama3.1-8b"), gpu="h200", dtype="fp8", isl=isl, osl=osl, concurrency=concurrency, **fields
    )


TTFT, TPOT = 71.91, 11.25  # ms, of vLLM 0.12.0, Llama 3.1 8B fp8 on one H200, 1000/100 at concurrency 112
VLLM_ROW = ServedFigures(output_tokens_per_s=112 * 100 / (TTFT + 99 * TPOT) * 1e3, latency_ms=(TTFT, TPOT))


def test_a_published_row_of_vllm_needs_more_than_an_h200_sustains():
    explanation = explain_serving("row", served(), VLLM_ROW)
    assert explanation.verdict == "impossible"
    compute = explanation.limits[0]
    assert (compute.name, compute.unit) == ("compute", "TFLOP/s/GPU")
    assert compute.needed == pytest.approx(1489, rel=0.01)  # without the LM head for prompt tokens
    assert compute.limit < 1450
    assert "H200" in compute.basis
    assert "1,560 TFLOP/s/GPU" in explanation.notes[-1]
    assert explanation.causes[0].startswith("prefix caching")


def test_the_named_causes_make_the_row_possible():
    assert not holds(serving_limits(served(), VLLM_ROW))
    assert holds(serving_limits(served(), replace(VLLM_ROW, prefix_hit_rate=0.1)))
    assert not holds(serving_limits(served(), replace(VLLM_ROW, prefix_hit_rate=0.03)))
    assert "another GPU: gh200, b200, b300, gb200, gb300" in serving_causes(served(), VLLM_ROW)


@pytest.mark.parametrize(
    ("isl", "osl", "tokens_per_s"),
    [(128, 128, 30_049), (1000, 1000, 18_463), (128, 2048, 26_793), (20_000, 2000, 1_804), (2048, 128, 3_794)],
)
def test_measured_and_published_h200_figures_are_possible(isl, osl, tokens_per_s):
    setup = served(isl, osl, concurrency=4096, kv_dtype="fp8")
    limits = serving_limits(setup, ServedFigures(output_tokens_per_s=tokens_per_s))
    assert verdict_of(limits) == "possible"
    assert max(limit.fraction for limit in limits) > 0.3


def test_one_request_cannot_decode_faster_than_weights_are_read():
    setup = served(128, 128, concurrency=1)
    fast = ServedFigures(output_tokens_per_s=1e3 / 1.5, latency_ms=(10.0, 1.5))  # measured: 2.5 ms
    failed = [limit.name for limit in serving_limits(setup, fast) if limit.fraction > 1]
    assert "HBM bandwidth of a decode step" in failed
    assert holds(serving_limits(setup, ServedFigures(output_tokens_per_s=1e3 / 2.5, latency_ms=(10.0, 2.5))))


def amount(**fields):
    defaults = {"seqlen": 8192, "sequences": 6, "gpus": 1, "gpu": "h200", "dtype": "bf16"}
    return StepAmount(model=find_model("llama3.1-8b").model, **{**defaults, **fields})


def test_training_at_bf16_is_bound_by_model_flops():
    (limit,) = training_limits(amount(), 4.188)
    flops = 6 * train_flops_per_sequence(amount().model, 8192, "causal")
    assert limit.needed == pytest.approx(flops / 4.188 / 1e12)
    assert limit.limit == pytest.approx(flops_ceiling("h200", "bf16").rate / 1e12)
    assert 0.8 < limit.fraction < 0.9


def test_attention_and_head_lower_the_limit_of_fp8():
    (limit,) = training_limits(amount(dtype="fp8", sequences=4), 1.864)
    assert flops_ceiling("h200", "bf16").rate < limit.limit * 1e12 < flops_ceiling("h200", "fp8").rate
    assert limit.fraction < 1


def test_causes_of_an_impossible_step_are_tried():
    causes = list(training_causes(amount(), 2.6, micro_batches=3))
    assert "the time is of one micro-batch, not of a step of 3" in causes
    assert "GEMMs in fp8, not bf16" in causes
    assert "the figure is of 2 GPUs, not 1" in causes
    assert not any(cause.startswith("a short run") for cause in causes)  # 1.36 times the limit is no burst
    assert any(cause.startswith("a short run") for cause in training_causes(amount(), 3.2))


def test_an_unlisted_gpu_has_no_limit():
    assert training_limits(amount(gpu="l40"), 1.0) == []
    assert verdict_of([]) == "unknown"


@pytest.mark.parametrize(("gpu", "dtype", "rate"), [("a100", "bf16", 0.87), ("h20", "fp8", 0.96), ("b200", "fp8", 1.0)])
def test_fast_runs_on_chips_that_were_not_measured_are_not_called_impossible(gpu, dtype, rate):
    """Fitted GEMM rates: A100 0.87 of its peak, H20 142 of 148 TFLOP/s; only a peak at the highest clock refutes."""
    work = amount(gpu=gpu, dtype=dtype)
    (limit,) = training_limits(work, 1.0)
    at_rate = limit.needed / (limit.limit / HIGHEST_CLOCK) / rate
    assert verdict_of(training_limits(work, at_rate)) == "possible"
    assert verdict_of(training_limits(work, at_rate * rate / 1.1)) == "impossible"
    assert "highest clock" in limit.basis


def test_memory_is_limited_by_its_nominal_bandwidth_and_the_l2_cache_is_allowed_for():
    assert bandwidth_ceiling("a100").rate == 2039e9
    small = replace(served(128, 128, concurrency=1), shape=find_model("llama3.2-1b"))
    limits = serving_limits(small, ServedFigures(output_tokens_per_s=1000))
    bandwidth = next(limit for limit in limits if limit.name == "HBM bandwidth")
    work = serving_work(small)
    step_bytes = work.weight_bytes + (128 + 64) * work.kv_bytes
    assert bandwidth.needed == pytest.approx(1000 * (step_bytes - L2_BYTES) / 1e9)


def test_a_run_of_fewer_layers_is_judged_by_the_layers_that_ran():
    setup = step_setup("llama3.1-405b", "h100", 8, "bf16", gbs=8, layers=4)
    whole = step_amount(replace(setup, layers=None))
    (few,), (every,) = training_limits(step_amount(setup), 1.0), training_limits(whole, 1.0)
    assert every.needed > 15 * few.needed
    packed = step_amount(replace(setup, document_tokens=1024))
    assert packed.sequences * packed.seqlen == 8 * 8192
    assert training_limits(packed, 1.0)[0].needed < few.needed


def test_terms_stand_beside_a_measured_breakdown():
    setup = step_setup("llama3.1-8b", "h200", 1, "bf16", mbs=2, gbs=6, graphs=1.0, engine="native")
    profile = {
        "matrix products": 3.139, "attention": 0.839, "memory-bound work": 0.164, "optimizer": 0.031, "idle": 0.011,
    }  # fmt: skip
    pairs = {pair.kind: pair for pair in explain_training("run", setup, 4.188, profile).terms}
    assert pairs["matrix products"].measured_s == 3.139
    assert pairs["matrix products"].predicted_s == pytest.approx(3.139, rel=0.02)
    assert "not explained" not in pairs
    without = explain_training("run", setup, 4.188, {})
    assert without.terms[-1].kind == "not explained"
    assert sum(p.predicted_s or 0 for p in without.terms) + without.terms[-1].measured_s == pytest.approx(4.188)


def test_windows_spare_work_that_a_step_needs():
    """23 of 46 layers of Gemma 2 attend to 4,096 of 131,072 tokens: a third less work than with full attention."""
    setup = step_setup("gemma-2-27b", "h100", 32, "bf16", seqlen=131072, gbs=32, tp=8, cp=2)
    amount = step_amount(setup)
    needed, full = (training_limits(a, 50.0)[0].needed for a in (amount, replace(amount, spared_macs=0.0)))
    assert 0.7 < needed / full < 0.8
    assert explain_training("typed", setup, 50.0, {}).verdict == "possible"
    assert not holds(training_limits(replace(amount, spared_macs=0.0), 50.0))
