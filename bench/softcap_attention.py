"""Causal attention with logit softcap on one GPU: our kernels, flex_attention, and cuDNN without softcap.

    python bench/softcap_attention.py [--tiles] [--sequences 4] [--tokens 8192] [--seconds 0.5] [--json FILE]

Heads of Grok-1: 48 of queries, 8 of keys and values, 128 wide. Each implementation is repeated for a while, so that the
clock is the sustained one. Every visible query-key pair counts as two GEMMs forward and five backward, however often
it is computed. With --tiles each of our kernels is also timed with other tiles.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_report import BenchReport
from device import describe_machine
from device_timer import time_sustained
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from llmb.ops.attention import softcap_attention_triton as kernels
from llmb.ops.attention.softcap_attention_triton import SoftcapAttention, Tiles
from llmb.perfmodel.hardware import TERA

HEADS, KV_HEADS, WIDTH, SOFTCAP = 48, 8, 128, 30.0
SCALE = WIDTH**-0.5
FORWARD, BACKWARD = 2, 5  # GEMMs per query-key pair
TILES = {
    "softcap_forward": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 8, 3)),
    "softcap_backward_dq": ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 4)),
    "softcap_backward_dkv": ((32, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3)),
}


def random_tensors(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, ...]:
    """Return q, k, v and dy; tokens before heads in memory, as projections write them."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    tensors_BTHD = (torch.randn(options.sequences, options.tokens, n, WIDTH, device=device).bfloat16() for n in heads)
    return tuple(x.transpose(1, 2) for x in tensors_BTHD)


def implementations(tokens: int, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Return functions of q, k and v by name."""
    flex = torch.compile(flex_attention, dynamic=False)
    seen = create_block_mask(lambda _b, _h, query, key: query >= key, None, None, tokens, tokens, device=device)

    def softcap(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def without_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)

    return {
        "cuDNN, no softcap": without_softcap,
        "ours": lambda q, k, v: SoftcapAttention.apply(q, k, v, SCALE, SOFTCAP),
        "flex_attention": lambda q, k, v: flex(q, k, v, softcap, seen, SCALE, enable_gqa=True),
    }


def time_forward_backward(
    attend: Callable[..., Tensor], tensors: tuple[Tensor, ...], seconds: float
) -> tuple[float, float]:
    """Return seconds of the forward and backward passes."""
    *inputs, dy = (x.detach() for x in tensors)
    forward_s = time_sustained(lambda: attend(*inputs), dy.device, seconds)
    for x in inputs:
        x.requires_grad_()
    y = attend(*inputs)
    return forward_s, time_sustained(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True), dy.device, seconds)


def time_tiles(report: BenchReport, tensors: tuple[Tensor, ...], flops: float, seconds: float) -> None:
    """Time each of our kernels with other tiles."""
    q, k, v, dy = tensors
    y, lse = kernels.softcap_forward(q, k, v, SCALE, SOFTCAP)
    _, dot = kernels.softcap_backward_dq(dy, y, lse, q, k, v, SCALE, SOFTCAP)
    operands = {
        "softcap_forward": (q, k, v),
        "softcap_backward_dq": (dy, y, lse, q, k, v),
        "softcap_backward_dkv": (dy, lse, dot, q, k, v),
    }
    gemms = {"softcap_forward": FORWARD, "softcap_backward_dq": 3, "softcap_backward_dkv": 4}  # GEMMs of each kernel
    for name, choices in TILES.items():
        rows: list[tuple[Any, ...]] = []
        for choice in choices:
            call = partial(getattr(kernels, name), *operands[name], SCALE, SOFTCAP, Tiles(*choice))
            spent = time_sustained(call, q.device, seconds)
            rows.append((*choice, 1000 * spent, gemms[name] * flops / spent / TERA))
            report.record("tiles", {"kernel": name, "tiles": choice, "seconds": spent})
        report.print_table(f"{name} with other tiles", ("queries", "keys", "warps", "stages", "ms", "TFLOP/s"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum time of each measurement")
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device = torch.device("cuda", 0)
    report = BenchReport(json=options.json)
    print(describe_machine(device), flush=True)
    tensors = random_tensors(options, device)
    pairs = options.sequences * tensors[0].shape[1] * options.tokens * (options.tokens + 1) / 2
    gemm_flops, best, rows = 2 * WIDTH * pairs, None, []
    for name, attend in implementations(options.tokens, device).items():
        forward_s, backward_s = time_forward_backward(attend, tensors, options.seconds)
        best = best or forward_s + backward_s  # cuDNN is first
        rates = (FORWARD * gemm_flops / forward_s / TERA, BACKWARD * gemm_flops / backward_s / TERA)
        rows.append((name, 1000 * forward_s, rates[0], 1000 * backward_s, rates[1], (forward_s + backward_s) / best))
        report.record("ways", {"implementation": name, "forward_s": forward_s, "backward_s": backward_s})
    report.print_table(
        f"{options.sequences} x {options.tokens} tokens",
        ("implementation", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "x of cuDNN"),
        rows,
    )
    if options.tiles:
        time_tiles(report, tensors, gemm_flops, options.seconds)


if __name__ == "__main__":
    main()
