"""Work of the native engine that others do not have: by hand-worked figures of published models."""

from dataclasses import replace

import pytest
from step_setups import step_setup

from llmb.perfmodel.params import BYTES
from llmb.perfmodel.step_time.fitted_constants import native_constants
from llmb.perfmodel.step_time.native_formats import NativeFormats
from llmb.perfmodel.step_time.native_kernels import native_kernels
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.step_setup import LocalCollectives, StepSetup
from llmb.perfmodel.step_time.step_work import RankWork
from llmb.perfmodel.step_time.waterfall import step_work

FAST, BF16_GRADIENTS = NativeFormats(fp8_fast_accum=True), NativeFormats(gradient_bytes=BYTES["bf16"])
EXPERT_WEIGHTS = 3 * 6144 * 32768  # of Grok-1


def native(model: str, dtype: str, gpus: int = 1, **options: object) -> StepSetup:
    return step_setup(model, "h200", gpus, dtype, engine="native", **{"gbs": gpus} | options)


def work_of(setup: StepSetup) -> RankWork:
    return step_work(setup).work


def low_flops(setup: StepSetup) -> float:
    work = work_of(setup)
    return sum(gemm.flops for block in (work.forward, work.backward) for gemm in block.gemms if gemm.low)


def test_backward_fp8_gemms_take_longer_where_they_accumulate_in_fp32():
    """Two of three passes of a GEMM are backward: 2 / 3 x 13 %."""
    slow = native("llama3.1-8b", "fp8")
    longer = low_flops(slow) / low_flops(replace(slow, formats=FAST))
    assert longer == pytest.approx(1 + 2 / 3 * (native_constants("work")["slow_accumulation"] - 1), abs=1e-3)
    assert low_flops(native("llama3.1-8b", "fp8-block")) == low_flops(
        native("llama3.1-8b", "fp8-block", formats=FAST)
    )  # which always adds its blocks in fp32


def test_the_only_expert_of_a_rank_is_a_grouped_gemm():
    setup = native("grok-1", "bf16", gpus=8, ep=8)
    grouped = [gemm for gemm in work_of(setup).forward.gemms if gemm.grouped]
    rows = 8192 * 2  # of eight ranks, of top 2 and eight experts
    assert len(grouped) == 2  # gate and up in one, down
    assert sum(gemm.flops for gemm in grouped) == pytest.approx(64 * 2 * rows * EXPERT_WEIGHTS, rel=0.01)
    other = replace(setup, engine="megatron-bridge")
    assert not [gemm for gemm in work_of(other).forward.gemms if gemm.grouped]


def test_gradients_accumulate_in_epilogues_and_those_of_experts_in_a_pass():
    """Read and written in fp32: 8 bytes a weight; the pass over those of experts reads a bf16 product, too."""
    for gradient_bytes, dense_bytes, routed_bytes in ((4, 8, 10), (2, 4, 6)):
        setup = native("grok-1", "bf16", layers=2, formats=NativeFormats(gradient_bytes=gradient_bytes))
        without = replace(setup, formats=NativeFormats(gradient_bytes=0))
        more = work_of(setup).backward.memory_bytes - work_of(without).backward.memory_bytes
        routed, attention = 2 * 8 * EXPERT_WEIGHTS, 2 * (2 * 6144 * 6144 + 2 * 6144 * 1024)
        router = 2 * 8 * 6144
        expected = dense_bytes * (attention + router) + (routed_bytes - 2) * routed
        assert more == pytest.approx(expected, rel=1e-3)


def test_experts_are_cast_to_fp8_once_a_step():
    """Six bytes a weight for both directions, at the rate of group casts: as if they were copies of 12.8."""
    rates = native_constants("rates")
    once, twice = (native("grok-1", "fp8", layers=1) for _ in range(2))
    twice = replace(twice, gbs=2)
    saved = work_of(once).forward.quantize_bytes - work_of(twice).forward.quantize_bytes
    assert saved == pytest.approx(8 * EXPERT_WEIGHTS * 6 / 2 * rates["memory"] / rates["group_casts"] / 2)


def test_states_of_mamba_are_carried_through_a_sequence_however_few_heads_a_rank_has():
    """54 layers, 64 steps of 128 tokens; 32 heads of 4 tiles of a state are 128 programs, 264 are at work at once."""
    step = native_constants("work")["state_step"]
    layers = 54

    def walks(tp: int, sequences: int = 1) -> tuple[float, float]:
        setup = native("nemotron-h-56b", "fp8", gpus=tp, tp=tp)
        work = work_of(replace(setup, mbs=sequences, gbs=sequences))
        return work.forward.scan_s, work.backward.scan_s

    assert walks(8) == pytest.approx((layers * 64 * step, 2 * layers * 64 * step))
    assert walks(4) == walks(8)
    assert walks(8, sequences=3)[0] == pytest.approx(2 * walks(8)[0])  # 384 programs


def test_attention_by_chunks_of_a_sequence_is_slower():
    """Two chunks of 2,048 tokens on each of two ranks, which lose the time of 300 tokens each."""
    whole, half = (native("llama3.1-8b", "bf16", gpus=cp, cp=cp) for cp in (1, 2))
    flops = [work_of(setup).forward.attention_flops for setup in (whole, half)]
    assert 2 * flops[1] / flops[0] == pytest.approx(1 + 300 / 2048)


def test_kernels_are_counted_by_block_and_layout():
    assert native_kernels(native("llama3.1-8b", "bf16")) == 32 * 24
    assert native_kernels(native("llama3.1-70b", "fp8", gpus=4, tp=4, layers=10)) == 10 * 49
    assert native_kernels(native("llama3.1-8b", "fp8", gpus=8, fsdp=True)) == 32 * 45
    assert native_kernels(native("grok-1", "fp8", gpus=64, tp=4, cp=2, ep=8, layers=8)) == 8 * 185
    assert native_kernels(native("nemotron-h-56b", "fp8", gpus=8, tp=8)) == 54 * 101 + 54 * 25 + 10 * 37


def test_graphs_spare_the_launches_and_not_the_kernels():
    launched = native("nemotron-h-56b", "fp8", gpus=8, tp=8, gbs=1)
    graphed = replace(launched, graphs=1.0)
    work = work_of(graphed)
    assert (work.launches, work.kernels) == (0.0, work_of(launched).kernels)
    terms = predict(graphed).terms
    assert terms["launch"] == pytest.approx(work.kernels * 4.2e-6)
    assert terms["host"] < predict(launched).terms["host"]


def test_a_rank_alone_copies_and_calls_its_collectives_and_sends_nothing():
    """100 collectives of a micro-batch of 41 GB in all: 10 ms at 4,100 GB/s, and 38 ms of the host without graphs."""
    peers = native("llama3.1-8b", "bf16", gpus=8, tp=8, gbs=1)
    alone = replace(peers, local=LocalCollectives(count=100, bytes=41e9))
    terms = predict(alone).terms
    assert terms["copies"] == pytest.approx(10e-3, rel=1e-3)
    assert not [name for name in ("tp", "cp", "ep", "pp", "dp", "fsdp", "bubble") if terms[name]]
    assert predict(peers).terms["tp"] > 0
    assert predict(peers).terms["copies"] == 0.0
    silent = replace(alone, local=LocalCollectives(count=0, bytes=41e9))
    graphed = [predict(replace(setup, graphs=1.0)).terms["host"] for setup in (alone, silent)]
    assert predict(silent).terms["host"] < terms["host"]
    assert graphed[0] == pytest.approx(graphed[1])
