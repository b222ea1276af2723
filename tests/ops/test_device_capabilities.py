"""Capabilities of GPUs: which implementation is selected on each generation, and with each fallback forced."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from llmb.errors import ConfigError, UnknownName
from llmb.models import blocks
from llmb.ops import dependent_launch, device_capabilities, dispatch
from llmb.ops.attention import segment_attention
from llmb.ops.attention.attention_block import CUDNN, FLASH, PLAIN, AttentionBlock
from llmb.ops.attention.flash_attention_4 import FLASH4, MIN_TOKENS, takes_softcap_backward
from llmb.ops.attention.segment_attention import Segment
from llmb.ops.device_capabilities import (
    FEATURES,
    DeviceCapabilities,
    capabilities,
    check_dtypes,
    check_fp8_attention,
    fallback_lines,
    forced_fallbacks,
    parse_forced,
    scaled_to_sms,
)
from llmb.ops.gemm import block_scaled_gemm

GPU = torch.device("cuda", 0)
RTX_3090 = SimpleNamespace(major=8, minor=6, multi_processor_count=82, shared_memory_per_block_optin=101376)
L40S = SimpleNamespace(major=8, minor=9, multi_processor_count=142, shared_memory_per_block_optin=101376)
A100 = SimpleNamespace(major=8, minor=0, multi_processor_count=108, shared_memory_per_block_optin=166912)
H200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)
B200 = SimpleNamespace(major=10, minor=0, multi_processor_count=148, shared_memory_per_block_optin=232448)
T4 = SimpleNamespace(major=7, minor=5, multi_processor_count=40, shared_memory_per_block_optin=65536)


PACKAGES = ("flash-attn-4", "nvidia-cudnn-frontend")
WITH_PACKAGE = {"flash_attention_4", "cudnn_fp8_attention"}


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that makes this process see a GPU with these properties, and force fallbacks."""

    def install(properties: SimpleNamespace, forced: str = "", packages: tuple[str, ...] = PACKAGES) -> None:
        monkeypatch.setattr(device_capabilities, "optional_packages", lambda: frozenset(packages))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setenv(device_capabilities.FORCE, forced)
        clear()

    yield install
    monkeypatch.undo()
    clear()


def clear() -> None:
    caches = (capabilities, forced_fallbacks, scaled_to_sms, blocks.attention_backends, dependent_launch._has_pdl)
    for function in caches:
        function.cache_clear()


def missing() -> set[str]:
    return {name for name in FEATURES if not capabilities(GPU).has(name)}


def test_each_generation_has_its_features(on_gpu):
    expected = {
        "T4": (T4, set(FEATURES)),
        "A100": (
            A100,
            {"cudnn_attention", *WITH_PACKAGE, "pdl", "fp8_gemm", "fp8_grouped_gemm", "fp8_block_gemm"},
        ),
        "RTX 3090": (
            RTX_3090,
            {"cudnn_attention", *WITH_PACKAGE, "pdl", "fp8_gemm", "fp8_grouped_gemm", "fp8_block_gemm"},
        ),
        "L40S": (L40S, {"cudnn_attention", *WITH_PACKAGE, "pdl", "fp8_grouped_gemm", "fp8_block_gemm"}),
        "H200": (H200, set()),
        "B200": (B200, {*WITH_PACKAGE, "fp8_grouped_gemm", "fp8_block_gemm"}),
    }
    for name, (properties, absent) in expected.items():
        on_gpu(properties)
        assert missing() == absent, name
        assert capabilities(GPU).sms == properties.multi_processor_count


def test_block_scales_need_a_recent_cublas():
    hopper = DeviceCapabilities(compute=(9, 0), cuda=(12, 8))
    assert not hopper.has("fp8_block_gemm")


@pytest.mark.parametrize("name", FEATURES)
def test_each_fallback_can_be_forced_alone(on_gpu, name):
    on_gpu(H200, name)
    assert missing() == {name}
    (line,) = fallback_lines(GPU, FEATURES)
    assert line == f"no {FEATURES[name].title} (LLMB_FORCE_FALLBACK): {FEATURES[name].instead}"


def test_lines_name_the_compute_capability_and_what_runs_instead(on_gpu):
    on_gpu(RTX_3090)
    assert fallback_lines(GPU, ("triton", "cudnn_attention", "pdl")) == (
        "no fast cuDNN attention (compute capability 8.6): FlashAttention-2",
        "no programmatic dependent launch (compute capability 8.6): small kernels start one after the other",
    )
    assert fallback_lines(torch.device("cpu"), FEATURES) == ()


