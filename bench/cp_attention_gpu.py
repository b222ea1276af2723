"""Attention of one context-parallel rank on one GPU: our pieces by cuDNN, and FlashAttention-2 with a mask.

    python bench/cp_attention_gpu.py [--tokens 8192 65536] [--ranks 2 8] [--seconds 0.5] [--json FILE]

Heads of Llama 8b: 32 of queries, 8 of keys and values, 128 wide; one sequence. All ranks have as many query-key pairs;
the first and the last differ most in the shapes of their rectangles. There is no process group: a copy within the
device takes the place of each collective, so that all else of `ContextParallel` is timed, reordering and accumulation
included. Every visible pair counts as two GEMMs forward and five backward. The peer attends with each of the two chunks
to all keys up to its end (bottom-right mask), as training did before. The ceiling is cuDNN on a whole causal sequence
with as many pairs.                                                                                aim >= 500 TFLOP/s
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure.bench_report import BenchReport
from measure.device import describe_machine, release_memory
from measure.device_timer import time_sustained
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from llmb.ops.attention.segment_attention import kernel_for
from llmb.perfmodel.hardware import TERA
from llmb.train.parallel.context_parallel import ContextParallel, chunk_indices

HEADS, KV_HEADS, WIDTH = 32, 8, 128
SCALE = WIDTH**-0.5
FORWARD, BACKWARD = 2, 5  # GEMMs per query-key pair
Passes = tuple[Callable[[], object], Callable[[], object]]  # forward and backward


class LocalRank(ContextParallel):
    """One rank without its peers, which have the same keys and values."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks

    def _all_gather(self, received: Tensor, sent: Tensor) -> None:
        received.view(self.ranks, -1).copy_(sent)

    def _reduce_scatter(self, received: Tensor, sent: Tensor) -> None:
        received.copy_(sent.view(self.ranks, -1)[self.rank])


def random_heads(tokens: int, heads: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, heads, WIDTH, device=device).bfloat16()


def pieces(cp: LocalRank, tokens: int, device: torch.device) -> Passes:
    """Return the passes of a rank with `tokens` tokens of its own, as training calls them."""
    q_NHD, k_NGD, v_NGD, dout_NHD = (random_heads(tokens, n, device) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    out_NHD, lse_HN, k_TGD, v_TGD = cp.attention_forward(q_NHD, k_NGD, v_NGD, 1, SCALE)
    return (
        lambda: cp.attention_forward(q_NHD, k_NGD, v_NGD, 1, SCALE),
        lambda: cp.attention_backward(dout_NHD, q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, 1, SCALE),
    )


def flash(cp: LocalRank, tokens: int, device: torch.device) -> Passes:
    """Return the passes of FlashAttention-2 over gathered keys, each chunk with those up to its end."""
    chunk, heads = tokens // 2, (HEADS, KV_HEADS, KV_HEADS, HEADS)
    lengths = (tokens, cp.ranks * tokens, cp.ranks * tokens, tokens)
    q, k, v, dout = (
        random_heads(rows, n, device).transpose(0, 1)[None] for rows, n in zip(lengths, heads, strict=True)
    )

    def attend() -> Tensor:
        outputs = []
        for index, q_BHPD in zip(chunk_indices(cp.rank, cp.ranks), q.chunk(2, dim=2), strict=True):
            end = (index + 1) * chunk
            mask = causal_lower_right(chunk, end)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                outputs.append(
                    F.scaled_dot_product_attention(
                        q_BHPD, k[:, :, :end], v[:, :, :end], mask, scale=SCALE, enable_gqa=True
                    )
                )
        return torch.cat(outputs, dim=2)

    return autograd_passes(attend, (q, k, v), dout)


def whole(tokens: int, device: torch.device) -> Passes:
    """Return the passes of cuDNN over one causal sequence."""
    q, k, v, dout = (random_heads(tokens, n, device).transpose(0, 1)[None] for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)

    return autograd_passes(attend, (q, k, v), dout)


def autograd_passes(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...], dout: Tensor) -> Passes:
    for x in inputs:
        x.requires_grad_()
    out = attend()

    def forward() -> None:
        with torch.no_grad():
            attend()

    return forward, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def rates(passes: Passes, pairs: float, device: torch.device, seconds: float) -> dict[str, float]:
    """Return seconds and TFLOP/s of both passes, and the TFLOP/s of their sum."""
    flops = 2 * WIDTH * HEADS * pairs
    forward_s, backward_s = (time_sustained(call, device, seconds) for call in passes)
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "forward_tflops": FORWARD * flops / forward_s / TERA,
        "backward_tflops": BACKWARD * flops / backward_s / TERA,
        "tflops": (FORWARD + BACKWARD) * flops / (forward_s + backward_s) / TERA,
    }


def measure(cp: LocalRank, tokens: int, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Return the rates of the rank's attention in a sequence of `tokens`: ours, the peer's, and the ceiling's."""
    local = tokens // cp.ranks
    pairs = tokens * tokens / 2 / cp.ranks
    same_work = round(math.sqrt(2 * pairs) / 256) * 256  # tokens of a whole sequence
    kernel = kernel_for(random_heads(1, HEADS, device), cp.segments(1, local))
    builds: dict[str, tuple[Callable[[], Passes], float]] = {
        "cuDNN, whole sequence": (lambda: whole(same_work, device), same_work * same_work / 2),
        "FlashAttention-2, bottom-right": (lambda: flash(cp, local, device), pairs),
        f"ours, {type(kernel).__name__.strip('_')}": (lambda: pieces(cp, local, device), pairs),
    }
    results = []
    for name, (build, count) in builds.items():
        release_memory(device)
        results.append(
            {
                "tokens": tokens,
                "ranks": cp.ranks,
                "rank": cp.rank,
                "implementation": name,
                **rates(build(), count, device, seconds),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum time of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device = torch.device("cuda", 0)
    report = BenchReport(json=options.json)
    print(describe_machine(device), flush=True)
    for tokens in options.tokens:
        for ranks in options.ranks:
            rows: list[tuple[Any, ...]] = []
            for rank in (0, ranks - 1):
                ceiling, peer, _ = results = measure(LocalRank(rank, ranks), tokens, device, options.seconds)
                report.record("ranks", *results)
                rows += [
                    (
                        rank,
                        result["implementation"],
                        1000 * result["forward_s"],
                        result["forward_tflops"],
                        1000 * result["backward_s"],
                        result["backward_tflops"],
                        result["tflops"],
                        result["tflops"] / peer["tflops"],
                        result["tflops"] / ceiling["tflops"],
                    )
                    for result in results
                ]
            header = ("rank", "implementation", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "both")
            report.print_table(f"{tokens} tokens, cp {ranks}", (*header, "x of the peer", "x of the ceiling"), rows)


if __name__ == "__main__":
    main()
