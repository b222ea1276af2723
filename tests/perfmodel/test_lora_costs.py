"""Costs of LoRA: FLOPs of frozen weights and adapters, memory on both sides, and a dry run of a layer."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from llama_plans import LLAMA_8B, plan_of

from llmb.config.native.llama_layer_shapes import layer_weight_shapes
from llmb.config.native.lora_shapes import TARGETS, adapter_numel, adapter_params
from llmb.config.offload_plan import Lora, Plan
from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.models.llama_layer.layer import LlamaLayer
from llmb.models.llama_layer.layer_tensors import AttentionOutput, KeyValues, LayerWeights
from llmb.models.llama_layer.lora_adapters import LoraAdapters
from llmb.models.llama_layer.lora_linears import LoraLinears
from llmb.offload.buffer_views import saved_activations_view
from llmb.ops import dispatch
from llmb.ops.attention.segment_attention import chunk_segments
from llmb.perfmodel.flops import frozen_flops_per_sequence, train_flops_per_sequence
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import ParamBuckets, buffer_bytes, widened_numel
from llmb.perfmodel.offload.layer_work import layer_work
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.plan_memory import device_bytes, host_bytes
from llmb.perfmodel.offload.simulator import simulate
from llmb.perfmodel.offload.step_tasks import step_start, step_tasks
from llmb.perfmodel.offload.task_durations import TaskDurations
from llmb.perfmodel.offload.workspace import workspace_bytes
from llmb.train.dry_run.dispatch_watch import DispatchWatch
from llmb.train.dry_run.fused_op_shapes import fused_shapes
from llmb.train.dry_run.memory_tracker import MemoryTracker

LORA = Lora(rank=16, alpha=32.0, targets=TARGETS, frozen_weights="bf16")
FP8 = replace(LORA, frozen_weights="fp8")
ROWS = 4096
LLAMA_70B = replace(LLAMA_8B, name="70B", layers=80, hidden=8192, ffn=28672, heads=64)


def lora_plan(lora: Lora = LORA, **changes: Any) -> Plan:
    return plan_of(**{"grad_blocks": 0, "state_blocks": 0, "lora": lora, **changes})


def test_adapters_of_8b_by_hand() -> None:
    inputs, outputs = 3 * 4096 + 4096 + 2 * 4096 + 14336, 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert adapter_params(LLAMA_8B, LORA) == 32 * 16 * (inputs + outputs) == 41_943_040
    assert adapter_numel(LLAMA_8B, LORA) == adapter_params(LLAMA_8B, LORA)  # all shapes are aligned
    sizes = buffer_bytes(LLAMA_8B, lora_plan(update="master"))
    assert sizes["adapters"] == 41_943_040 * (2 + 4 + 10)
    assert (sizes["grad"], sizes["state"]) == (0, 0)


def test_frozen_weights_in_fp8_take_half_of_the_memory_and_a_widened_layer() -> None:
    plain, fp8 = (buffer_bytes(LLAMA_8B, lora_plan(lora))["param"] for lora in (LORA, FP8))
    rows = 6144 + 4096 + 28672 + 4096
    assert (plain, fp8) == (2 * ParamBuckets(LLAMA_8B).bucket_numel, plain // 2 + 2 * 4096 + 4 * rows)
    assert widened_numel(LLAMA_8B) == 128256 * 4096 + 4096  # the head, with the final norm
    difference = workspace_bytes(LLAMA_8B, lora_plan(FP8)) - workspace_bytes(LLAMA_8B, lora_plan())
    assert difference == 2 * widened_numel(LLAMA_8B)


def test_a_step_has_the_flops_of_frozen_weights_and_adapters() -> None:
    """Besides q x k of the attention once more, and x A^T, which backward computes again."""
    plan = lora_plan(gbs=2, levels="F" * 32)
    durations = TaskDurations(LLAMA_8B, plan, H200)
    executed = sum(durations.cost(task).flops for task in step_tasks(LLAMA_8B, plan, step_start(plan, 0)))
    model = train_flops_per_sequence(LLAMA_8B, 8192, "causal") - frozen_flops_per_sequence(LLAMA_8B, LORA, 8192)
    low = 2.0 * 32 * 8192 * 16 * (3 * 4096 + 4096 + 2 * 4096 + 14336)
    recompute = 2.0 * 32 * (8192**2 / 2) * 4096
    assert executed == pytest.approx(2 * (model + low + recompute), rel=1e-12)
    per_token = 4 * (32 * 218_103_808 + 128256 * 4096) + 6 * 41_943_040  # 4 per frozen weight
    attention = 6 * 32 * 8192 / 2 * 2 * 4096
    assert model / 8192 == pytest.approx(per_token + attention, rel=1e-12)


def test_nothing_of_frozen_weights_is_written_back() -> None:
    plan = lora_plan(resident_params=4, levels="F" * 32, inp_slots=34, kv_slots=32, attn_slots=32, rest_slots=32)
    simulation = simulate(LLAMA_8B, plan, H200)
    assert simulation.inbound_bytes > 0 == simulation.outbound_bytes
    assert set(host_bytes(LLAMA_8B, plan, simulation.host_slots)) == {"param"}
    assert {task.kind for task in step_tasks(LLAMA_8B, plan, step_start(plan, 1))} == {
        "embedding", "forward", "head", "backward", "update",
    }  # fmt: skip


def h200_plan(recipes: Any, size: str, **settings: Any) -> Any:
    listed = tuple(Setting(field=name, value=str(value), source="--set") for name, value in settings.items())
    request = RunRequest(size=size, dtype="bf16", gpus=1, gpu="h200", settings=listed)
    return resolve(recipes["outofcore_llama3"], request).workload


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device_gib", "tokens_per_s"), [(125, 1800), pytest.param(24, 1500, marks=pytest.mark.nightly)]
)
def test_70b_is_planned_on_one_gpu_and_a_host_of_125_gib(recipes: Any, device_gib: int, tokens_per_s: float) -> None:
    work = h200_plan(
        recipes, "70b", host_gib=110, device_gib=device_gib, lora_rank=16, frozen_weights="fp8", seqlen=8192
    )
    prediction = work.prediction
    assert sum(prediction.device_bytes.values()) <= device_gib * GIB
    assert sum(prediction.host_bytes.values()) <= 110 * GIB
    assert work.plan.step_tokens / prediction.step_s > tokens_per_s


def dry_run(model: Any, rank: int) -> tuple[int, int, float]:
    """Return the peaks in bytes of a layer forward and in recomputation with backward, and its FLOPs."""
    lora, bf16 = replace(LORA, rank=rank), torch.bfloat16
    watch = DispatchWatch(MemoryTracker())
    with watch, torch.device("meta"), fused_shapes("causal", watch.add_flops):
        single = replace(model, layers=1)
        adapters = LoraAdapters(single, lora, *(torch.empty(adapter_numel(single, lora), dtype=bf16) for _ in range(2)))
        weights = LayerWeights(**{k: torch.empty(v, dtype=bf16) for k, v in layer_weight_shapes(model).items()})
        input_NC, out_NC, d_residual_NC = (torch.empty(ROWS, model.hidden, dtype=bf16) for _ in range(3))
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        kv, dkv = (KeyValues(*(torch.empty(ROWS, kv_width, dtype=t) for _ in "kv")) for t in (bf16, torch.float32))
        attn = AttentionOutput(torch.empty(ROWS, width, dtype=bf16), torch.empty(model.heads, ROWS))
        common: tuple[Any, ...] = (
            chunk_segments([0], 0, ROWS), *(torch.empty(ROWS, model.head_dim // 2) for _ in range(2)),
        )  # fmt: skip
        layer, memory = LlamaLayer(single, LoraLinears), watch.memory
        adapted, before = adapters.weights(0, weights), memory.live
        memory.reset_peak()
        layer.forward(adapted, input_NC, kv, *common, out_NC)
        forward = memory.peak - before
        memory.reset_peak()
        saved_bytes = buffer_bytes(model, lora_plan(lora, chunk_tokens=ROWS, seqs_per_group=1))["rest"]
        saved = saved_activations_view(torch.empty(saved_bytes, dtype=torch.uint8), model, ROWS, bf16)
        layer.recompute(adapted, input_NC, kv, *common, attn, saved, attn_saved=True)
        layer.backward(adapted, adapters.grads(0), True, input_NC, kv, attn, saved, dkv, False, *common, d_residual_NC)
        return forward, memory.peak - before, watch.flops


def _ignore_launch(*_arguments: Any) -> None:
    pass


@pytest.mark.nightly
@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B], ids=lambda model: model.name)
def test_a_dry_run_stays_within_what_is_counted(model: Any) -> None:
    """In a process of its own: a dry run replaces all kernels of its process."""
    start = {"initializer": dispatch.begin_dry_run, "initargs": (_ignore_launch,)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **start) as pool:
        forward, backward, flops = pool.submit(dry_run, model, 16).result()
    plan = lora_plan(chunk_tokens=ROWS, seqlen=ROWS, seqs_per_group=1, loss_tokens=64, levels="A" * model.layers)
    assert forward <= workspace_bytes(model, plan)
    assert backward <= workspace_bytes(model, plan)
    work, attention = layer_work(model, plan), 4.0 * ROWS * (ROWS / 2) * model.heads * model.head_dim
    macs = work.gemm_macs + work.recompute_macs + work.backward_macs
    assert flops == pytest.approx(2.0 * ROWS * macs + 3 * attention, rel=1e-6)
    usage = device_bytes(model, plan, "h200")
    assert usage["adapters"] == 8 * adapter_numel(model, LORA)
