"""Activations saved with low-precision inputs and recomputed modules, and the memory of frozen weights."""

from dataclasses import replace

import pytest
from step_setups import step_setup

from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.hardware import GIB, GPUS
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.step_time.predictor import predict, step_memory
from llmb.perfmodel.step_time.run_description import run_config
from llmb.perfmodel.step_time.saved_activations import offloaded_bytes, saved_fraction, whole_logits

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


def test_logits_of_a_whole_micro_batch_are_kept():
    """The estimate counts a chunk of 2,048 tokens at 6 bytes; without a pipeline the rest is added."""
    setup = step_setup("llama3.1-8b", "h100", 8, "bf16", gbs=64, mbs=4)
    assert whole_logits(setup) == 2 * (4 * 8192 - 2048 * 6 / 2) * 128256
    assert whole_logits(LLAMA) == 0.0


def test_ranks_that_share_the_width_of_experts_save_the_tokens_of_all():
    whole, shared = (step_setup("grok1", "gb200", 128, "bf16", gbs=256, tp=4, ep=8, etp=etp) for etp in (1, 4))
    model = shared.shape.model
    saved = sum(count * block.saved_values for _, count, block in block_stack(model))
    gathered = model.layers * 3 * 2 * model.hidden  # of two experts of a token, for three more ranks
    assert saved_fraction(shared, 1.0) - saved_fraction(whole, 1.0) == pytest.approx(gathered / saved)


def test_a_fuller_rank_saves_more_routed_tokens_only():
    """A quarter more of two experts' tokens: before the expert, gate, up and their product."""
    setup = step_setup("grok1", "gb200", 128, "bf16", gbs=256, tp=4, ep=8)
    model = setup.shape.model
    saved = sum(count * block.saved_values for _, count, block in block_stack(model))
    routed = model.layers * 2 * (model.hidden + 3 * model.experts.ffn)
    even = saved_fraction(setup, routed=1.0)
    assert saved_fraction(setup, 1.25) - even == pytest.approx(0.25 * routed / saved)
    assert saved_fraction(LLAMA) == saved_fraction(LLAMA, routed=1.0)
    estimate = memory_estimate(run_config(setup))
    assert step_memory(setup).activations - estimate.activations * even == pytest.approx(
        0.25 * routed / saved * estimate.activations + whole_logits(setup)
    )


def test_groups_of_sharded_weights_may_be_smaller_than_those_of_experts():
    setup = step_setup("qwen3-30b-a3b", "b200", 256, "bf16", gbs=256, ep=64, fsdp=True, fsdp_ranks=8)
    assert 0 < step_memory(setup).total < step_memory(replace(setup, fsdp_ranks=4)).total * 1.01


def test_full_recompute_repeats_layers_of_multi_token_prediction_too():
    """60 layers and one of MTP: 16 on the fullest of four ranks, as with 61."""
    full = replace(DEEPSEEK, parallel=replace(DEEPSEEK.parallel, vp=None), recompute="full")
    fewer, more = (step_memory(replace(full, layers=layers)) for layers in (60, 61))
    assert fewer.activations == pytest.approx(more.activations, rel=0.03)


@pytest.mark.parametrize("engine", ["megatron", "native"])
def test_recomputed_layers_are_not_offloaded(engine):
    setup = step_setup(
        "llama2-7b", "gb300", 8, "bf16", seqlen=32768, gbs=8, pp=8, recompute="full", offload_layers=4, engine=engine
    )  # fmt: skip
    assert predict(setup).terms["offload"] == 0
    assert predict(replace(setup, recompute_layers=2, offload_layers=1)).terms["offload"] >= 0
    first, second = (offloaded_bytes(replace(setup, recompute_layers=n)) for n in (2, 3))
    assert first == pytest.approx(2 * second)