def test_a_package_that_is_not_installed_is_named(on_gpu):
    on_gpu(H200, packages=())
    assert missing() == WITH_PACKAGE
    assert fallback_lines(GPU, FEATURES) == (
        "no FlashAttention 4 (flash-attn-4 is not installed): cuDNN attention",
        "no fp8 attention of cuDNN (nvidia-cudnn-frontend is not installed): prefill attention in bf16",
    )
    on_gpu(L40S, packages=())
    assert "no FlashAttention 4 (compute capability 8.9): cuDNN attention" in fallback_lines(GPU, FEATURES)


def test_optional_packages_are_those_that_are_installed(monkeypatch):
    device_capabilities.optional_packages.cache_clear()
    installed = {"flash-attn-4": "4.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(device_capabilities, "version", version)
    assert device_capabilities.optional_packages() == {"flash-attn-4"}
    device_capabilities.optional_packages.cache_clear()


def test_forced_names_are_checked():
    assert parse_forced("pdl, triton") == {"pdl", "triton"}
    assert parse_forced("all") == set(FEATURES)
    assert parse_forced("") == frozenset()
    with pytest.raises(UnknownName, match=r"LLMB_FORCE_FALLBACK 'pld' \(did you mean pdl\?\)"):
        parse_forced("pld")


def test_attention_takes_the_next_best_kernel(on_gpu):
    class CudaTensor:
        is_cuda, dtype, device, shape = True, torch.bfloat16, GPU, (1, 1, 128)

    def kernel() -> object:
        return segment_attention.kernel_for(CudaTensor(), [Segment(0, 8192, 0, 0)])

    for properties, forced, expected, first in (
        (H200, "", FLASH4, SDPBackend.CUDNN_ATTENTION),
        (H200, "flash_attention_4", CUDNN, SDPBackend.CUDNN_ATTENTION),
        (H200, "flash_attention_4,cudnn_attention", FLASH, SDPBackend.FLASH_ATTENTION),
        (H200, "flash_attention_4,cudnn_attention,flash_attention", PLAIN, SDPBackend.EFFICIENT_ATTENTION),
        (A100, "", FLASH, SDPBackend.FLASH_ATTENTION),
        (T4, "", PLAIN, SDPBackend.FLASH_ATTENTION),  # torch itself skips what the device lacks
    ):
        on_gpu(properties, forced)
        assert kernel() is expected
        assert blocks.attention_backends(GPU)[0] is first


def test_flash_attention_4_takes_sequences_long_enough_to_compile_for(on_gpu):
    class CudaTensor:
        is_cuda, dtype, device, shape = True, torch.bfloat16, GPU, (1, 1, 128)

    on_gpu(H200)
    packed = [Segment(0, 300, 0, 0), Segment(300, 300 + MIN_TOKENS, 300, 300)]
    assert segment_attention.kernel_for(CudaTensor(), packed) is FLASH4
    assert segment_attention.kernel_for(CudaTensor(), packed, 512) is FLASH4
    assert segment_attention.kernel_for(CudaTensor(), [Segment(0, 512, 0, MIN_TOKENS - 512)]) is FLASH4
    assert segment_attention.kernel_for(CudaTensor(), [Segment(0, MIN_TOKENS - 1, 0, 0)]) is CUDNN
    assert segment_attention.kernel_for(CudaTensor(), packed[:1]) is CUDNN


@pytest.mark.parametrize(
    ("width", "lengths", "packages", "expected"),
    [
        (256, (MIN_TOKENS, MIN_TOKENS), ("flash-attn-4",), True),
        (256, (MIN_TOKENS, MIN_TOKENS), (), False),
        (256, (MIN_TOKENS, MIN_TOKENS + 1), ("flash-attn-4",), False),
        (256, (MIN_TOKENS - 1,), ("flash-attn-4",), False),
        (128, (MIN_TOKENS,), ("flash-attn-4",), False),
    ],
)
def test_backward_of_wide_heads_with_a_softcap_takes_flash_attention_4(monkeypatch, width, lengths, packages, expected):
    hopper = DeviceCapabilities(compute=(9, 0), packages=frozenset(packages))
    monkeypatch.setattr("llmb.ops.attention.flash_attention_4.capabilities", lambda _device: hopper)
    q, k = (torch.empty(sum(lengths), heads, width, device="meta") for heads in (2, 1))
    assert takes_softcap_backward(AttentionBlock(q, k, k, lengths, True, 1.0, None, 50.0)) is expected


def test_small_kernels_use_dependent_launch_where_there_is_one(on_gpu, monkeypatch):
    monkeypatch.setattr(dependent_launch, "INTERPRETED", False)
    for properties, forced, expected in ((H200, "", True), (H200, "pdl", False), (L40S, "", False)):
        on_gpu(properties, forced)
        assert dependent_launch.pdl_options(1)["USE_PDL"] is expected


def test_kernels_are_replaced_by_plain_torch(on_gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    tensor = SimpleNamespace(is_cuda=True, device=GPU)
    for properties, forced, expected in ((A100, "", True), (A100, "triton", False), (T4, "", False)):
        on_gpu(properties, forced)
        assert dispatch.takes_triton(tensor) is expected


def test_block_scaled_gemm_takes_cublas_only_where_it_supports_the_scales(on_gpu, monkeypatch):
    monkeypatch.setattr(block_scaled_gemm, "takes_triton", lambda _tensor: True)
    for name in ("cublas_block_scaled_gemm", "block_scaled_mm"):
        monkeypatch.setattr(block_scaled_gemm, name, lambda *_arguments, name=name: name)

    class Values:
        device = GPU

        def __len__(self) -> int:
            return 65

    x = SimpleNamespace(values=Values())
    for properties, forced, expected in (
        (H200, "", "cublas_block_scaled_gemm"),
        (H200, "fp8_block_gemm", "block_scaled_mm"),
        (B200, "", "block_scaled_mm"),
    ):
        on_gpu(properties, forced)
        assert block_scaled_gemm.block_scaled_gemm(x, None, 8, torch.bfloat16) == expected


def test_programs_follow_the_multiprocessors(on_gpu):
    assert scaled_to_sms(1056, torch.device("cpu")) == 1056
    for properties, programs in ((H200, 1056), (RTX_3090, 656), (B200, 1184)):
        on_gpu(properties)
        assert scaled_to_sms(1056, GPU) == programs


def test_dtype_that_a_gpu_cannot_compute_in_is_refused_with_one_that_it_can(on_gpu):
    on_gpu(RTX_3090)
    check_dtypes(GPU, dtype="bf16", kv_dtype=None)
    with pytest.raises(ConfigError, match=r"^kv_dtype=fp8 needs .* 8\.9 or more, this one has 8\.6; choose bf16$"):
        check_dtypes(GPU, dtype="bf16", kv_dtype="fp8")
    on_gpu(T4)
    check_dtypes(GPU, dtype="fp32")
    with pytest.raises(ConfigError, match=r"^dtype=bf16 needs .* 8\.0 or more, this one has 7\.5; choose fp32$"):
        check_dtypes(GPU, dtype="bf16")
    on_gpu(H200, "fp8_gemm")
    with pytest.raises(ConfigError, match=r"this one has 9\.0, and LLMB_FORCE_FALLBACK names fp8_gemm; choose bf16"):
        check_dtypes(GPU, dtype="fp8")
    check_dtypes(torch.device("cpu"), dtype="fp8")


def test_fp8_attention_that_a_gpu_has_not_is_refused(on_gpu):
    on_gpu(H200)
    check_fp8_attention(GPU)
    check_fp8_attention(torch.device("cpu"))
    for properties, packages, cause in (
        (H200, (), "nvidia-cudnn-frontend is not installed"),
        (L40S, PACKAGES, "compute capability 8.9"),
    ):
        on_gpu(properties, packages=packages)
        with pytest.raises(ConfigError, match=rf"^attention_dtype=fp8: .*, {cause}; leave it out, or use a Hopper GPU"):
            check_fp8_attention(GPU)


def test_kernel_that_does_not_fit_is_replaced_once_and_for_all(monkeypatch, capsys):
    class OutOfResources(Exception):
        """As triton.runtime.errors.OutOfResources, which not every machine has."""

    launches = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        launches.append(x)
        raise OutOfResources("shared memory, Required: 200000, Hardware limit: 101376")

    double = dispatch.Op(lambda x: 2 * x, "a.b:c", None)
    double.name = "a.double"
    double.__dict__["triton"] = kernel
    monkeypatch.setattr(dispatch, "takes_triton", lambda _tensor: True)
    assert [double(torch.ones(1)).item() for _ in range(2)] == [2.0, 2.0]
    assert len(launches) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("fallback: a.double runs in plain torch, its kernel does not fit this GPU: shared memory")
    assert printed.count("\n") == 1
