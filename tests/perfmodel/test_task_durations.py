"""FLOPs and seconds of a step's parts."""

from dataclasses import replace

import pytest
from llama_plans import LLAMA_8B, TINY, plan_of

from llmb.perfmodel.flops import train_flops_per_sequence
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.operand_bytes import cast_bytes, operand_bytes
from llmb.perfmodel.offload.step_tasks import round_chunks, step_start, step_tasks
from llmb.perfmodel.offload.task_durations import TaskCost, TaskDurations


@pytest.mark.parametrize(("seqlen", "chunk", "together"), [(8192, 16384, 2), (65536, 16384, 1), (65536, 65536, 1)])
def test_a_step_without_recompute_has_the_flops_of_the_model(seqlen, chunk, together):
    """All of them, and q x k of the attention once more, as a fused backward computes it."""
    plan = plan_of(seqlen=seqlen, chunk_tokens=chunk, seqs_per_group=together, gbs=2)
    plan = plan_of(**{**vars(plan), "levels": "F" * (32 * plan.chunks_per_round)})
    durations = TaskDurations(LLAMA_8B, plan, H200)
    executed = sum(durations.cost(task).flops for task in step_tasks(LLAMA_8B, plan, step_start(plan, 0)))
    recompute = 2 * 2.0 * 32 * (seqlen**2 / 2) * 4096
    assert executed == pytest.approx(2 * train_flops_per_sequence(LLAMA_8B, seqlen, "causal") + recompute, rel=1e-12)


def test_recomputation_of_each_level():
    """Queries' and output's products, gate and up: 69 % of a layer's products going forward, as published."""
    plan = plan_of()
    durations, (chunk, *_) = TaskDurations(LLAMA_8B, plan, H200), round_chunks(plan, 0)
    forward = durations.forward(chunk)
    assert durations.recompute(chunk, "A").gemms / forward.gemms == pytest.approx(0.69, abs=0.005)
    assert (durations.recompute(chunk, "A").causal, durations.recompute(chunk, "A").rectangle) == (0, 0)
    assert durations.recompute(chunk, "I").causal == forward.causal
    assert durations.recompute(chunk, "F").flops == 0


def test_own_keys_and_earlier_ones_by_hand():
    """3 sequences of 4 tokens in a chunk have 24 pairs; chunks of a sequence of 10 have 4, 4 and 2 tokens."""
    width = 32
    short = plan_of(seqlen=4, chunk_tokens=12, seqs_per_group=3, gbs=3, levels="I" * 3)
    (chunk,) = round_chunks(short, 0)
    durations = TaskDurations(TINY, short, H200)
    assert durations.attention(chunk) == (4 * width * 24, 0)
    long = plan_of(seqlen=10, chunk_tokens=4, seqs_per_group=1, gbs=1, levels="I" * 9)
    durations, chunks = TaskDurations(TINY, long, H200), round_chunks(long, 0)
    pairs = [(8, 0), (8, 4 * 4), (2, 2 * 8)]
    assert [durations.attention(chunk) for chunk in chunks] == [
        (4 * width * local, 4 * width * rectangle) for local, rectangle in pairs
    ]
    for chunk in chunks:
        local, earlier = durations.attention(chunk)
        for cost in (durations.forward(chunk), durations.recompute(chunk, "I")):
            assert (cost.causal, cost.rectangle) == (local, earlier)
        backward = durations.backward(chunk)
        assert (backward.backward_causal, backward.backward_rectangle) == (2.5 * local, 2.5 * earlier)


@pytest.mark.parametrize("window", [1, 3, 5, 7, 30])
def test_a_window_hides_earlier_keys(window):
    """Of every second layer, so that pairs are the mean of both."""
    plan = plan_of(seqlen=10, chunk_tokens=4, seqs_per_group=1, gbs=1, levels="I" * 6)
    model = replace(TINY, layers=2, attention_pattern="SF", window=window)
    durations = TaskDurations(model, plan, H200)
    for chunk in round_chunks(plan, 0):
        queries = range(chunk.first, chunk.first + chunk.tokens)
        inside = sum(query - key < window for query in queries for key in range(chunk.first))
        _, rectangle = durations.attention(chunk)
        assert rectangle == 4 * 32 * (inside + chunk.tokens * chunk.first) / 2
    whole = TaskDurations(model, plan_of(seqlen=10, chunk_tokens=10, seqs_per_group=1, gbs=1, levels="II"), H200)
    keys = min(window, 10)
    assert whole.attention(round_chunks(whole.plan, 0)[0]) == (4 * 32 * (50 + 10 * keys - keys**2 / 2) / 2, 0)


