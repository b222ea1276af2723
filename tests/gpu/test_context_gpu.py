"""Attention of the last tokens only, as context parallelism needs it, on a real GPU: right, and by a fused kernel."""

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
    ids=["grouped queries", "latent", "capped"],
)
def test_the_last_queries_attend_as_among_all_without_logits_in_memory(
    kv_heads: int, widths: tuple[int, int], options: dict[str, Any]
) -> None:
    given = queries_keys_values(kv_heads, widths)
    slope = torch.randn(1, HEADS, QUERIES, widths[1], device=GPU).bfloat16()

    def last() -> list[torch.Tensor]:
        mixed = causal_attention(given[0][:, :, -QUERIES:], *given[1:], **options)
        return [mixed, *torch.autograd.grad(mixed, given, slope)]

    last()  # a kernel may have to be compiled
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = last()
    taken = torch.cuda.max_memory_allocated() - before
    own = sum(x.numel() * x.element_size() for x in given)
    assert taken < 6 * own + HEADS * QUERIES * KEYS, f"{taken / 2**20:.0f} MiB"  # logits would take twice that in bf16

    mixed = causal_attention(*given, **options)[:, :, -QUERIES:]
    for what, ours, theirs in zip("yqkv", found, [mixed, *torch.autograd.grad(mixed, given, slope)], strict=True):
        error = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        assert error < 0.01, f"{what}: {error:.4f}"
