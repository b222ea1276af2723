"""Activations saved with low-precision inputs and recomputed modules, and the memory of frozen weights."""

from dataclasses import replace

import pytest
from step_setups import step_setup

from llmb.perfmodel.hardware import GIB, GPUS
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.step_time.predictor import predict, run_config, step_memory
from llmb.perfmodel.step_time.saved_activations import saved_fraction

LLAMA = step_setup(
    "llama3.1-70b", "h100", 8, "bf16", seqlen=4096, gbs=32, tp=2, pp=4, vp=20, engine="megatron-2024"
)  # fmt: skip
DEEPSEEK = step_setup("deepseek-v3", "gb200", 256, "bf16", seqlen=4096, gbs=2048, pp=4, vp=4, ep=64)


def test_a_dense_model_in_bf16_saves_what_the_estimate_assumes():
    assert saved_fraction(LLAMA) == pytest.approx(1.0)


def test_low_precision_inputs_take_a_byte():
    """Of a 70b layer in fp8: norm outputs, attention output and the input of the down projection."""
    hidden, ffn, kv = 8192, 28672, 1024
    inputs = 2 * hidden + hidden + ffn
    plain = 2 * hidden + 2 * hidden + 2 * kv + 2 * hidden + 3 * ffn
    assert saved_fraction(replace(LLAMA, dtype="fp8")) == pytest.approx(1 - inputs / 2 / plain)


def test_recomputed_modules_save_nothing():
    fractions = [
        saved_fraction(replace(DEEPSEEK, recompute_modules=modules))
        for modules in ((), ("layernorm",), ("mla_up_proj",), ("mla_up_proj", "moe_act"), ("mla_up_proj", "moe", "mlp"))
    ]
    assert fractions[1] < fractions[0]
    assert fractions[4] < fractions[3] < fractions[2] < fractions[0] < 1


def test_frozen_weights_have_no_gradients_and_no_optimizer_state():
    """A published run of 8 H100: full training of the same layout would need more than twice its memory."""
    lora = replace(LLAMA, task="lora", document_tokens=512)
    full, frozen = step_memory(LLAMA), step_memory(lora)
    assert (frozen.gradients, frozen.optimizer) == (0, 0)
    assert frozen.weights == full.weights
    assert predict(lora).memory_gib == pytest.approx(frozen.total / GIB)
    assert frozen.total < GPUS["h100"].memory_bytes < full.total


def test_other_parts_of_the_estimate_stay():
    estimate, memory = memory_estimate(run_config(DEEPSEEK)), step_memory(DEEPSEEK)
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        estimate.weights, estimate.gradients, estimate.optimizer,
    )  # fmt: skip
