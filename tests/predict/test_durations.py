"""FLOPs and seconds of a step's parts."""

from dataclasses import replace

import pytest
from llama_plans import LLAMA_8B, TINY, plan_of

from llmb.costs import train_flops_per_sequence
from llmb.predict.durations import Cost, Durations
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
    assert (durations.recompute(chunk, "A").squares, durations.recompute(chunk, "A").past) == (0, 0)
    assert durations.recompute(chunk, "I").squares == forward.squares
    assert durations.recompute(chunk, "F").flops == 0


def test_own_keys_and_earlier_ones_by_hand():
    """3 sequences of 4 tokens in a chunk have 24 pairs; chunks of a sequence of 10 have 4, 4 and 2 tokens."""
    width, back = 32, 2.5
    short = plan_of(seqlen=4, chunk_tokens=12, seqs_per_group=3, gbs=3, levels="I" * 3)
    (chunk,) = chunks_of(short, 0)
    durations = Durations(TINY, short, H200)
    assert durations.attention(chunk) == (4 * width * 24, 0)
    long = plan_of(seqlen=10, chunk_tokens=4, seqs_per_group=1, gbs=1, levels="I" * 9)
    durations, chunks = Durations(TINY, long, H200), chunks_of(long, 0)
    pairs = [(8, 0), (8, 4 * 4), (2, 2 * 8)]
    assert [durations.attention(chunk) for chunk in chunks] == [
        (4 * width * own, 4 * width * past) for own, past in pairs
    ]
    for chunk, (own, past) in zip(chunks, pairs, strict=True):
        there, again, behind = durations.forward(chunk), durations.recompute(chunk, "I"), durations.backward(chunk)
        assert (there.squares, there.past) == (again.squares, again.past) == (4 * width * own, 4 * width * past)
        assert (behind.backward_squares, behind.backward_past) == (back * there.squares, back * there.past)


def test_each_part_of_the_attention_has_its_own_rate():
    durations = Durations(LLAMA_8B, plan_of(), H200)
    cost = Cost(squares=513e12, past=2 * 576e12, backward_squares=3 * 427e12, backward_past=4 * 525e12)
    assert durations.seconds_of(cost) == pytest.approx(1 + 2 + 3 + 4)
    assert durations.seconds_of(cost + cost) == pytest.approx(20)


def test_a_diagonal_takes_the_same_for_every_query_however_long_the_square():
    """So a square of 16,384 tokens is two of 8,192 and the rectangle between them."""
    seconds = {}
    for seqlen, together in ((4096, 4), (8192, 2), (16384, 1)):
        plan = plan_of(seqlen=seqlen, seqs_per_group=together)
        durations, (chunk, *_) = Durations(LLAMA_8B, plan, H200), chunks_of(plan, 0)
        squares, _ = durations.attention(chunk)
        seconds[seqlen] = durations.seconds_of(Cost(squares=squares, backward_squares=2.5 * squares))
    rectangle = 4.0 * 8192 * 8192 * 4096 * (1 / 576e12 + 2.5 / 525e12)
    assert seconds[16384] == pytest.approx(seconds[8192] + rectangle)
    assert seconds[8192] == pytest.approx(seconds[4096] + rectangle / 2)


def test_squares_that_are_not_the_slower_form_are_as_fast_at_every_length():
    rates = replace(H200, attention_forward_tflops=700.0, attention_backward_tflops=600.0)
    assert Durations(LLAMA_8B, plan_of(seqlen=64, seqs_per_group=256), rates).squares_tflops == (700.0, 600.0)


def test_the_head_adds_to_its_gradients_for_every_few_tokens():
    """16,384 tokens, 2,048 at once: 8 times; the last of 3,000 at once are fewer and cost as much."""
    gradients = 2 * 128256 * 4096 * 2  # read and written, in bf16
    for at_once, times in ((16384, 1), (2048, 8), (3000, 6)):
        plan = plan_of(loss_tokens=at_once)
        cost = Durations(LLAMA_8B, plan, H200).head(chunks_of(plan, 0)[0])
        assert cost.passed == pytest.approx(times * gradients + 16384 * 2 * (4 * 128256 + 8 * 4096))


def test_a_layer_takes_about_what_is_published():
    """13.64 ms forward, 28.9 back, the head 81 ms, for 16,384 tokens on an H100 of the same peak."""
    plan = plan_of()
    durations, (chunk, *_) = Durations(LLAMA_8B, plan, H200), chunks_of(plan, 0)
    milliseconds = [
        1e3 * durations.seconds_of(cost(chunk)) for cost in (durations.forward, durations.backward, durations.head)
    ]
    assert milliseconds == pytest.approx([13.64, 28.9, 81.0], rel=0.06)
