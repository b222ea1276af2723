"""Kernels that bound serving, compiled for a GPU that is not here: registers, shared memory, loads under way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from llmb.ops.moe.fused_moe_fp8_triton import CONFIGS

COMPILE = Path(__file__).with_name("compile_serving.py")
SM_SHARED, RESERVED = 228 << 10, 1 << 10  # bytes of a Hopper multiprocessor, and of these for each program


@pytest.mark.nightly
def test_kernels_fit_hopper_and_load_ahead() -> None:
    """In a process of its own: this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILE), "90"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr
    figures: dict[str, list[list[int]]] = {}
    for line in result.stdout.splitlines():
        kernel, *numbers = line.split()
        figures.setdefault(kernel, []).append([int(number) for number in numbers])
    attention, experts = figures["_paged_decode"], figures["experts"]
    assert [under_way for *_, under_way in attention] == [2, 2], "keys and values of the next tile"
    assert all(5 * (shared + RESERVED) <= SM_SHARED and not spilled for shared, spilled, _ in attention)
    for (shared, spilled, under_way), (block_m, config) in zip(experts, CONFIGS.items(), strict=True):
        assert shared <= config.shared_bytes(block_m) + 256, "and some barriers"
        assert config.programs * (shared + RESERVED) <= SM_SHARED
        assert spilled <= 128
        assert under_way == config.num_stages - 2
