"""Skinny GEMM: norm, GEMM, gate and addition in one kernel."""

import pytest
import torch
from seeded_tensors import randn

from llmb.ops.gemm import skinny_gemm_triton
from llmb.ops.gemm.skinny_gemm import InputNorm, SkinnyGemmWeight, skinny_gemm
from llmb.ops.gemm.skinny_gemm_triton import step_of, tile_of


@pytest.mark.slow
def test_programs_take_several_groups_and_long_rows_in_chunks(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(skinny_gemm_triton, "TUNED_SMS", 1)
    monkeypatch.setattr(skinny_gemm_triton, "scaled_to_sms", lambda programs, _device: programs)
    monkeypatch.setattr(skinny_gemm_triton, "MAX_INPUTS", 2)
    for inputs, activation in ((256, None), (256, "silu"), (1300, None), (1300, "gelu")):
        x, weight, norm = (randn(*shape, inputs, device=device) for shape in ((2,), (60,), ()))
        weight, norm = SkinnyGemmWeight(weight * inputs**-0.5), InputNorm(norm, 1e-5)
        expected = skinny_gemm.reference(x, weight, torch.float32, norm, activation)
        actual = skinny_gemm.triton(x, weight, torch.float32, norm, activation)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_step_is_as_long_as_registers_allow() -> None:
    down = tile_of(torch.empty(4096, 14336, dtype=torch.bfloat16, device="meta"), tokens=2)
    assert [step_of(down, tokens, 14336, packed=False) for tokens in (1, 2, 4)] == [16384, 8192, 4096]
    assert step_of(down, 2, 14336, packed=True) == 16384
    assert step_of(down, 1, 100, packed=False) == 256
