"""Tiles of attention with logit softcap at head_dim 256: compiled for GPUs that are not here, they fit each one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmb.ops.softcap.softcap_tiles import TILES, WIDE_TILES, tiles_for

COMPILE = Path(__file__).with_name("compile_softcap.py")


def test_tiles_by_head_dim() -> None:
    cpu = torch.device("cpu")
    assert [tiles_for(head_dim, cpu) for head_dim in (16, 128, 256)] == [TILES, TILES, WIDE_TILES]


@pytest.mark.nightly
@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (89, 99), (90, 227)])
def test_kernels_fit_shared_memory_and_registers(capability: int, shared_kib: int) -> None:
    """In a process of its own: this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILE), str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr
    kernels = [line.split() for line in result.stdout.splitlines()]
    assert len(kernels) == 9
    for name, shared_bytes, spilled_bytes in kernels:
        assert int(shared_bytes) <= shared_kib << 10, name
        assert int(spilled_bytes) <= 128, name
