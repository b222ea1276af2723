"""Causal conv1d: the reference against its definition; its kernels: op_cases/mamba.py."""

import pytest
import torch
import torch.nn.functional as F
from op_cases.mamba import conv_with_gradients

from llmb.ops.mamba.causal_conv1d import causal_conv1d

pytest.importorskip("triton")
CPU = torch.device("cpu")


def test_reference_matches_the_definition() -> None:
    (x, weight, bias, _), _ = conv_with_gradients(torch.Generator(), CPU, 2, 9, 1, (5,), 4)
    out = causal_conv1d(x, weight, bias, (5,))
    for t in range(9):
        window = range(max(0, t - 3), t + 1)
        acc = bias + sum(weight[:, 0, 3 - (t - u)] * x[:, u, 0] for u in window)
        torch.testing.assert_close(out[:, t], F.silu(acc))


def test_grouped_channels_become_sectioned() -> None:
    sections_of_group = ["value0", "value1", "b", "c"]
    (x, weight, bias, _), _ = conv_with_gradients(torch.Generator(), CPU, 1, 3, 2, (2, 1, 1), 2)
    out = causal_conv1d(x, weight, bias, (2, 1, 1))
    grouped = [(group, name) for group in range(2) for name in sections_of_group]
    sectioned = [(0, "value0"), (0, "value1"), (1, "value0"), (1, "value1"), (0, "b"), (1, "b"), (0, "c"), (1, "c")]
    for index, channel in enumerate(sectioned):
        channel_index = grouped.index(channel)
        alone = causal_conv1d(
            x.flatten(2)[..., None, channel_index, None], weight[channel_index, None], bias[channel_index, None], (1,)
        )
        torch.testing.assert_close(out[..., index], alone[..., 0])
