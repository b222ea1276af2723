"""The table of GPUs."""

from pathlib import Path

import pytest

from llmb.config.spec import Machine
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import (
    GPUS,
    gpu,
    gpu_key,
    identify_gpu,
    is_listed,
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
        ("a100", 312, None, None),
        ("cpu", None, None, None),
    ],
)
def test_published_peaks(key: str, bf16: int | None, fp8: int | None, nvfp4: int | None) -> None:
    peaks = [peak_flops(key, dtype) for dtype in ("bf16", "fp8", "nvfp4")]
    assert peaks == [peak and peak * 1e12 for peak in (bf16, fp8, nvfp4)]


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
            assert row.fabric
            assert row.peak_flops["bf16"]
            assert identify_gpu(row.title) == key
        by_width = [row.peak_flops[d] for d in ("fp32", "bf16", "fp8", "nvfp4") if d in row.peak_flops]
        assert by_width == sorted(by_width)


NAMES = [  # as torch.cuda.get_device_name() and nvidia-smi print them, with the MiB of nvidia-smi
    ("NVIDIA GB300", 284208, "gb300"),
    ("NVIDIA GB200", 189471, "gb200"),
    ("NVIDIA B300 SXM6 AC", 275040, "b300"),
    ("NVIDIA B200", 183359, "b200"),
    ("NVIDIA H200", 143771, "h200"),
    ("NVIDIA GH200 480GB", 97871, "gh200"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
    ("NVIDIA H100 NVL", 95830, "h100-nvl"),
    ("NVIDIA H20", 97871, "h20"),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100"),
    ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
    ("NVIDIA A100 80GB PCIe", 81920, "a100-pcie"),
    ("NVIDIA A100-PCIE-40GB", 40960, "a100-pcie-40gb"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000-server"),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA A10G", 23028, "a10g"),
    ("AMD Instinct MI300X", 196592, "mi300x"),
]


@pytest.mark.parametrize(("name", "mib", "key"), NAMES)
def test_identify_gpu_by_device_name(name: str, mib: int, key: str) -> None:
    assert identify_gpu(name) == identify_gpu(name, mib << 20) == gpu_key(name, mib << 20) == key
    assert identify_gpu(name.lower().replace(" ", "_").replace("-", "_")) == key  # as Slurm's AutoDetect writes it


def test_every_row_is_identified_by_a_real_name() -> None:
    assert {key for _, _, key in NAMES} | {"cpu"} == set(GPUS)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100 SXM5 64GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA H20-3e",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA A10",
        "NVIDIA L40",
        "GRID A100-40C",
        "",
    ],
)
def test_variants_with_other_figures_are_not_identified(name: str) -> None:
    assert identify_gpu(name) is None
    assert not is_listed(gpu_key(name))


def test_memory_decides_between_rows_of_one_name_and_refuses_another_memory() -> None:
    assert [identify_gpu("NVIDIA A100", gib << 30) for gib in (40, 80, 60)] == ["a100-40gb", "a100", None]
    assert gpu_key("NVIDIA H20", 141e9) == "h20-141gb"  # not the row of 96 GB under the same name
    assert gpu_key("NVIDIA H20") == "h20"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA GeForce RTX 4080", "rtx-4080"),
        ("NVIDIA L40", "l40"),
        ("Tesla T4", "tesla-t4"),
        ("NVIDIA A100-SXM-64GB", "a100-sxm-64gb"),
        ("A/B (C)", "ab-c"),
        ("", "gpu"),
    ],
)
def test_unlisted_gpu_is_named_after_its_device(name: str, key: str) -> None:
    assert gpu_key(name) == key
    assert (gpu(key).peak_flops, gpu(key).memory_bytes, peak_flops(key, "bf16")) == ({}, None, None)


def test_memory_of_an_unlisted_gpu_is_what_the_driver_reports() -> None:
    assert memory_bytes(Machine(gpu="rtx-4080", gpus=1, gpus_per_node=8, gpu_memory_bytes=24 << 30)) == 24 << 30
    for unknown in ("rtx-4080", "cpu"):
        assert memory_bytes(Machine(gpu=unknown, gpus=1, gpus_per_node=8)) is None
    assert memory_bytes(Machine(gpu="h100", gpus=1, gpus_per_node=8)) == 79.1 * 2**30


def test_gpu_type_of_a_user_is_listed_or_marked_as_unlisted() -> None:
    assert [parse_gpu_type(text, ("l40",)) for text in ("H100", " gb200", "L40", "unlisted:MI325X")] == [
        "h100", "gb200", "l40", "mi325x"
    ]  # fmt: skip
    for text, example in (("mi325x", "unlisted:mi325x"), ("h220", "unlisted:h220"), ("a/b", "unlisted:NAME")):
        with pytest.raises(ConfigError) as caught:
            parse_gpu_type(text)
        assert str(caught.value).startswith(f"unknown GPU type '{text}'; choices are: gb300, gb200, b300")
        assert str(caught.value).endswith(f"name a GPU that is not among them as {example}")


def test_article_of_a_gpu_is_the_spoken_one() -> None:
    spoken = [with_article(gpu) for gpu in ("h100", "b200", "gb200", "a100", "l40s", "rtx-4090", "mi300x", "cpu")]
    assert spoken == ["an h100", "a b200", "a gb200", "an a100", "an l40s", "an rtx-4090", "an mi300x", "a cpu"]


def test_documented_table_has_every_row() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text().splitlines()
    documented = {line.split("`")[1]: line for line in lines if line.startswith("| `") and line.count("|") == 10}
    assert documented.keys() == GPUS.keys() - {"cpu"}
    for key, line in documented.items():
        assert f"| {GPUS[key].peak_flops['bf16'] / 1e12:,.0f} /" in line