def test_a_softcap_slows_attention_down():
    plain, softcapped = (
        TaskDurations(replace(LLAMA_8B, attn_logit_softcap=softcap), plan_of(), H200) for softcap in (None, 30.0)
    )
    cost = TaskCost(causal=1e15, backward_rectangle=1e15)
    assert softcapped.seconds_of(cost) == pytest.approx(1.4 * plain.seconds_of(cost))
    assert softcapped.seconds_of(TaskCost(gemms=1e15)) == plain.seconds_of(TaskCost(gemms=1e15))


def test_causal_and_past_attention_have_separate_rates():
    durations = TaskDurations(LLAMA_8B, plan_of(), H200)
    cost = TaskCost(causal=513e12, rectangle=2 * 576e12, backward_causal=3 * 427e12, backward_rectangle=4 * 525e12)
    assert durations.seconds_of(cost) == pytest.approx(1 + 2 + 3 + 4)
    assert durations.seconds_of(cost + cost) == pytest.approx(20)


def test_diagonal_takes_constant_time_per_query():
    """So a square of 16,384 tokens is two of 8,192 and the rectangle between them."""
    seconds = {}
    for seqlen, together in ((4096, 4), (8192, 2), (16384, 1)):
        plan = plan_of(seqlen=seqlen, seqs_per_group=together)
        durations, (chunk, *_) = TaskDurations(LLAMA_8B, plan, H200), round_chunks(plan, 0)
        causal, _ = durations.attention(chunk)
        seconds[seqlen] = durations.seconds_of(TaskCost(causal=causal, backward_causal=2.5 * causal))
    rectangle = 4.0 * 8192 * 8192 * 4096 * (1 / 576e12 + 2.5 / 525e12)
    assert seconds[16384] == pytest.approx(seconds[8192] + rectangle)
    assert seconds[8192] == pytest.approx(seconds[4096] + rectangle / 2)


def test_squares_as_fast_as_rectangles_are_so_at_every_length():
    rates = replace(H200, attention_forward_tflops=700.0, attention_backward_tflops=600.0)
    assert TaskDurations(LLAMA_8B, plan_of(seqlen=64, seqs_per_group=256), rates).causal_tflops == (700.0, 600.0)


FP8_FORWARD = {  # bytes a token of Llama 8B, by who reads (2 a number) and writes (1 a number and form)
    "two norms": 2 * (2 + 1) * 4096,
    "attention cast": (2 + 1) * 4096,
    "activation": 2 * 28672 + 14336,
    "two residual adds": 2 * 3 * 4096 * 2,
    "rotation": 2 * (4096 + 1024) * 2,
}
FP8_BACKWARD = {
    "gradient of the residual, twice, in both layouts": 2 * (2 + 1 + 1) * 4096,
    "gradient of act, gate and up, to both layouts of theirs": 2 * (14336 + 28672) + 2 * 28672,
    "activation again": 14336,
    "two norms in columns, read twice": 2 * (2 + 2 + 1) * 4096,
    "two norms back": 2 * 4 * 4096 * 2,
    "attention cast": (2 + 1) * 4096,
    "gradients of queries, keys and values in both layouts": (2 + 1 + 1) * (4096 + 2 * 1024),
}
WEIGHTS = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)  # of a layer


def test_bf16_reads_and_writes_by_hand():
    """At every place the same: nothing is cast."""
    plan = plan_of(groups_per_round=3, gbs=6, levels="I" * 96)
    durations = TaskDurations(LLAMA_8B, plan, H200)
    for task in step_tasks(LLAMA_8B, plan, step_start(plan, 2)):
        if task.kind == "forward":
            assert durations.cost(task).memory_bytes == 16384 * 188_416
        if task.kind == "backward":
            assert durations.cost(task).memory_bytes == 16384 * (307_200 + 73_728) + 2 * WEIGHTS * 2


