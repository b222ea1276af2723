"""Sizes of what moves, against the figures that are published for an 8B."""

from dataclasses import replace
from math import prod

import pytest
from llama_plans import LLAMA_8B, TINY, plan_of
from outofcore_cases import OUTOFCORE_CASES

from llmb.perfmodel.offload.buffers import ParamBuckets, buffer_bytes, padded_numel
from llmb.perfmodel.params import parameters


def test_layer_bytes_match_the_published_figure():
    assert buffer_bytes(LLAMA_8B, plan_of())["param"] == 436_224_000


def test_saved_bytes_per_token_match_the_published_figures():
    """94,344, 20,616 and 12,296 bytes of a token and layer there, of which 8 are two root mean squares in fp32."""
    sizes = {kind: size / 16384 for kind, size in buffer_bytes(LLAMA_8B, plan_of()).items()}
    assert sizes["inp"] + sizes["kv"] == 12_296 - 8
    assert sizes["inp"] + sizes["kv"] + sizes["attn"] == 20_616 - 8
    assert sizes["inp"] + sizes["kv"] + sizes["attn"] + sizes["rest"] == 94_344 - 8


@pytest.mark.parametrize(("update", "state", "grad"), [("stochastic", 4, 2), ("nearest", 4, 2), ("master", 10, 4)])
def test_state_of_each_weight(update, state, grad):
    sizes = buffer_bytes(LLAMA_8B, plan_of(update=update))
    assert (2 * sizes["state"] / sizes["param"], 2 * sizes["grad"] / sizes["param"]) == (state, grad)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "model", [LLAMA_8B, TINY, *OUTOFCORE_CASES], ids=lambda model: f"{model.architecture}-{model.name}"
)
def test_buckets_hold_all_weights_once(model, tied):
    model = replace(model, tied_embeddings=tied)
    buckets = ParamBuckets(model)
    numbers = sum(prod(shape) for bucket in range(buckets.count) for shape in buckets.tensors(bucket))
    assert numbers == parameters(model)
    rows = [row for part in range(buckets.vocab_shards) for row in buckets.shard_rows(part)]
    assert rows == list(range(model.vocab))
    assert all(padded_numel(buckets.tensors(bucket)) <= buckets.bucket_numel for bucket in range(buckets.count))


def test_fp32_takes_twice_the_bytes():
    wide, narrow = (buffer_bytes(TINY, plan_of(dtype=dtype)) for dtype in ("fp32", "bf16"))
    assert {wide[kind] / narrow[kind] for kind in ("param", "inp", "kv", "rest", "grad", "state")} == {2.0}
    assert wide["dkv"] == narrow["dkv"]  # sums are fp32 in both


def test_step_is_divided_into_rounds_groups_and_chunks():
    plan = plan_of(seqlen=1000, gbs=5, chunk_tokens=300, seqs_per_group=1, groups_per_round=2)
    assert (plan.groups, plan.rounds, plan.chunks_per_group, plan.chunks_per_round) == (5, 3, 4, 8)
