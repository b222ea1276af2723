"""Runs of the native engine, followed by the rules of its scheduler, and the time of its steps."""

from dataclasses import replace
from random import Random

import pytest

from llmb.config.native.request_lengths import sample_lengths
from llmb.perfmodel.serving_time.native_step import NativeStep
from llmb.perfmodel.serving_time.scheduled_run import run_times, total
from llmb.perfmodel.serving_time.serving_constants import calibrated_serving
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import serving_rates
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.cluster_fabric import device

LLAMA = ServingSetup(
    shape=find_model("llama3.1-8b"), gpu="h200", dtype="fp8", kv_dtype="fp8", isl=1000, osl=1000, concurrency=64,
    engine="native", max_batch_size=1024, waves=2,
)  # fmt: skip


def steps_of(setup, **constants):
    c, on, work = calibrated_serving() | constants, device(setup.gpu), serving_work(setup)
    return NativeStep.of(setup, work, serving_rates(setup, on, c), on, c)


def step_ms(steps, **fields):
    return 1e3 * total(steps.terms(**{"context": 1500.0, **fields}))


def test_decode_time_jumps_where_gemms_replace_skinny_ones_and_is_flat_until_they_are_bound_by_flops():
    steps = steps_of(LLAMA)
    single, pair, four, eight, thirty = (step_ms(steps, decodes=n, context=0.0) for n in (1, 2, 4, 8, 32))
    assert 0.3 < pair - single < 0.8  # multiply-adds on CUDA cores
    assert four > 1.2 * pair
    assert eight == pytest.approx(four, rel=0.01)
    assert thirty == pytest.approx(four, rel=0.02)
    assert step_ms(steps, decodes=512, context=0.0) > 2 * four


def test_steps_are_padded_to_captured_sizes_and_tiles():
    steps = steps_of(LLAMA)
    assert step_ms(steps, decodes=65, context=0.0) < step_ms(steps, decodes=113, context=0.0)  # 80 and 144 rows
    gemm = {n: steps.terms(decodes=n, context=0.0)["gemm"] for n in (113, 120, 144)}
    assert gemm[113] == pytest.approx(gemm[120], rel=0.01) == pytest.approx(gemm[144], rel=0.01)
    assert gemm[113] > 1.15 * steps.terms(decodes=112, context=0.0)["gemm"]  # one tile of rows
    assert steps_of(replace(LLAMA, max_batch_size=128)).terms(decodes=120, context=0.0)["gemm"] < gemm[120]


def test_large_prefill_steps_are_launched_by_the_host_and_never_faster_than_that():
    kernels = serving_work(LLAMA).kernels
    slow_host = steps_of(LLAMA, eager_native=1e-3)
    assert step_ms(slow_host, decodes=0, prefill=4096, pairs=0.0) >= 1e3 * kernels * 1e-3
    assert step_ms(slow_host, decodes=0, prefill=1024, pairs=0.0) < 100  # a captured graph
    deepseek = replace(LLAMA, shape=find_model("deepseek-r1"), tp=8, ep=8)
    assert step_ms(steps_of(deepseek, eager_native=1e-3), decodes=0, prefill=128) >= serving_work(deepseek).kernels


def test_one_client_alternates_prefill_and_decode():
    setup = replace(LLAMA, concurrency=1, waves=3, isl=100, osl=11)
    c = calibrated_serving() | {"first_token_native": 0.25}
    steps = steps_of(setup, first_token_native=0.25)
    times = run_times(steps, 1, c)
    prefill = total(steps.terms(decodes=0, context=0.0, prefill=100, prompts=1, pairs=5000.0))
    assert times.ttft == pytest.approx(0.25 + prefill)
    assert times.tpot == pytest.approx(total(steps.terms(decodes=1, context=105.5)), rel=1e-3)
    assert times.seconds == pytest.approx(3 * (times.ttft + 10 * times.tpot))
    assert times.queue == 0.0


def test_every_token_of_a_finite_run_is_counted_once():
    for setup in (LLAMA, replace(LLAMA, concurrency=300, waves=1, max_batch_size=64), replace(LLAMA, isl=9000)):
        p = predict_serving(setup)
        tokens = setup.concurrency * setup.waves * setup.osl
        e2e_s = p.e2e_ms / 1e3
        longest = tokens / p.output_tokens_per_s
        assert longest >= setup.waves * e2e_s * 0.8  # a client's requests follow one another
        assert p.output_tokens_per_s < 1e3 * p.batch / p.tpot_ms