def test_fp8_reads_and_writes_by_hand():
    """333,824 bytes a token for the linear layers going back, where bf16 has 270,336."""
    plan = plan_of(dtype="fp8", groups_per_round=3, gbs=6, levels="F" * 96)
    durations, (_, chunk, _) = TaskDurations(LLAMA_8B, plan, H200), round_chunks(plan, 0)
    assert durations.forward(chunk).memory_bytes == 16384 * sum(FP8_FORWARD.values()) == 16384 * 178_176
    besides = 2 * (4096 + 1024) * 2 + 2 * 1024 * 4 * 2  # rotation, sums of dk and dv: as in bf16
    sums = 3 * WEIGHTS * 2  # the product's output and the sum are read, and the sum is written
    assert durations.backward(chunk).memory_bytes == 16384 * (sum(FP8_BACKWARD.values()) + besides) + sums
    assert (sum(FP8_BACKWARD.values()), operand_bytes(LLAMA_8B, plan_of()).backward) == (333_824, 270_336)
    recompute = sum(FP8_FORWARD[item] for item in ("two norms", "attention cast")) + 3 * 4096 * 2 + 2 * 4096 * 2
    assert durations.recompute(chunk, "A").memory_bytes == 16384 * recompute


@pytest.mark.parametrize(("recipe", "cast", "cast_both"), [("rowwise", 2 + 2 + 1, 2 + 2 + 2), ("blockwise", 3, 4)])
def test_many_scales_read_and_write_by_hand(recipe, cast, cast_both):
    """Norms and activation write bf16; rowwise reads it twice, once for the largest magnitudes."""
    plan = plan_of(dtype="fp8", fp8_recipe=recipe)
    operands, h, f, qkv = operand_bytes(LLAMA_8B, plan), 4096, 14336, 4096 + 2 * 1024
    norms = 2 * (2 + 2 + cast) * h
    assert operands.forward == norms + cast * h + (2 * 3 + cast) * f
    assert operands.recompute == norms + cast * h
    residuals, activation = 2 * cast_both * h, 2 * 6 * f + cast_both * 2 * f + cast * f
    assert operands.backward == norms + 2 * 2 * 4 * h + cast * h + residuals + cast_both * qkv + activation
    assert cast_bytes(plan) == cast


def test_fp8_casts_weights_once_a_layer_direction_and_round():
    """3 bytes each. Layer 1 computes again what its places 1 and 0 did not keep: three matrices more, once.

    10 sequences in pairs are a round of three chunks and one of two.
    """
    plan = plan_of(dtype="fp8", groups_per_round=3, gbs=10, levels="FFF" + "AIF" + "FFF" * 30)
    durations = TaskDurations(LLAMA_8B, plan, H200)
    between = round_chunks(plan, 0)[1]  # neither way the first
    bare = {"forward": durations.forward(between).memory_bytes, "backward": durations.backward(between).memory_bytes}
    actual = {}
    for task in step_tasks(LLAMA_8B, plan, step_start(plan, 2)):
        if task.kind in bare and task.layer in (0, 1):
            recompute = durations.recompute(between, task.level).memory_bytes if task.kind == "backward" else 0
            casts = durations.cost(task).memory_bytes - bare[task.kind] - recompute
            actual[task.kind, task.layer, task.round, task.chunk.place] = casts
    whole, three = 3 * WEIGHTS, 3 * (WEIGHTS - 4096 * 14336)
    assert {where: casts for where, casts in actual.items() if casts} == {
        **{("forward", layer, round_, 0): whole for layer in (0, 1) for round_ in (0, 1)},
        ("backward", 0, 0, 2): whole, ("backward", 1, 0, 2): whole, ("backward", 1, 0, 1): three,
        ("backward", 0, 1, 1): whole, ("backward", 1, 1, 1): whole + three,
    }  # fmt: skip


def test_head_accumulates_for_every_loss_chunk():
    """16,384 tokens, 2,048 at once: 8 times; the last of 3,000 at once are fewer and cost as much."""
    gradients = 2 * 128256 * 4096 * 2  # read and written, in bf16
    for at_once, times in ((16384, 1), (2048, 8), (3000, 6)):
        plan = plan_of(loss_tokens=at_once)
        cost = TaskDurations(LLAMA_8B, plan, H200).head(round_chunks(plan, 0)[0])
        assert cost.memory_bytes == pytest.approx(times * gradients + 16384 * 2 * (4 * 128256 + 8 * 4096))


def test_layer_duration_is_close_to_the_published_one():
    """13.64 ms forward, 28.9 back, the head 81 ms, for 16,384 tokens on an H100 of the same peak."""
    plan = plan_of()
    durations, (chunk, *_) = TaskDurations(LLAMA_8B, plan, H200), round_chunks(plan, 0)
    milliseconds = [
        1e3 * durations.seconds_of(cost(chunk)) for cost in (durations.forward, durations.backward, durations.head)
    ]
    assert milliseconds == pytest.approx([13.64, 28.9, 81.0], rel=0.06)
