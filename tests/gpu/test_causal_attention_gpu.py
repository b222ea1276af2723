"""Causal attention of the last queries only, as context parallelism needs it, on a GPU."""

from typing import Any

import pytest
import torch

from llmb.models.blocks import causal_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)
QUERIES, KEYS, HEADS = 1024, 8192, 8


def queries_keys_values(kv_heads: int, widths: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator(GPU).manual_seed(3)
    shapes = [(HEADS, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1])]
    return [
        torch.randn(1, heads, KEYS, width, device=GPU, generator=generator).bfloat16().requires_grad_()
        for heads, width in shapes
    ]


@pytest.mark.parametrize(
    ("kv_heads", "widths", "options"),
    [(2, (128, 128), {}), (8, (192, 128), {"scale": 0.1}), (2, (128, 128), {"softcap": 30.0})],
    ids=["gqa", "mla", "softcap"],
)
def test_last_queries_attend_as_among_all_without_logits_in_memory(
    kv_heads: int, widths: tuple[int, int], options: dict[str, Any]
) -> None:
    qkv = queries_keys_values(kv_heads, widths)
    dy = torch.randn(1, HEADS, QUERIES, widths[1], device=GPU).bfloat16()

    def attend_last() -> list[torch.Tensor]:
        out = causal_attention(qkv[0][:, :, -QUERIES:], *qkv[1:], **options)
        return [out, *torch.autograd.grad(out, qkv, dy)]

    attend_last()  # a kernel may have to be compiled
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    actual = attend_last()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    input_bytes = sum(x.numel() * x.element_size() for x in qkv)
    assert peak_bytes < 6 * input_bytes + HEADS * QUERIES * KEYS, (
        f"{peak_bytes / 2**20:.0f} MiB"
    )  # logits would take twice that in bf16

    out = causal_attention(*qkv, **options)[:, :, -QUERIES:]
    for name, a, b in zip("yqkv", actual, [out, *torch.autograd.grad(out, qkv, dy)], strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        assert error < 0.01, f"{name}: {error:.4f}"
