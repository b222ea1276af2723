"""The table of GPUs."""

import pytest

from llmb.errors import UnknownName
from llmb.perfmodel.hardware import GPUS, gpu, identify_gpu, peak_flops


@pytest.mark.parametrize(
    ("key", "bf16", "fp8", "nvfp4"),
    [
        ("gb300", 2450, 4900, 14700),
        ("gb200", 2450, 4900, 9800),
        ("b300", 2250, 4500, 13500),
        ("b200", 2250, 4500, 9000),
        ("h100", 989, 1979, None),
    ],
)
def test_published_peaks(key: str, bf16: int, fp8: int, nvfp4: int | None) -> None:
    peaks = [peak_flops(key, dtype) for dtype in ("bf16", "fp8", "nvfp4")]
    assert peaks == [bf16 * 1e12, fp8 * 1e12, nvfp4 and nvfp4 * 1e12]


def test_unpublished_figures_are_none() -> None:
    assert peak_flops("cpu", "bf16") is None
    assert peak_flops("a100", "fp8") is None
    assert gpu("cpu").memory_bytes is None


def test_rows_are_complete() -> None:
    for key, row in GPUS.items():
        assert row.key == key
        assert row.source
        assert row.gpus_per_node >= 1
        if key != "cpu":
            assert row.memory_bytes
            assert row.memory_bandwidth
            assert row.link_bandwidth
            assert row.host_bandwidth
            assert identify_gpu(row.title) == key
        by_width = [row.peak_flops[d] for d in ("fp32", "bf16", "fp8", "nvfp4") if d in row.peak_flops]
        assert by_width == sorted(by_width)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 5090", None),
        ("", None),
    ],
)
def test_identify_gpu_by_device_name(name: str, key: str | None) -> None:
    assert identify_gpu(name) == key


def test_unknown_type_lists_the_valid_ones() -> None:
    with pytest.raises(UnknownName, match=r"did you mean h200\?.*h100"):
        gpu("h220")
