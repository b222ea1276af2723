"""Memory of layers under autograd: what a dry run on the meta device allocates, which the plan must count."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from llama_plans import LLAMA_8B, plan_of

from llmb.config.model import Model, MoEConfig
from llmb.config.offload_plan import PlanConstraints
from llmb.models.autograd_layer import AutogradLayer
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues
from llmb.ops import dispatch
from llmb.ops.attention.segment_attention import chunk_segments
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.autograd_workspace import autograd_backward_bytes, autograd_forward_bytes
from llmb.perfmodel.offload.buffers import buffer_bytes
from llmb.perfmodel.offload.layer_params import layer_param_shapes
from llmb.perfmodel.offload.layer_work import layer_work
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.plan_search import best_plan
from llmb.perfmodel.offload.workspace import workspace_bytes
from llmb.train.dry_run.dispatch_watch import DispatchWatch
from llmb.train.dry_run.fused_op_shapes import fused_shapes
from llmb.train.dry_run.memory_tracker import MemoryTracker

ROWS = 4096
QWEN3_8B = replace(
    LLAMA_8B, name="Qwen3-8B", architecture="qwen3", layers=36, ffn=12288, vocab=151936, qk_norm="head"
)  # fmt: skip
QWEN3_30B_A3B = replace(
    QWEN3_8B, name="Qwen3-30B-A3B", architecture="qwen3_moe", layers=48, hidden=2048, kv_heads=4, ffn=6144,
    experts=MoEConfig(count=128, top_k=8, ffn=768),
)  # fmt: skip
BIASED_8B = replace(LLAMA_8B, name="biased", ffn=18944, kv_heads=4, qkv_bias=True, o_bias=True)
MODELS: dict[str, Model] = {
    "qkv and o biases": BIASED_8B,
    "OLMo-2-7B": replace(
        LLAMA_8B, architecture="olmo2", ffn=11008, kv_heads=32, qk_norm="projection", pre_norms=False, post_norms=True
    ),
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Mixtral-8x7B": replace(LLAMA_8B, architecture="mixtral", experts=MoEConfig(count=8, top_k=2, ffn=14336)),
    "gpt-oss-20b": replace(
        LLAMA_8B, architecture="gpt_oss", hidden=2880, heads=64, head_dim=64, qkv_bias=True, o_bias=True,
        attention_sinks=True, activation="swigluoai", experts=MoEConfig(count=32, top_k=4, ffn=2880, bias=True),
    ),
}  # fmt: skip


def measured(model: Model, attn_saved: bool) -> tuple[int, int, float]:
    """Return the peaks in bytes of a layer forward and backward in bf16, and its FLOPs.

    The chunk is the second half of a context, so that attention has the keys of another.
    """
    watch = DispatchWatch(MemoryTracker())
    with watch, torch.device("meta"), fused_shapes("causal", watch.add_flops):
        shapes, bf16 = layer_param_shapes(model), torch.bfloat16
        weights, grads = ([torch.empty(shape, dtype=bf16) for shape in shapes.values()] for _ in range(2))
        input_NC, out_NC, d_residual_NC = (torch.empty(ROWS, model.hidden, dtype=bf16) for _ in range(3))
        kv, dkv = (_key_values(model, dtype) for dtype in (bf16, torch.float32))
        attn = AttentionOutput(
            torch.empty(ROWS, model.heads * model.head_dim, dtype=bf16), torch.empty(model.heads, ROWS)
        )
        common: tuple[Any, ...] = (
            chunk_segments([0], ROWS, 2 * ROWS), *(torch.empty(ROWS, model.head_dim // 2) for _ in range(2)),
        )  # fmt: skip
        layer, memory = AutogradLayer(model, [*shapes]), watch.memory
        before = memory.live
        memory.reset_peak()
        layer.forward(weights, input_NC, kv, *common, out_NC, attn if attn_saved else None)
        forward = memory.peak - before
        memory.reset_peak()
        layer.backward(
            weights, grads, True, input_NC, kv, attn, attn_saved, dkv, True, *common, d_residual_NC
        )  # fmt: skip
        assert memory.live == before, "a layer leaves no memory behind"
        return forward, memory.peak - before, watch.flops


def _key_values(model: Model, dtype: torch.dtype) -> KeyValues:
    return KeyValues(*(torch.empty(2 * ROWS, model.kv_heads * model.head_dim, dtype=dtype) for _ in "kv"))


def _ignore_launch(*_arguments: Any) -> None:
    pass


@pytest.fixture(scope="module")
def dry_runs() -> dict[tuple[str, bool], tuple[int, int, float]]:
    """Peaks of all models, in a process of its own: a dry run replaces all kernels of its process."""
    cases = [(name, attn_saved) for name in MODELS for attn_saved in (True, False)]
    start = {"initializer": dispatch.begin_dry_run, "initargs": (_ignore_launch,)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **start) as pool:
        futures = {case: pool.submit(measured, MODELS[case[0]], case[1]) for case in cases}
        return {case: future.result() for case, future in futures.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("attn_saved", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_counted(name: str, attn_saved: bool, dry_runs: dict[Any, Any]) -> None:
    """Backward, the larger one, to 5 %: and never less than what is allocated."""
    forward, backward, _ = dry_runs[name, attn_saved]
    assert forward <= autograd_forward_bytes(MODELS[name], ROWS, 2)
    assert backward > forward
    assert backward <= autograd_backward_bytes(MODELS[name], ROWS, 2, 1.0, attn_saved) <= 1.05 * backward


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_flops_are_counted(name: str, dry_runs: dict[Any, Any]) -> None:
    """Forward, the same once more with the attention, and backward, where the dry run counts attention twice."""
    model = MODELS[name]
    gemms = 2.0 * ROWS * layer_work(model, plan_of()).gemm_macs
    attention = 4.0 * ROWS * (ROWS / 2 + ROWS) * model.heads * model.head_dim
    rel = 5e-4 if model.experts is not None and model.experts.bias else 1e-6  # biases' gradients are gemms with ones
    assert dry_runs[name, False][2] == pytest.approx((1 + 1 + 2) * gemms + (1 + 1 + 2) * attention, rel=rel)
    assert dry_runs[name, True][2] == pytest.approx((1 + 1 + 2) * gemms + (1 + 2) * attention, rel=rel)


def test_peak_of_a_layer_by_hand() -> None:
    """At the gradient of the down projection, which exists outside of its buffer at that time."""
    activations = 4 * 12288 + 4 * 4096  # gate, up, their product and its gradient; residual, normed, output, gradient
    expected = 2 * (ROWS * activations + 4096 * 12288)
    assert autograd_backward_bytes(QWEN3_8B, ROWS, 2, 1.0, attn_saved=True) == expected
    before_attention = 4096 + 6144 + 5120  # normed; queries, keys, values; queries and keys before their norms
    expected += 2 * ROWS * before_attention
    assert autograd_backward_bytes(QWEN3_8B, ROWS, 2, 1.0, attn_saved=False) == expected


def test_experts_that_a_token_uses_count_in_flops_and_all_of_them_in_bytes() -> None:
    work, attention = layer_work(QWEN3_30B_A3B, plan_of()), 2048 * (2 * 4096 + 2 * 512)
    assert work.gemm_macs == work.recompute_macs == attention + 8 * 3 * 2048 * 768 + 2048 * 128
    gradients = sum(torch.Size(shape).numel() for shape in layer_param_shapes(QWEN3_30B_A3B).values())
    assert work.gradient_bytes == pytest.approx((2 + 2 * 2) * gradients, rel=1e-4)  # norms of blocks are not counted
    assert gradients > 128 * 3 * 2048 * 768


def test_recomputed_attention_is_part_of_the_workspace() -> None:
    saved, recomputed = (
        workspace_bytes(BIASED_8B, plan_of(levels=level * 32, loss_tokens=128)) for level in ("A", "I")
    )
    assert recomputed - saved > buffer_bytes(BIASED_8B, plan_of())["attn"]


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "host_gib", "device_gib"), [(QWEN3_8B, 75, 24), (QWEN3_30B_A3B, 300, 78)])
def test_published_models_have_plans_within_their_budgets(model: Model, host_gib: float, device_gib: float) -> None:
    constraints = PlanConstraints(dtype="bf16", seqlen=8192, host_gib=host_gib, device_gib=device_gib)
    result = best_plan(model, constraints, H200)
    assert ("F" in result.plan.levels) == (model is QWEN3_8B)  # whose layers have explicit backward
    assert sum(result.device_bytes.values()) <= device_gib * GIB
    assert sum(result.host_bytes.values()) <= host_gib * GIB
