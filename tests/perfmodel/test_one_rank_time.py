"""Modelled time beside a rank that ran alone: communication by its bytes, and the bubble by the measured step."""

from dataclasses import replace

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import OneRankRequest, RunRequest
from llmb.config.spec import Machine, RunConfig
from llmb.perfmodel.communication import step_traffic
from llmb.perfmodel.explain.run_prediction import predict_run
from llmb.perfmodel.hardware import GB
from llmb.perfmodel.pipeline_schedule import bubble
from llmb.perfmodel.shards import rank_flops
from llmb.perfmodel.step_time.cluster_fabric import device
from llmb.perfmodel.step_time.fitted_constants import native_constants
from llmb.perfmodel.step_time.one_rank_time import local_collectives, one_rank_time, rank_setup
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.step_constants import calibrated
from llmb.perfmodel.step_time.step_setup import setup_of

HERE = Machine(gpu="h200", gpus=1, gpus_per_node=1)


@pytest.fixture
def llama(recipes) -> RunConfig:
    """Llama 70b with tp4 pp8 vp5 dp2."""
    return _config(recipes, "pretrain_llama3.1", "70b", 64)


def _config(recipes, workload: str, size: str, gpus: int, rank: int | None = None) -> RunConfig:
    request = OneRankRequest(rank=rank, machine=HERE)
    return resolve(recipes[workload], RunRequest(size=size, dtype="fp8", gpus=gpus, gpu="h100", one_rank=request))


def test_tp_takes_its_bytes_over_nvlink_and_is_not_hidden(llama):
    sent = sum(t.bytes for t in step_traffic(llama, 7) if t.dimension == "tp") * 3 / 4  # a ring of four
    modelled = one_rank_time(llama, 10.0)
    assert modelled.communication_s["tp"] == pytest.approx(sent / (450 * GB * calibrated()["link"]))


def test_a_rank_has_the_layers_of_its_stage_and_the_head_on_the_last(recipes):
    first, last = (predict_run(_config(recipes, "pretrain_llama3.1", "70b", 64, rank=rank)) for rank in (0, 56))
    tokens, head = 64 * 8192, 8192 * 128256 / 4  # of a step; weights of a rank of tp 4
    flops = 6 * tokens * head / (989e12 * native_constants("rates")["gemm_bf16"])
    assert last.terms["gemm"] - first.terms["gemm"] == pytest.approx(flops, rel=0.05)
    assert last.terms["attention"] == pytest.approx(first.terms["attention"])
    uneven = _config(recipes, "pretrain_llama3.1", "405b", 1024)  # 126 layers of which six stages of eight have 16
    assert rank_setup(uneven, setup_of(uneven)).layer_count == 16


def test_copies_stand_for_collectives_in_the_prediction_of_a_rank(llama):
    traffic = step_traffic(llama, 7)
    copied = sum(2 * t.bytes for t in traffic if t.kind != "receive")
    on = device("h200")
    seconds = copied / (on.memory_bandwidth * native_constants("rates")["memory"])
    local = rank_setup(llama, setup_of(llama)).local
    assert (local.count * 64, local.bytes * 64) == (sum(t.count for t in traffic), copied)  # of 64 micro-batches
    predicted = predict_run(llama)
    assert predicted.terms["copies"] == pytest.approx(seconds)
    assert not predicted.terms.keys() & {"tp", "pp", "dp", "bubble"}


def test_recomputed_layers_of_a_rank_alone_wait_for_no_link(llama):
    """Their collectives are copies, too, which the traffic of a recomputed layer has."""
    alone = rank_setup(llama, setup_of(llama))
    among_peers = replace(alone, local=None)
    assert predict(alone).terms["recompute"] < predict(among_peers).terms["recompute"]
    assert local_collectives(llama).bytes > local_collectives(_without_recompute(llama)).bytes


def _without_recompute(config: RunConfig) -> RunConfig:
    return replace(config, workload=replace(config.workload, recompute_layers=0))


def test_kinds_are_those_of_the_layout(recipes, llama):
    assert set(one_rank_time(llama, 10.0).communication_s) == {"tp", "pp", "dp"}
    grok = one_rank_time(_config(recipes, "pretrain_grok1", "314b", 512), 10.0)
    assert set(grok.communication_s) == {"tp", "cp", "ep", "pp", "dp"}
    assert grok.total_s == pytest.approx(sum(grok.communication_s.values()) + grok.bubble_s)
    fsdp = one_rank_time(_config(recipes, "pretrain_llama3.1", "8b", 8), 10.0)
    assert (set(fsdp.communication_s), fsdp.bubble_s) == ({"fsdp"}, 0.0)  # no pipeline, no bubble


def test_gradients_that_no_micro_batch_hides_are_added(recipes):
    config = _config(recipes, "pretrain_nemotronh", "56b", 32)
    hidden, exposed = (one_rank_time(config, seconds).communication_s["dp"] for seconds in (1e3, 1e-3))
    assert exposed == pytest.approx(hidden / calibrated()["exposed_dp"], rel=1e-3)


def test_bubble_of_equal_stages_is_that_of_the_schedule(llama):
    model = replace(llama.model, vocab=1)  # without an LM head all stages have the same work
    config = replace(llama, model=model, machine=replace(llama.machine, gpu="cpu"))
    config = _without_recompute(config)
    modelled = one_rank_time(config, 10.0)
    assert modelled.communication_s is None
    assert modelled.total_s is None
    assert modelled.bubble_s / (10.0 + modelled.bubble_s) == pytest.approx(bubble(8, 5, 64), rel=1e-3)


def test_any_stage_predicts_the_same_step_if_time_is_proportional_to_work(llama):
    config = replace(llama, machine=replace(llama.machine, gpu="cpu"))
    rate = 4e14
    steps = []
    for stage in (0, 3, 7):
        measured = rank_flops(config, stage) / rate
        on_rank = replace(config, one_rank=replace(config.one_rank, rank=8 * stage))
        steps.append(measured + one_rank_time(on_rank, measured).bubble_s)
    assert steps == pytest.approx([steps[0]] * 3)
