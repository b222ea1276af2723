"""Widths of the 80 % intervals: wider where few models were published, and for many clients."""

from dataclasses import replace

import pytest
from step_setups import step_setup
from test_serving_time import LLAMA_70B as SERVED

from llmb.perfmodel.serving_time.serving_predictor import log_half_width as served_half_width
from llmb.perfmodel.step_time.predictor import log_half_width

LLAMA_70B = step_setup("llama3.1-70b", "h100", 64, "fp8", gbs=128, tp=4, pp=4, cp=2, vp=5)


def test_the_interval_is_wider_where_few_models_were_published():
    base = log_half_width(LLAMA_70B)
    for changes in ({"task": "lora"}, {"task": "sft"}, {"engine": "megatron-bridge-2026"}):
        assert log_half_width(replace(LLAMA_70B, **changes)) == pytest.approx(1.5 * base)
    native = replace(LLAMA_70B, engine="native", dtype="bf16", parallel=replace(LLAMA_70B.parallel, vp=None))
    titan = replace(LLAMA_70B, engine="torchtitan")
    assert log_half_width(native) == log_half_width(titan)  # on several GPUs
    assert log_half_width(titan) == pytest.approx(1.5 * log_half_width(replace(titan, dtype="bf16")))


def test_the_interval_is_wider_for_many_clients():
    widths = [served_half_width(replace(SERVED, concurrency=clients), "tpot_ms") for clients in (1, 16, 32, 256)]
    assert widths == pytest.approx([widths[0] * factor for factor in (1.0, 1.0, 1.2, 1.8)])