def test_requests_beyond_the_batch_wait_for_a_slot():
    waiting = replace(LLAMA, concurrency=256, waves=1, max_batch_size=64)
    p = predict_serving(waiting)
    assert p.terms["scheduler"]["kv_cache_queue"] > 5  # three waves before the last one
    assert p.ttft_ms > 3 * predict_serving(replace(waiting, max_batch_size=256)).ttft_ms


def test_the_queue_is_counted_as_ttft_is_with_the_first_wave_once():
    p = predict_serving(replace(LLAMA, concurrency=96, max_batch_size=64, waves=10, isl=8000, osl=64))
    waiting = p.terms["scheduler"]
    assert 0 < waiting["ttft_besides_own_prefill"] < 0.1
    assert waiting["kv_cache_queue"] > 4


def test_more_requests_than_are_followed_repeat_the_first():
    long, longer = (predict_serving(replace(LLAMA, waves=waves)) for waves in (20, 200))
    assert longer.tpot_ms == pytest.approx(long.tpot_ms)
    assert longer.output_tokens_per_s == pytest.approx(long.output_tokens_per_s)
    queue = [predict_serving(replace(LLAMA, concurrency=n, waves=1, max_batch_size=64)).ttft_ms for n in (1024, 4096)]
    assert 3 < queue[1] / queue[0] < 5


def test_prompts_longer_than_the_budget_are_prefilled_in_chunks():
    whole = predict_serving(replace(LLAMA, concurrency=1, isl=16_000, max_num_tokens=16_384))
    chunked = predict_serving(replace(LLAMA, concurrency=1, isl=16_000, max_num_tokens=2048))
    assert whole.ttft_ms < chunked.ttft_ms < 1.3 * whole.ttft_ms


def test_pipeline_stages_and_replicas_share_the_work():
    alone = predict_serving(replace(LLAMA, concurrency=512))
    staged = predict_serving(replace(LLAMA, concurrency=512, pp=2))
    replicas = predict_serving(replace(LLAMA, concurrency=512, attention_dp=2))
    assert alone.output_tokens_per_s < staged.output_tokens_per_s < 2 * alone.output_tokens_per_s
    assert 1.5 * alone.output_tokens_per_s < replicas.output_tokens_per_s < 2.2 * alone.output_tokens_per_s


@pytest.mark.parametrize("name", ["llama3.1-8b", "mixtral-8x7b"])
def test_a_lone_request_passes_all_stages_of_a_pipeline(name):
    """No stage computes a fraction of a token, which would spare it experts."""
    alone = replace(LLAMA, shape=find_model(name), concurrency=1)
    tpot = [predict_serving(replace(alone, pp=pp)).tpot_ms for pp in (1, 2, 4)]
    assert tpot == sorted(tpot)
    assert tpot[2] < 1.05 * tpot[0]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "shape": find_model("llama3.3-70b"),
            "pp": 4,
            "gpu": "a100",
            "dtype": "bf16",
            "isl": 8192,
            "osl": 128,
            "concurrency": 1,
        },
        {"shape": find_model("llama3.1-70b"), "isl": 20_000, "osl": 2000, "concurrency": 200},  # 18 at a time
    ],
    ids=["a pipeline", "a long queue"],
)
def test_requests_in_the_engine_are_their_rate_times_their_time(changes):
    """Little's law: all clients always have a request, but for the ramp-up of the first and the last wave."""
    setup = replace(LLAMA, waves=10, **changes)
    p = predict_serving(setup)
    requests = p.output_tokens_per_s / setup.osl * p.e2e_ms / 1e3
    assert 0.9 * setup.concurrency < requests < 1.01 * setup.concurrency


VARIED = sample_lengths(Random(7), 768, (128, 0), (512, 256), "uniform")
CHAT = replace(LLAMA, isl=128, osl=512, concurrency=256, waves=3, max_batch_size=256)


def test_requests_of_equal_lengths_are_those_of_the_nominal_one():
    equal = replace(CHAT, lengths=((128, 512),) * 768)
    assert predict_serving(equal) == predict_serving(CHAT)


def test_outputs_of_varied_lengths_end_one_by_one_and_leave_a_drain():
    varied, equal = predict_serving(replace(CHAT, lengths=VARIED)), predict_serving(CHAT)
    assert 0.84 < varied.output_tokens_per_s / equal.output_tokens_per_s < 0.92  # 27,404 tokens/s measured, not 31,858
    assert varied.ttft_ms < equal.ttft_ms  # prompts after the first wave come one by one


