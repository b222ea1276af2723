"""Model of speculative decoding: expected tokens, passes of a step, and the speed-up that follows."""

from dataclasses import replace

import pytest

from llmb.perfmodel.serving_time.cache_slots import cache_slots
from llmb.perfmodel.serving_time.serving_constants import calibrated_serving
from llmb.perfmodel.serving_time.serving_predictor import predict_serving, predict_speculation
from llmb.perfmodel.serving_time.serving_setup import ServingSetup, expected_tokens
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.serving_time.speculative_step import speculation, speculative_step
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.cluster_fabric import device

PLAIN = ServingSetup(
    shape=find_model("llama3.1-8b"), gpu="h200", dtype="fp8", kv_dtype="fp8", isl=1000, osl=1000, concurrency=4,
    engine="native", max_batch_size=4, waves=2,
)  # fmt: skip
DRAFTED = replace(PLAIN, draft_tokens=3, draft_shape=find_model("llama3.2-1b"), draft_acceptance=(0.8, 0.5, 0.5))
H200, CONSTANTS = device("h200"), calibrated_serving()


def model_of(setup, acceptance, batch=4):
    return speculation(setup, acceptance, batch, H200, CONSTANTS)


def test_expected_tokens_by_hand():
    assert expected_tokens(()) == 1
    assert expected_tokens((0.8, 0.5, 0.5)) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert expected_tokens((1.0, 1.0)) == 3
    assert DRAFTED.emitted == pytest.approx(2.4)


def test_step_is_one_verification_and_a_pass_of_the_draft_for_each_token():
    steps = speculative_step(DRAFTED, H200, CONSTANTS)
    parts = [
        steps.target.terms(decodes=16, context=1500.0),  # 4 requests, each with its newest token and 3 drafts
        steps.draft.terms(decodes=8, context=1500.0),  # the newest token and the one before it
        *[steps.draft.terms(decodes=4, context=1500.0)] * 2,
    ]
    together = steps.terms(decodes=4, context=1500.0)
    for name, seconds in together.items():
        assert seconds == pytest.approx(sum(part[name] for part in parts)), name
    alone = speculative_step(DRAFTED, H200, CONSTANTS).terms(decodes=1, context=1500.0)
    assert alone["launch"] > 0
    drafts = model_of(DRAFTED, (0.8, 0.5, 0.5))
    assert drafts.draft_s + drafts.verification_s == pytest.approx(sum(together.values()))
    assert drafts.speedup == pytest.approx(2.4 * drafts.plain_step_s / sum(together.values()))


def test_speed_up_grows_with_acceptance_and_falls_with_the_cost_of_the_draft():
    never, often, always = (model_of(DRAFTED, (p,) * 3).speedup for p in (0.0, 0.8, 1.0))
    assert never < 0.9 < often < always < 4
    larger = replace(DRAFTED, draft_shape=find_model("llama3.2-3b"))
    assert model_of(larger, (0.8,) * 3).speedup < often
    assert model_of(replace(DRAFTED, max_batch_size=512), (0.8,) * 3, batch=512).speedup < often  # bound by FLOPs


def test_predicted_run_follows_the_steps_and_the_memory_of_both_models():
    plain, drafted = predict_serving(PLAIN), predict_serving(DRAFTED)
    ratio = plain.tpot_ms / drafted.tpot_ms
    assert ratio == pytest.approx(predict_speculation(DRAFTED, DRAFTED.draft_acceptance).speedup, rel=0.05)
    assert drafted.memory_gib > plain.memory_gib + 1
    assert cache_slots(DRAFTED, serving_work(DRAFTED)) < cache_slots(PLAIN, serving_work(PLAIN))
