"""Kernels of real shapes, compiled for families of GPUs that are not here: they compile, fit and load ahead."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from kernel_matrix.gpu_families import FAMILIES

from llmb.ops.moe.fused_moe_fp8_triton import CONFIGS

PROGRAM = Path(__file__).with_name("compile_kernels.py")
GPUS = Path(__file__).parents[2] / "docs" / "gpus.md"
SM_SHARED, RESERVED = 228 << 10, 1 << 10  # bytes of a Hopper multiprocessor, and of these for each program
MAX_SPILLED = 128  # bytes of a thread, of kernels in whose loops it was measured to cost nothing
MAX_SPILLED_ON = {100: 512, 103: 512}  # of dk and dv with heads of 256, in tiles for Hopper: never run there
Figures = dict[str, Any]


def compiled(target: int, folder: Path, *arguments: str) -> list[Figures]:
    """Return the figures of each launch; in a process of its own, as this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    figures = folder / f"{target}.json"
    command = [sys.executable, str(PROGRAM), str(target), "--jobs", "2", "--json", str(figures), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=7200)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    return json.loads(figures.read_text())


def of_kernel(figures: list[Figures], kernel: str, **constants: object) -> list[Figures]:
    launches = [each for each in figures if each["kernel"].endswith(f".{kernel}")]
    expected = {name: str(value) for name, value in constants.items()}.items()
    return [each for each in launches if expected <= each["constants"].items()]


@pytest.mark.slow
@pytest.mark.parametrize("target", [89, 100, 120])
def test_large_tiles_fit_shared_memory(target: int, tmp_path: Path) -> None:
    """Attention with head_dim 128 and softcap, and MLA, which take the most shared memory on other GPUs."""
    pattern = "softcap_attention-grok_gemma_softcapped-2048-2048-48|deepseek_absorbed-one-128-bfloat16"
    figures = compiled(target, tmp_path, "--cases", pattern)
    assert of_kernel(figures, "_softcap_attention_backward_dq", D=128)
    assert of_kernel(figures, "_mla_attention", RANK=512)
    assert all(each["shared_bytes"] <= FAMILIES[target].shared_bytes for each in figures)


@pytest.mark.nightly
@pytest.mark.parametrize("target", FAMILIES)
def test_every_kernel_compiles_and_fits(target: int, tmp_path: Path) -> None:
    figures = compiled(target, tmp_path)
    assert len({each["kernel"] for each in figures}) >= 60
    whole_tiles = {"D": "256", "EVEN": "True"}.items()  # as in training; masked ones spill more
    softcap = [
        each for each in figures if "_softcap_attention_" in each["kernel"] and whole_tiles <= each["constants"].items()
    ]
    assert len(softcap) >= 9  # three kernels with three masks
    assert {each["constants"]["CAUSAL"] for each in softcap} == {"True", "False"}
    assert all(each["spilled_bytes"] <= MAX_SPILLED_ON.get(target, MAX_SPILLED) for each in softcap)
    if target == 90:
        check_serving_on_hopper(figures)


def check_serving_on_hopper(figures: list[Figures]) -> None:
    """Kernels that bound serving: programs of a multiprocessor, and loads under way while it computes."""
    attention = [
        each
        for group in (8, 4)  # query heads of a KV head
        for each in of_kernel(figures, "_paged_decode", GROUP=group, D=128, HAS_WINDOW=False)
        if each["types"]["keys_ptr"] == "*fp8e4nv"
    ]
    assert {each["constants"]["GROUP"] for each in attention} == {"4", "8"}
    for each in attention:
        assert each["copies_under_way"] == 2, "keys and values of the next tile"
        assert 5 * (each["shared_bytes"] + RESERVED) <= SM_SHARED
        assert not each["spilled_bytes"]
    for block_m, config in CONFIGS.items():
        experts = of_kernel(figures, "_moe_gemm_fp8_kernel", BLOCK_M=block_m)
        assert experts
        for each in experts:
            assert each["shared_bytes"] <= config.shared_bytes(block_m) + 256, "and some barriers"
            assert config.programs * (each["shared_bytes"] + RESERVED) <= SM_SHARED
            assert each["spilled_bytes"] <= MAX_SPILLED
            assert each["copies_under_way"] == config.num_stages - 2


def test_documentation_has_every_family() -> None:
    """A row of the table for each."""
    text = GPUS.read_text()
    for family in FAMILIES.values():
        assert f"| {family.name} | {family.gpus} | {family.shared_kib} |" in text
