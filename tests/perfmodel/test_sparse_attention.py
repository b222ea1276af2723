"""Sparse attention with an indexer in predictions of serving: what a query reads, computes and keeps."""

from dataclasses import replace

import pytest

from llmb.errors import ConfigError
from llmb.perfmodel.flops import decode_flops, forward_macs
from llmb.perfmodel.serving_time.cache_slots import request_bytes
from llmb.perfmodel.serving_time.serving_bounds import ServedFigures, serving_limits
from llmb.perfmodel.serving_time.serving_predictor import log_half_width, predict_serving, unproven_note
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.step_setup import StepSetup

SPARSE = find_model("deepseek-v3.2")
DENSE = replace(
    SPARSE, model=replace(SPARSE.model, mla=replace(SPARSE.model.mla, index_heads=0, index_dim=0, index_topk=0))
)


def setup(shape, isl, **fields):
    layout = {"tp": 8, "ep": 8, "concurrency": 16, "osl": 256} | fields
    return ServingSetup(shape=shape, gpu="b200", dtype="fp8", isl=isl, **layout)


def test_flops_of_a_short_context_differ_by_the_indexer_only():
    layers, pairs = 61, 2048 * 2048 / 2
    weights = 1536 * 64 * 128 + 7168 * (128 + 64)
    short = [forward_macs(shape.model, 2048, "causal")["mla"] for shape in (SPARSE, DENSE)]
    assert short[0] - short[1] == layers * (2048 * weights + pairs * 64 * 128)


def test_a_token_far_into_a_context_attends_to_the_chosen_ones():
    growth = decode_flops(SPARSE.model, 100_000) - decode_flops(SPARSE.model, 50_000)
    assert growth == 2 * 61 * 50_000 * 64 * 128


def test_a_request_keeps_all_latents_and_reads_few():
    sparse, dense = (serving_work(setup(shape, 32768)) for shape in (SPARSE, DENSE))
    keys = 61 * 128 * (1 + 4 / 128)  # of the indexer, in fp8 with a scale
    held = request_bytes(setup(SPARSE, 32768), sparse) - request_bytes(setup(DENSE, 32768), dense)
    assert held == pytest.approx((32768 + 128) * keys)
    assert (sparse.kv_bytes, sparse.window_kv_bytes) == (pytest.approx(keys), pytest.approx(dense.kv_bytes))


def test_long_contexts_decode_faster_than_with_dense_attention():
    def tpot(shape, isl):
        return predict_serving(setup(shape, isl, concurrency=1)).tpot_ms

    assert tpot(SPARSE, 1024) > tpot(DENSE, 1024)  # the indexer and its launches
    growth = [tpot(shape, 131_072) - tpot(shape, 16_384) for shape in (SPARSE, DENSE)]
    assert 0 < growth[0] < growth[1] / 2


def test_a_measurement_is_held_against_the_chosen_tokens_only():
    limit = [
        serving_limits(setup(s, 131_072), ServedFigures(output_tokens_per_s=100))[0].needed for s in (SPARSE, DENSE)
    ]
    assert limit[0] < limit[1] / 2


def test_the_prediction_is_called_unproven_with_a_wider_interval():
    assert "no measured TTFT or TPOT of a model with sparse attention was compared" in unproven_note(
        setup(SPARSE, 1024)
    )
    assert unproven_note(setup(DENSE, 1024)) is None
    assert log_half_width(setup(SPARSE, 1024), "tpot_ms") > log_half_width(setup(DENSE, 1024), "tpot_ms")


def test_training_is_refused_by_name():
    with pytest.raises(ConfigError, match="sparse attention, which is predicted with --task serve only"):
        StepSetup(shape=SPARSE, gpu="b200", gpus=8, dtype="fp8", seqlen=4096, mbs=1, gbs=8)
