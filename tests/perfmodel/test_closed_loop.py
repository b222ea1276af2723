"""The closed loop keeps its orders: better hardware and less work are never slower, and no request is counted twice."""

from dataclasses import replace
from typing import Any

import pytest

from llmb.perfmodel.serving_time.closed_loop import total
from llmb.perfmodel.serving_time.serving_fields import build_serving_setup
from llmb.perfmodel.serving_time.serving_predictor import predict_serving, serving_device
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.setup_fields import changed_device


def load(
    model: str, engine: str, gpu: str, dtype: str, isl: int, osl: int, clients: int, **fields: Any
) -> ServingSetup:
    return build_serving_setup(find_model(model), gpu, dtype, engine, (isl, osl), clients, fields)


# Loads with few output tokens, or with more prompts than decode steps have room for.
CROWDED = [
    load("qwen3-1.7b", "vllm", "b200", "nvfp4", 2048, 3, 2048, tp=4, pp=2),
    load("nemotron3-nano-30b-a3b", "vllm", "gb200", "fp8", 4096, 16, 4096, tp=8, attention_dp=2),
    load("mistral-small-24b", "vllm", "gb200", "bf16", 3, 2, 32),
    load("nemotron4-340b", "sglang", "gb300", "bf16", 1000, 3, 100, tp=8, pp=2),
    load("llama3.1-405b", "vllm", "b300", "nvfp4", 1024, 2, 7),
    load("qwen2.5-7b", "trtllm", "a100", "bf16", 1000, 2, 32, tp=2, pp=4),
    load("phi-4", "vllm", "h200", "fp8", 20000, 3, 1024, tp=2),
    load("llama3.1-8b", "vllm", "h200", "fp8", 8192, 128, 512),
    load("llama3.2-3b", "vllm", "b300", "bf16", 1000, 512, 2048, tp=4),
]
BESIDES = "ttft_besides_own_prefill"
CHANGES = ("gpu.hbm_bw=4x", "gpu.flops=4x", "gpu.nvlink=4x", "network=4x")


@pytest.mark.parametrize("setup", CROWDED, ids=lambda setup: f"{setup.shape.model.name} {setup.engine}")
@pytest.mark.parametrize("change", CHANGES)
def test_no_faster_part_makes_a_request_slower(setup, change):
    faster = predict_serving(setup, changed_device(serving_device(setup), change))
    assert faster.e2e_ms <= 1.001 * predict_serving(setup).e2e_ms


@pytest.mark.parametrize("setup", CROWDED, ids=lambda setup: f"{setup.shape.model.name} {setup.engine}")
def test_longer_requests_take_longer(setup):
    e2e = predict_serving(setup).e2e_ms
    for name in ("isl", "osl"):
        for further in (1, 2, 7, 64):
            longer = replace(setup, **{name: getattr(setup, name) + further})
            assert predict_serving(longer).e2e_ms >= 0.999 * e2e, (name, further)


@pytest.mark.parametrize("setup", CROWDED, ids=lambda setup: f"{setup.shape.model.name} {setup.engine}")
def test_more_clients_wait_longer_and_take_no_throughput(setup):
    prediction = predict_serving(setup)
    more = predict_serving(replace(setup, concurrency=2 * setup.concurrency))
    assert more.e2e_ms >= prediction.e2e_ms
    assert more.output_tokens_per_s >= 0.95 * prediction.output_tokens_per_s


@pytest.mark.parametrize("setup", CROWDED, ids=lambda setup: f"{setup.shape.model.name} {setup.engine}")
def test_requests_in_the_engine_are_throughput_times_latency(setup):
    prediction = predict_serving(setup)
    in_engine = prediction.e2e_ms - 1e3 * prediction.terms["scheduler"]["kv_cache_queue"]
    assert prediction.output_tokens_per_s / setup.osl * in_engine / 1e3 == pytest.approx(prediction.batch)


def test_a_decode_never_takes_longer_than_a_step_that_is_full_of_prompts():
    # 512 steps of four prompts between two requests of a client, of whose two decodes each shares one.
    prediction = predict_serving(CROWDED[0])
    alone = predict_serving(replace(CROWDED[0], isl=8192, osl=2, concurrency=2))
    assert prediction.tpot_ms < 2 * alone.ttft_ms
    assert prediction.ttft_ms > 20 * prediction.tpot_ms


def test_a_lone_request_waits_for_its_own_prefill_whatever_the_replicas():
    setup = load("llama3.1-70b", "vllm", "b300", "bf16", 65536, 8192, 1, attention_dp=2)
    prediction = predict_serving(setup)
    assert prediction.ttft_ms >= 1e3 * total(prediction.terms["prefill"])
    assert prediction.terms["scheduler"]["ttft_besides_own_prefill"] >= 0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(("isl", "osl"), [(1024, 1024), (32000, 200)])
def test_a_lone_request_waits_for_nobody(engine, isl, osl):
    """Beside its own prefill, TTFT is what the first token of any request takes."""
    besides = [
        predict_serving(load("llama3.1-8b", engine, "h200", "fp8", *lengths, 1)).terms["scheduler"][BESIDES]
        for lengths in ((1, 1), (isl, osl))
    ]
    assert besides[1] == pytest.approx(besides[0], abs=1e-4)


def test_replicas_without_a_request_compute_nothing():
    predictions = [
        predict_serving(load("deepseek-v3-671b", "vllm", "b200", "nvfp4", 8192, 1024, clients, attention_dp=8, ep=8))
        for clients in (1, 4, 8, 9)
    ]
    for metric, ratio in (("ttft_ms", 1.2), ("tpot_ms", 1.02)):
        alone, four, eight, nine = (getattr(prediction, metric) for prediction in predictions)
        assert ratio * alone < four
        assert ratio * four < eight <= nine < 1.1 * eight


def test_requests_in_all_stages_of_a_pipeline_do_not_wait_for_one_another():
    alone = load("llama3.1-70b", "vllm", "h100", "fp8", 2048, 256, 1, tp=2, pp=4)
    four = replace(alone, concurrency=4)
    assert predict_serving(four).tpot_ms == pytest.approx(predict_serving(alone).tpot_ms, rel=0.02)


def test_a_token_more_than_the_budget_does_not_halve_the_wait():
    setup = load("gemma-3-12b", "sglang", "h200", "nvfp4", 8192, 3, 128, tp=2, pp=2)
    assert predict_serving(replace(setup, isl=8193)).ttft_ms >= 0.99 * predict_serving(setup).ttft_ms


def test_a_larger_token_budget_does_not_make_a_crowded_engine_slower():
    setup = load("mistral-small-24b", "sglang", "h100", "fp8", 128, 2, 512, tp=2)
    larger = replace(setup, max_num_tokens=2 * setup.max_num_tokens)
    assert predict_serving(larger).e2e_ms <= 1.02 * predict_serving(setup).e2e_ms


def test_one_output_token_takes_no_longer_than_two():
    setup = load("nemotron4-340b", "trtllm", "b200", "bf16", 8192, 1, 100, tp=8, attention_dp=2)
    assert predict_serving(setup).e2e_ms <= predict_serving(replace(setup, osl=2)).e2e_ms
