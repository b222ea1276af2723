"""RoPE of MLA: against the interleaved RoPE of serving; kernels and gradients: op_cases/rope.py."""

import pytest
import torch
from torch import Tensor

from llmb.ops.rope.mla_rope import mla_rope_keys, mla_rope_queries
from llmb.ops.rope.rope import apply_rope_interleaved

pytest.importorskip("triton")

# B sequences, T tokens, H heads, nope channels, rope channels, value channels
SHAPES = [(2, 5, 3, 8, 4, 6), (1, 1, 1, 16, 2, 16), (1, 3, 40, 12, 10, 5), (2, 7, 16, 128, 64, 128)]


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Queries, keys beside values, the shared key (in wider rows), cosine, sine."""
    batch, tokens, heads, nope, rope, value = shape
    generator = torch.Generator().manual_seed(sum(shape))
    angle = torch.rand(tokens, rope // 2, generator=generator) * 100
    q, kv, key = (
        torch.randn(batch, tokens, *sizes, generator=generator)
        for sizes in ((heads, nope + rope), (heads, nope + value), (3 + rope,))
    )
    return q, kv, key[..., 3:], angle.cos(), angle.sin()


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_scores_match_interleaved_rope(shape: tuple[int, ...]) -> None:
    q, kv, key, cos, sin = inputs(shape)
    nope = shape[3]
    q_out, (k_out, v) = mla_rope_queries(q, cos, sin), mla_rope_keys(kv, key, cos, sin, nope)
    q_rope = apply_rope_interleaved(q[..., nope:], cos, sin)
    k_rope = apply_rope_interleaved(key[:, :, None], cos, sin).expand_as(q_rope)
    expected_q, expected_k = torch.cat((q[..., :nope], q_rope), -1), torch.cat((kv[..., :nope], k_rope), -1)
    actual, expected = (torch.einsum("bthd,bshd->bhts", *pair) for pair in ((q_out, k_out), (expected_q, expected_k)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(v, kv[..., nope:])


def test_values_are_a_view(device: torch.device) -> None:
    _, kv, key, cos, sin = (x.to(device) for x in inputs(SHAPES[0]))
    _, v = mla_rope_keys.triton(kv, key, cos, sin, 8)
    assert v.untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()
