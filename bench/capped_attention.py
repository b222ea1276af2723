"""Causal attention with squeezed logits on one GPU: our kernels and flex_attention, beside cuDNN's without a squeeze.

    python bench/capped_attention.py [--tiles] [--sequences 4] [--tokens 8192] [--seconds 0.5] [--json FILE]

Heads as Grok-1 has them: 48 of queries, 8 of keys and values, 128 wide. Each is repeated for a while, so that the clock
is the one that the chip sustains. Every pair of a query and a key that it sees counts as two products forward and five
back, however often a way computes them. With --tiles each of our kernels is timed with other tiles too.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from device import machine_of
from findings import Findings
from stopwatch import sustained
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from llmb.ops.attention import softcap_attention_triton as kernels
from llmb.ops.attention.softcap_attention_triton import SoftcapAttention, Tiles
from llmb.perfmodel.hardware import TERA

HEADS, KV_HEADS, WIDTH, CAP = 48, 8, 128, 30.0
SCALE = WIDTH**-0.5
THERE, BACK = 2, 5  # products of a query and a key
TILES = {
    "softcap_forward": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 8, 3)),
    "softcap_backward_dq": ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 4)),
    "softcap_backward_dkv": ((32, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3)),
}


def drawn(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, ...]:
    """Queries, keys, values and the slope; tokens lie before heads, as projections leave them."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    made = (torch.randn(options.sequences, options.tokens, n, WIDTH, device=device).bfloat16() for n in heads)
    return tuple(one.transpose(1, 2) for one in made)


def ways(tokens: int, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Each takes queries, keys and values."""
    flex = torch.compile(flex_attention, dynamic=False)
    seen = create_block_mask(lambda _b, _h, query, key: query >= key, None, None, tokens, tokens, device=device)

    def squeeze(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return CAP * torch.tanh(score / CAP)

    def without_squeeze(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)

    return {
        "cuDNN, no squeeze": without_squeeze,
        "ours": lambda q, k, v: SoftcapAttention.apply(q, k, v, SCALE, CAP),
        "flex_attention": lambda q, k, v: flex(q, k, v, squeeze, seen, SCALE, enable_gqa=True),
    }


def timed(attend: Callable[..., Tensor], given: tuple[Tensor, ...], seconds: float) -> tuple[float, float]:
    """Seconds there and back."""
    *inputs, slope = (x.detach() for x in given)
    there = sustained(lambda: attend(*inputs), slope.device, seconds)
    for x in inputs:
        x.requires_grad_()
    y = attend(*inputs)
    return there, sustained(lambda: torch.autograd.grad(y, inputs, slope, retain_graph=True), slope.device, seconds)


def tiled(found: Findings, given: tuple[Tensor, ...], flops: float, seconds: float) -> None:
    """Each of our kernels with its tiles."""
    q, k, v, slope = given
    y, sums = kernels.softcap_forward(q, k, v, SCALE, CAP)
    _, dot = kernels.softcap_backward_dq(slope, y, sums, q, k, v, SCALE, CAP)
    operands = {
        "softcap_forward": (q, k, v),
        "softcap_backward_dq": (slope, y, sums, q, k, v),
        "softcap_backward_dkv": (slope, sums, dot, q, k, v),
    }
    products = {"softcap_forward": THERE, "softcap_backward_dq": 3, "softcap_backward_dkv": 4}  # that it computes
    for name, choices in TILES.items():
        rows: list[tuple[Any, ...]] = []
        for choice in choices:
            call = partial(getattr(kernels, name), *operands[name], SCALE, CAP, Tiles(*choice))
            spent = sustained(call, q.device, seconds)
            rows.append((*choice, 1000 * spent, products[name] * flops / spent / TERA))
            found.keep("tiles", {"kernel": name, "tiles": choice, "seconds": spent})
        found.say(f"{name} with other tiles", ("queries", "keys", "warps", "stages", "ms", "TFLOP/s"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each, at least")
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device = torch.device("cuda", 0)
    found = Findings(json=options.json)
    print(machine_of(device), flush=True)
    given = drawn(options, device)
    pairs = options.sequences * given[0].shape[1] * options.tokens * (options.tokens + 1) / 2
    product, best, rows = 2 * WIDTH * pairs, None, []
    for name, attend in ways(options.tokens, device).items():
        there, back = timed(attend, given, options.seconds)
        best = best or there + back  # cuDNN's comes first
        rates = (THERE * product / there / TERA, BACK * product / back / TERA)
        rows.append((name, 1000 * there, rates[0], 1000 * back, rates[1], (there + back) / best))
        found.keep("ways", {"way": name, "there_s": there, "back_s": back})
    found.say(
        f"{options.sequences} x {options.tokens} tokens",
        ("way", "there ms", "TFLOP/s", "back ms", "TFLOP/s", "of the first"),
        rows,
    )
    if options.tiles:
        tiled(found, given, product, options.seconds)


if __name__ == "__main__":
    main()
