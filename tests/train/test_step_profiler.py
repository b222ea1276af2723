"""Step profiler: kinds of kernels, attribution of overlaps, files and events of a profiled run."""

import gzip
import json

import pytest

from llmb.config.serialization import build, to_json
from llmb.config.spec import RunConfig
from llmb.events import TimeSpent
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.result import Result
from llmb.train.__main__ import main
from llmb.train.kernel_intervals import KernelInterval, clip, resolve_nesting, resolve_overlaps
from llmb.train.step_profiler import (
    ATTENTION,
    COMMUNICATION,
    IDLE,
    KINDS,
    MATMUL,
    MEMORY,
    OPTIMIZER,
    kernel_kind,
    summarize_trace,
)

KERNELS = {
    MATMUL: (
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "nvjet_qqtst_256x128_128x4_2x1_2cta_v_bz_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8>(T1::Params)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniv...",
        "ampere_sgemm_128x64_nn",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, ...",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false, ...",
        "triton_tem_fused_mm_3",
        "_grouped_matmul_kernel",
        "aten::mm",
        "aten::_scaled_mm",
    ),
    ATTENTION: (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, ...",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, ...",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, ...",
        "_attention_forward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "autograd::engine::evaluate_function: ScaledDotProductFlashAttentionForCpuBackward0",
    ),
    OPTIMIZER: (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, ...",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<float, (at::native::NormType)1, ...",
        "Optimizer.step#AdamW.step",
        "aten::_fused_adamw_",
        "_adam_update",
        "optimizer",
    ),
    COMMUNICATION: (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "c10d::allreduce_",
        "gloo:all_reduce",
    ),
    None: (
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, ...",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::Op...",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float, ...",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, ...",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "step 45",
        "forward",
        "backward",
        "micro-batch 1",
        "ProfilerStep#3",
        "aten::copy_",
        "_rms_norm_forward",
    ),
    MEMORY: (
        "triton_poi_fused_mul_silu_5",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
        "triton_poi_fused__scaled_dot_product_flash_attention_transpose_1",
    ),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kernel_kind(kind: str | None, name: str) -> None:
    assert kernel_kind(name) == kind


def kernel(name: str, start: float, end: float, stream: int = 7, cat: str = "kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": stream}


def annotation(name: str, start: float, end: float) -> dict:
    return kernel(name, start, end, stream=1, cat="user_annotation")


def microseconds(report: dict) -> dict[str, float]:
    return {row["kind"]: round(1e6 * row["seconds_per_step"], 6) for row in report["time_spent"]}


def test_overlapping_kernels_add_up_to_the_step() -> None:
    events = [
        annotation("step 1", 0, 100),
        annotation("step 2", 100, 200),
        kernel("nvjet_a", 0, 40),
        kernel("ncclDevKernel_AllReduce", 20, 60, stream=9),  # half of it overlaps the GEMM
        kernel("Memcpy HtoD", 50, 55, stream=11, cat="gpu_memcpy"),  # overlaps only communication
        kernel("flash_fwd", 60, 80),
        kernel("vectorized_elementwise_kernel", 110, 130),
        kernel("multi_tensor_apply_kernel", 130, 150),
        kernel("nvjet_before_the_window", -50, -10),
        kernel("zero_length", 70, 70),
        annotation("forward", 0, 40) | {"cat": "gpu_user_annotation"},
        {"ph": "M", "name": "process_name"},
    ]
    report = summarize_trace(events, "cuda")
    in_both = {MATMUL: 40, ATTENTION: 20, OPTIMIZER: 20, MEMORY: 25, COMMUNICATION: 15, IDLE: 80}
    assert microseconds(report) == {kind: time / 2 for kind, time in in_both.items()}
    assert sum(row["share"] for row in report["time_spent"]) == pytest.approx(1)
    assert report["step_s"] == pytest.approx(100e-6)
    longest = {"kind": MATMUL, "name": "nvjet_a", "seconds_per_step": pytest.approx(20e-6)}
    assert report["longest"][0] == longest


def test_nested_calls_count_self_time() -> None:
    def op(name: str, start: float, end: float, thread: int = 1) -> dict:
        return kernel(name, start, end, stream=thread, cat="cpu_op")

    events = [
        annotation("step 1", 0, 100),
        annotation("forward", 0, 50),
        op("_CastProduct", 10, 30),
        op("aten::copy_", 10, 15),
        op("aten::mm", 15, 28),
        op("aten::_scaled_dot_product_attention_math", 30, 50),
        op("aten::bmm", 32, 48),  # part of attention
        annotation("optimizer", 60, 90),
        op("aten::mul", 65, 70),
        op("aten::mm", 0, 100, thread=2),  # not the training thread
    ]
    expected = {MATMUL: 13, ATTENTION: 20, OPTIMIZER: 30, MEMORY: 7, COMMUNICATION: 0, IDLE: 30}
    assert microseconds(summarize_trace(events, "cpu")) == expected


def test_resolved_intervals_are_disjoint() -> None:
    kernels = [
        KernelInterval(*times, "n") for times in ((0, 9, "x"), (1, 3, "y"), (2, 7, "x"), (8, 12, "y"), (8, 12, "y"))
    ]
    intervals = [(p.start, p.end, p.kind) for p in resolve_overlaps(kernels, ("y", "x"))]
    assert intervals == [(0, 1, "x"), (1, 2, "y"), (2, 3, "y"), (3, 7, "x"), (7, 8, "x"), (8, 9, "y"), (9, 12, "y")]
    overlapping = [
        KernelInterval(0, 10, "x", "n", False),
        KernelInterval(2, 11, "y", "n"),
    ]  # rounded timestamps: the inner call ends later
    assert [(p.start, p.end, p.kind) for p in resolve_nesting(overlapping)] == [(0, 2, "x"), (2, 11, "y")]
    assert [(p.start, p.end) for p in clip([KernelInterval(0, 10, "x", "n")], [(1, 2), (9, 12)])] == [(1, 2), (9, 10)]


@pytest.mark.slow
def test_profiled_run_reports_time_spent(trained, capsys) -> None:
    plain = trained(steps=6)
    capsys.readouterr()
    done = trained(steps=6, profile=True, profile_start=3, profile_stop=5, mbs=2, ga=2, recompute_layers=1)
    assert done.ended().status == "ok"
    assert done.losses() == pytest.approx(plain.losses(), rel=1e-5)
    spent = [event for event in done.events() if isinstance(event, TimeSpent)]
    assert tuple(event.kind for event in spent) == KINDS
    assert sum(event.share for event in spent) == pytest.approx(1)
    shares = {event.kind: event.share for event in spent}
    assert all(shares[kind] > 0 for kind in KINDS if kind != COMMUNICATION)
    assert shares[COMMUNICATION] == 0

    out, err = capsys.readouterr()
    head = "where the time went    s per step  fraction  (own times of CPU operations; idle is Python between them)"
    assert out.splitlines()[4 * 3] == head  # after the three lines of step 4
    assert err == ""
    with gzip.open(done.folder / "profile" / "trace.rank0.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4"]
    for name, times in {"micro-batch 2": 2, "forward": 4, "backward": 4, "optimizer": 2}.items():
        assert names.count(name) == times
    written = json.loads((done.folder / "profile" / "time.json").read_text())
    assert written["steps"] == [3, 4]
    assert written["source"].startswith("own times of CPU operations")
    step_s = sum(s.seconds for s in done.steps()[2:4]) / 2
    assert written["step_s"] == pytest.approx(step_s, rel=0.2)

    config = build(RunConfig, json.loads((done.folder / "config.json").read_text()))
    result = derive(config, done.events())
    assert [(t.kind, t.seconds_per_step, t.share) for t in result.time_spent] == [
        (e.kind, e.seconds_per_step, e.share) for e in spent
    ]
    assert build(Result, json.loads(to_json(result))) == result
    assert "where the time went  s per step  fraction" in summary(result)
    assert "where the time went" not in summary(derive(config, plain.events()))


@pytest.mark.slow
def test_window_may_start_at_the_first_step(trained) -> None:
    done = trained(steps=2, profile=True, profile_start=0, profile_stop=3)
    assert json.loads((done.folder / "profile" / "time.json").read_text())["steps"] == [1, 2]


@pytest.mark.slow
def test_resumed_run_profiles_the_rest_of_the_window(trained) -> None:
    first = trained(steps=3, checkpoint_every=3)
    done = trained(steps=6, resume=str(first.folder), profile=True, profile_start=2, profile_stop=6)
    assert json.loads((done.folder / "profile" / "time.json").read_text())["steps"] == [4, 5]


@pytest.mark.parametrize(("start", "stop"), [(5, 50), (2, 2), (0, 1)])
def test_empty_window_is_refused(trained, start: int, stop: int) -> None:
    refusal = trained(steps=4, profile=True, profile_start=start, profile_stop=stop).refusal()
    assert f"profile_start={start}, profile_stop={stop}: none of the steps of this run, 1 to 4," in refusal


def test_unwritable_trace_is_reported(folder_of) -> None:
    folder = folder_of(profile=True, profile_start=1, profile_stop=2)
    (folder / "profile").write_text("in the way")
    assert main([str(folder / "config.json")]) == 2
    last = json.loads((folder / "events.rank0.jsonl").read_text().splitlines()[-1])
    assert last["status"] == "failed"
    assert last["reason"] == f"cannot write {folder / 'profile' / 'trace.rank0.json.gz'}: File exists"
