"""The table of GPUs."""

import pytest

from llmb.config.spec import Machine
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import (
    GPUS,
    gpu,
    gpu_key,
    identify_gpu,
    memory_bytes,
    parse_gpu_type,
    peak_flops,
    with_article,
)


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
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("nvidia_h100_80gb_hbm3", "h100"),  # as Slurm's AutoDetect names it
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 SXM5 64GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 5090", None),
        ("GRID A100-40C", None),
        ("", None),
    ],
)
def test_identify_gpu_by_device_name(name: str, key: str | None) -> None:
    assert identify_gpu(name) == key


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("A/B (C)", "ab-c"),
        ("", "gpu"),
    ],
)
def test_unlisted_gpu_is_named_after_its_device(name: str, key: str) -> None:
    assert gpu_key(name) == key
    assert key in GPUS or (gpu(key).peak_flops, gpu(key).memory_bytes, peak_flops(key, "bf16")) == ({}, None, None)


def test_memory_of_an_unlisted_gpu_is_what_the_driver_reports() -> None:
    assert memory_bytes(Machine(gpu="rtx-4090", gpus=1, gpus_per_node=8, gpu_memory_bytes=24 << 30)) == 24 << 30
    assert memory_bytes(Machine(gpu="rtx-4090", gpus=1, gpus_per_node=8)) is None
    assert memory_bytes(Machine(gpu="h100", gpus=1, gpus_per_node=8)) == 79.1 * 2**30


def test_gpu_type_of_a_user_is_listed_or_marked_as_unlisted() -> None:
    assert [parse_gpu_type(text, ("l40s",)) for text in ("H100", " gb200", "L40S", "unlisted:MI300X")] == [
        "h100", "gb200", "l40s", "mi300x"
    ]  # fmt: skip
    for text, example in (("mi300x", "unlisted:mi300x"), ("h220", "unlisted:h220"), ("a/b", "unlisted:NAME")):
        with pytest.raises(ConfigError) as caught:
            parse_gpu_type(text)
        assert str(caught.value).startswith(f"unknown GPU type '{text}'; choices are: gb300, gb200, b300")
        assert str(caught.value).endswith(f"name a GPU that is not among them as {example}")


def test_article_of_a_gpu_is_the_spoken_one() -> None:
    spoken = [with_article(gpu) for gpu in ("h100", "b200", "gb200", "a100", "l40s", "rtx-4090", "mi300x", "cpu")]
    assert spoken == ["an h100", "a b200", "a gb200", "an a100", "an l40s", "an rtx-4090", "an mi300x", "a cpu"]
