"""fp8 prefill attention by cuDNN: padded lengths, and its output against attention in fp32."""

import pytest
import torch

from llmb.ops.attention.fp8_prefill import fp8_prefill, padded_tokens
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.device_capabilities import capabilities

GPU = torch.device("cuda", 0)


def test_an_octave_has_eight_lengths():
    assert [padded_tokens(n) for n in (1, 15, 2048, 2049, 4096, 20000)] == [1, 15, 2048, 2304, 4096, 20480]
    assert len({padded_tokens(n) for n in range(4096, 8192)}) == 9  # 8,192 among them
    assert all(n <= padded_tokens(n) <= n * 9 / 8 for n in range(1, 5000))


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and capabilities(GPU).supports("cudnn_fp8_attention")),
    reason="nvidia-cudnn-frontend is not installed, or no Hopper GPU",
)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "head_dim", "scales"),
    [(2, 2048, 8, 2, 128, (1.0, 1.0)), (1, 2500, 8, 8, 64, (0.5, 0.25)), (3, 2049, 32, 4, 128, (1.0, 1.0))],
)
def test_outputs_are_those_of_the_rounded_inputs(batch, tokens, heads, kv_heads, head_dim, scales):
    cache = KvCache(torch.empty(1, kv_heads, 64, head_dim), torch.empty(1, kv_heads, head_dim, 64), *scales)
    generator = torch.Generator(GPU).manual_seed(0)
    width = (heads + 2 * kv_heads) * head_dim
    rows = torch.randn(batch * tokens, width + 32, device=GPU, generator=generator).bfloat16()
    rows[1, -32 - kv_heads * head_dim :] = 12.0  # the largest value decides the scale of the output
    qkv = rows[:, :width]
    out = torch.empty(batch * tokens, heads, head_dim, device=GPU, dtype=torch.bfloat16)
    fp8_prefill(qkv, batch, cache, head_dim**-0.5, out)
    q, k, v = qkv.unflatten(0, (batch, tokens)).unflatten(2, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
    e4m3 = torch.float8_e4m3fn
    q = q.to(e4m3).float()
    k, v = ((x.float() / scale).to(e4m3).float() * scale for x, scale in zip((k, v), scales, strict=True))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=head_dim**-0.5, enable_gqa=True
    ).transpose(1, 2)
    error = (out.float().view_as(expected) - expected).flatten(2).norm(dim=2) / expected.flatten(2).norm(dim=2)
    # Probabilities and output have 3 bits of mantissa: 2 to 3 % each, in the mean over a token's outputs.
    assert error.max() < 0.06
    assert error.mean() < 0.045
