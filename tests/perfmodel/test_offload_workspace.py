"""Temporaries of accumulating gemms, which the planner must count for a plan to run within its budget."""

from dataclasses import replace

import pytest
import torch
from llama_plans import LLAMA_1B, LLAMA_8B, plan_of

from llmb.config.offload_plan import PlanConstraints
from llmb.ops.gemm.cublas_lt import supports
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.plan_memory import CONTEXT_BYTES, MIN_SPARE_BYTES, device_bytes
from llmb.perfmodel.offload.plan_search import best_plan
from llmb.perfmodel.offload.workspace import head_temporary_bytes, workspace_bytes

ONE_CHUNK = {"chunk_tokens": 8192, "seqs_per_group": 1}
SHARD_1B = 25652 * 2048  # elements


def logits_columns(model, tokens=2):
    """The logits of each vocabulary shard, as the head's gemms take them."""
    logits_NV = torch.empty(tokens, model.vocab, dtype=torch.bfloat16)
    buckets = ParamBuckets(model)
    return [
        logits_NV[:, buckets.shard_rows(part).start : buckets.shard_rows(part).stop]
        for part in range(buckets.vocab_shards)
    ]


@pytest.mark.parametrize("model", [LLAMA_1B, LLAMA_8B], ids=lambda model: model.name)
def test_head_temporary_is_counted_exactly_where_cublas_refuses_a_shard(model):
    refused = [not supports(columns) for columns in logits_columns(model)]
    assert refused == ([False, True, False, True, False] if model is LLAMA_1B else [False] * 3)
    assert (head_temporary_bytes(model, plan_of(**ONE_CHUNK)) > 0) == any(refused)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 2 * SHARD_1B),
        ({"update": "master"}, 4 * SHARD_1B),
        ({"gbs": 1}, 2 * SHARD_1B),  # four loss chunks add to one gradient
        ({"gbs": 1, "loss_tokens": 8192}, 0),  # written once
    ],
)
def test_head_temporary_has_the_size_of_a_shards_gradient(changes, size):
    assert head_temporary_bytes(LLAMA_1B, plan_of(**{**ONE_CHUNK, **changes})) == size


@pytest.mark.parametrize(
    "changes",
    [{"seqlen": 20000, "chunk_tokens": 16384, "seqs_per_group": 1}, {"gbs": 15}, {"loss_tokens": 3000}],
    ids=["short last chunk", "short last group", "short last loss chunk"],
)
def test_trials_of_shapes_first_met_while_accumulating_are_counted(changes):
    assert head_temporary_bytes(LLAMA_8B, plan_of()) == 0
    assert head_temporary_bytes(LLAMA_8B, plan_of(**changes)) == len(ParamBuckets(LLAMA_8B).shard_rows(0)) * 4096 * 2


def test_gradient_temporaries_of_layers_are_counted_for_unequal_chunks():
    model = replace(LLAMA_8B, vocab=1024)  # whose head needs little
    plan = plan_of(update="master", seqlen=8192 + 64, chunk_tokens=8192, seqs_per_group=1, levels="F" * 64)
    normed, gate_and_up = 8192 * 4096 * 2, 2 * 14336 * 4096 * 4  # input of that gemm, and its gradient in fp32
    assert workspace_bytes(model, plan) == normed + gate_and_up
    assert workspace_bytes(model, replace(plan, seqlen=16384)) < normed + gate_and_up


@pytest.mark.slow
def test_plan_leaves_room_for_head_and_cublas_workspace():
    """On an H200 a 1b at 10 GiB ran out of memory at 9.1 GiB: the gradient of a shard was not counted."""
    constraints = PlanConstraints(dtype="bf16", seqlen=8192, host_gib=16, device_gib=10, update="stochastic", gbs=8)
    plan = best_plan(LLAMA_1B, constraints, H200).plan
    sizes = device_bytes(LLAMA_1B, plan, "h200")
    assert sum(sizes.values()) <= 10 * GIB
    arena = sum(size for kind, size in sizes.items() if kind not in ("workspace", "inputs", "context"))
    logits = plan.loss_tokens * (LLAMA_1B.vocab + LLAMA_1B.hidden) * 2
    cublas_workspace, page = 32 << 20, 20 << 20
    left = 10 * GIB - CONTEXT_BYTES - arena - sizes["inputs"] - cublas_workspace - page
    assert logits + 2 * SHARD_1B <= left


def test_small_workspaces_keep_a_spare_for_cublas_on_gpus():
    plan = plan_of(seqlen=64, gbs=2, chunk_tokens=64, seqs_per_group=1, loss_tokens=64)
    assert device_bytes(LLAMA_8B, plan, "h200")["workspace"] == workspace_bytes(LLAMA_8B, plan) + MIN_SPARE_BYTES
    assert device_bytes(LLAMA_8B, plan, "cpu")["workspace"] == int(1.1 * workspace_bytes(LLAMA_8B, plan))