def test_the_order_of_lengths_decides_how_long_the_drain_is():
    shortest_last = predict_serving(replace(CHAT, lengths=tuple(sorted(VARIED, key=lambda pair: -pair[1]))))
    longest_last = predict_serving(replace(CHAT, lengths=tuple(sorted(VARIED, key=lambda pair: pair[1]))))
    assert shortest_last.output_tokens_per_s > 1.02 * longest_last.output_tokens_per_s


def test_lengths_repeat_where_more_requests_are_asked_for():
    few, many = (predict_serving(replace(CHAT, lengths=VARIED[:256], waves=waves)) for waves in (3, 30))
    assert many.tpot_ms == pytest.approx(few.tpot_ms)
    assert many.output_tokens_per_s == pytest.approx(few.output_tokens_per_s)


def test_varied_prompts_take_the_time_of_their_tokens():
    prompts = replace(LLAMA, isl=2000, osl=1, concurrency=4, waves=2)
    lengths = ((1000, 1), (3000, 1)) * 4
    both = [predict_serving(setup).output_tokens_per_s for setup in (prompts, replace(prompts, lengths=lengths))]
    assert both[1] == pytest.approx(both[0], rel=0.05)


def test_one_output_token_ends_with_the_prefill():
    prompts = replace(LLAMA, shape=find_model("qwen2.5-72b"), gpu="a100", dtype="bf16", kv_dtype="bf16", tp=4, pp=2,
                      osl=1, concurrency=128, waves=10)  # fmt: skip
    p = predict_serving(prompts)
    assert 0.9 * 128 < p.output_tokens_per_s * p.e2e_ms / 1e3 < 1.03 * 128
    assert sum(p.terms["decode_step"].values()) == 0
    assert p.e2e_ms <= predict_serving(replace(prompts, osl=2)).e2e_ms


def test_clients_that_replicas_do_not_share_evenly_need_no_queue():
    three, four = (predict_serving(replace(LLAMA, concurrency=n, attention_dp=2)) for n in (3, 4))
    assert three.terms["scheduler"]["kv_cache_queue"] == 0
    assert three.ttft_ms <= four.ttft_ms
    assert three.e2e_ms <= 1.01 * four.e2e_ms


def test_a_short_last_chunk_leaves_a_pipeline_after_the_long_one_before_it():
    setup = replace(LLAMA, shape=find_model("llama4-scout"), gpu="h100", dtype="bf16", kv_dtype="bf16", tp=8, pp=4,
                    ep=8, concurrency=1, isl=8192)  # fmt: skip
    assert predict_serving(replace(setup, isl=8193)).ttft_ms >= predict_serving(setup).ttft_ms


def test_more_clients_wait_longer_however_many_of_them_are_followed():
    setup = replace(LLAMA, shape=find_model("mixtral-8x22b"), gpu="b200", tp=2, ep=2, isl=20_000, osl=8, waves=10)
    fewer, more = (predict_serving(replace(setup, concurrency=n)) for n in (256, 300))
    assert more.e2e_ms > fewer.e2e_ms


def test_gemms_with_scales_of_blocks_are_slower_and_only_in_fp8():
    qwen = replace(LLAMA, shape=find_model("qwen3-32b"), fp8_recipe="blockwise")
    prefill = {"decodes": 0, "prefill": 4096, "pairs": 0.0}
    blocks, rows = (
        steps_of(replace(qwen, fp8_recipe=name)).terms(context=0.0, **prefill) for name in ("blockwise", None)
    )
    assert blocks["gemm"] / rows["gemm"] == pytest.approx(1 / calibrated_serving()["block_scales_native"], rel=0.03)
    bf16 = [
        steps_of(replace(qwen, dtype="bf16", fp8_recipe=name)).terms(context=0.0, **prefill)
        for name in ("blockwise", None)
    ]
    assert bf16[0] == bf16[1]
    assert replace(qwen, shape=find_model("deepseek-v3"), tp=8, ep=8, fp8_recipe=None).has_block_scales  # as published


@pytest.mark.parametrize(("tokens", "us"), [(48, 701), (160, 925), (768, 1107), (8192, 5455), (16384, 9395)])
def test_mxfp4_experts_take_as_long_as_the_kernel_alone(tokens, us):
    """Both GEMMs of a layer of gpt-oss-120b on an H200 (bench/RESULTS.md), with random routing."""
    setup = replace(LLAMA, shape=find_model("gpt-oss-120b"), dtype="nvfp4", max_batch_size=16384)
    terms = steps_of(setup).terms(decodes=tokens, context=0.0) if tokens < 1000 else steps_of(setup).terms(
        decodes=0, context=0.0, prefill=tokens
    )  # fmt: skip
    assert 1e6 * terms["experts"] / 36 == pytest.approx(us, rel=0.2)
