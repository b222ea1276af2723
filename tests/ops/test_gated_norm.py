"""Gated RMSNorm: the reference against its definition; its kernels: op_cases/norm.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.norm.gated_norm import gated_norm

pytest.importorskip("triton")


def inputs(batch: int, tokens: int, groups: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((batch, tokens, groups * width), (batch, tokens, groups, width), (groups * width,))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def test_reference_normalizes_each_group() -> None:
    y, gate, weight = inputs(2, 3, 3, 4)
    out = gated_norm(y, gate, weight, 1e-6)
    for group in range(3):
        channels = slice(4 * group, 4 * group + 4)
        gated = y[..., channels] * F.silu(gate[:, :, group])
        expected = gated / (gated.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight[channels]
        torch.testing.assert_close(out[..., channels], expected)
