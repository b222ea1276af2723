"""FLOPs and seconds of a step's parts."""

import pytest
from llama_plans import LLAMA_8B, plan_of

from llmb.costs import train_flops_per_sequence
from llmb.predict.durations import Durations
from llmb.predict.rates import H200
from llmb.predict.work import beginning, chunks_of, step_work


@pytest.mark.parametrize(("seqlen", "chunk", "together"), [(8192, 16384, 2), (65536, 16384, 1), (65536, 65536, 1)])
def test_a_step_without_recompute_has_the_flops_of_the_model(seqlen, chunk, together):
    """All of them, and q x k of the attention once more, as a fused backward computes it."""
    plan = plan_of(seqlen=seqlen, chunk_tokens=chunk, seqs_per_group=together, gbs=2)
    plan = plan_of(**{**vars(plan), "levels": "F" * (32 * plan.chunks_per_round)})
    durations = Durations(LLAMA_8B, plan, H200)
    executed = sum(durations.cost(work).flops for work in step_work(LLAMA_8B, plan, beginning(plan, 0)))
    again = 2 * 2.0 * 32 * (seqlen**2 / 2) * 4096
    assert executed == pytest.approx(2 * train_flops_per_sequence(LLAMA_8B, seqlen, "causal") + again, rel=1e-12)


def test_what_a_level_computes_again():
    """Queries' and output's products, gate and up: 69 % of a layer's products going forward, as published."""
    plan = plan_of()
    durations, (chunk, *_) = Durations(LLAMA_8B, plan, H200), chunks_of(plan, 0)
    forward = durations.forward(chunk)
    assert durations.recompute(chunk, "A").products / forward.products == pytest.approx(0.69, abs=0.005)
    assert durations.recompute(chunk, "A").attention == 0
    assert durations.recompute(chunk, "I").attention == forward.attention
    assert durations.recompute(chunk, "F").flops == 0


def test_a_layer_takes_about_what_is_published():
    """13.64 ms forward, 28.9 back, the head 81 ms, for 16,384 tokens on an H100 of the same peak."""
    plan = plan_of()
    durations, (chunk, *_) = Durations(LLAMA_8B, plan, H200), chunks_of(plan, 0)
    milliseconds = [
        1e3 * durations.seconds_of(cost(chunk)) for cost in (durations.forward, durations.backward, durations.head)
    ]
    assert milliseconds == pytest.approx([13.64, 28.9, 81.0], rel=0.06)
