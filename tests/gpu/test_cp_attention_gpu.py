"""Attention of context-parallel ranks on a GPU: kernels, NCCL, memory."""

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, no_synchronization, peak_allocated, relative_error
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from llmb.models.blocks import causal_attention
from llmb.ops.attention.attention_block import CUDNN, FLASH
from llmb.ops.attention.flash_attention_4 import FLASH4
from llmb.ops.attention.segment_attention import kernel_for
from llmb.ops.softcap.softcap_attention import softcap_attention
from llmb.train.parallel.context_parallel import ContextParallel, cp_attention

pytestmark = NEEDS_GPU

HEADS, TOKENS = 8, 4096


class LocalRank(ContextParallel):
    """One of several ranks that run one after the other in this process."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.all_sent: Tensor  # keys and values of all ranks
        self.d_all_sent: Tensor  # this rank's gradient of them

    def _all_gather(self, received: Tensor, sent: Tensor) -> None:
        assert torch.equal(self.all_sent[self.rank], sent)
        received.copy_(self.all_sent.flatten())

    def _reduce_scatter(self, received: Tensor, sent: Tensor) -> None:
        self.d_all_sent = sent.view(self.ranks, -1)
        received.zero_()


def queries_keys_values(sequences: int, kv_heads: int, widths: tuple[int, int]) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, [B * T, heads, width]."""
    generator = torch.Generator(GPU).manual_seed(3)
    shapes = [(HEADS, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]), (HEADS, widths[1])]
    return [torch.randn(sequences * TOKENS, *s, device=GPU, generator=generator).bfloat16() for s in shapes]


def flat(k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
    return torch.cat((k_NGD.flatten(), v_NGD.flatten()))


def attend_alone(tensors: list[Tensor], sequences: int, scale: float) -> list[Tensor]:
    """Return output and gradients in fp32, [B * T, heads, width]."""
    *inputs, dout = (x.float().unflatten(0, (sequences, -1)).transpose(1, 2) for x in tensors)
    for x in inputs:
        x.requires_grad_()
    out = causal_attention(*inputs, scale=scale)
    return [x.transpose(1, 2).flatten(0, 1) for x in (out.detach(), *torch.autograd.grad(out, inputs, dout))]


def assert_close(actual: Tensor, exact: Tensor, name: str) -> None:
    error = relative_error(actual, exact)
    assert error < 0.01, f"{name}: relative error {error:.4f}"


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("kv_heads", "widths"), [(2, (128, 128)), (8, (192, 128))], ids=["gqa", "mla"])
def test_attention_of_all_ranks_equals_the_whole(
    ranks: int, sequences: int, kv_heads: int, widths: tuple[int, int]
) -> None:
    """cuDNN computes heads of one width, where it is fast; FlashAttention-2 takes the wider heads of MLA.

    FlashAttention 4 takes both, where it is installed and sequences are long enough.
    """
    tensors, scale = queries_keys_values(sequences, kv_heads, widths), widths[0] ** -0.5
    group = [LocalRank(rank, ranks) for rank in range(ranks)]
    shards = [[cp.shard(x, sequences) for x in tensors] for cp in group]
    all_sent, d_all_sent, outputs, dkv = torch.stack([flat(k, v) for _, k, v, _ in shards]), [], [], []
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    for cp, (q, k, v, dout) in zip(group, shards, strict=True):
        segments = cp.segments(sequences, TOKENS // ranks)
        assert kernel_for(q, segments) in (FLASH4, CUDNN if hopper and widths[0] == 128 else FLASH)
        cp.all_sent = all_sent
        out, lse, k_all, v_all = cp.attention_forward(q, k, v, sequences, scale)
        assert torch.equal(k_all, tensors[1])
        assert torch.equal(v_all, tensors[2])
        dq, *chunk_dkv = cp.attention_backward(dout, q, k_all, v_all, out, lse, sequences, scale)
        outputs.append((out, dq))
        dkv.append(flat(*chunk_dkv).float())
        d_all_sent.append(cp.d_all_sent.float())
    dkv_all = torch.stack(dkv) + sum(d_all_sent)
    expected = attend_alone(tensors, sequences, scale)
    for cp, actual, dkv_flat in zip(group, outputs, dkv_all, strict=True):
        exact = [cp.shard(x, sequences) for x in expected]
        dk, dv = dkv_flat.split([x.numel() for x in exact[2:]])
        for name, x, y in zip(("out", "dq", "dk", "dv"), (*actual, dk, dv), exact, strict=True):
            assert_close(x.flatten(), y.flatten(), f"rank {cp.rank}, {name}")


def test_attention_with_nccl_does_not_synchronize(nccl: None) -> None:
    """One rank holds both chunks of a sequence: the second attends to the first as gathered."""
    cp, sequences, scale = ContextParallel(init_device_mesh("cuda", (1,))), 2, 128**-0.5
    tensors = queries_keys_values(sequences, 2, (128, 128))
    *inputs, dout = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in tensors)
    for x in inputs:
        x.requires_grad_()

    def attend() -> list[Tensor]:
        out = cp_attention(cp, *inputs, scale=scale)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    attend()  # plans of cuDNN, the communicator of NCCL
    torch.cuda.synchronize()
    with no_synchronization():
        actual = attend()
    for name, x, exact in zip(("out", "dq", "dk", "dv"), actual, attend_alone(tensors, sequences, scale), strict=True):
        assert_close(x.transpose(1, 2).flatten(0, 1), exact, name)


def test_last_queries_with_softcap_attend_as_among_all_without_logits_in_memory() -> None:
    queries, keys, scale, softcap = 1024, 8192, 128**-0.5, 30.0
    generator = torch.Generator(GPU).manual_seed(3)
    qkv = [
        torch.randn(1, heads, keys, 128, device=GPU, generator=generator).bfloat16().requires_grad_()
        for heads in (HEADS, 2, 2)
    ]
    dy = torch.randn(1, HEADS, queries, 128, device=GPU, generator=generator).bfloat16()

    def attend_last() -> list[Tensor]:
        out = softcap_attention(qkv[0][:, :, -queries:], *qkv[1:], scale, softcap)
        return [out, *torch.autograd.grad(out, qkv, dy)]

    attend_last()  # a kernel may have to be compiled
    actual: list[Tensor] = []
    peak_bytes = peak_allocated(lambda: actual.extend(attend_last()))
    input_bytes = sum(x.numel() * x.element_size() for x in qkv)
    logit_bytes = 2 * HEADS * queries * keys
    assert peak_bytes < 6 * input_bytes + logit_bytes / 2, f"{peak_bytes / 2**20:.0f} MiB"
    out = softcap_attention(*qkv, scale, softcap)[:, :, -queries:]
    for name, x, exact in zip("yqkv", actual, [out, *torch.autograd.grad(out, qkv, dy)], strict=True):
        assert_close(x, exact, name)
