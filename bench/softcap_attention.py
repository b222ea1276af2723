"""Causal attention with logit softcap on one GPU: ours, FlashAttention 4, flex_attention, torch's without softcap.

    python bench/softcap_attention.py [--heads gemma2 [--window 4096]] [--tiles] [--sequences 4] [--tokens 8192]
                                      [--seconds 0.5] [--json FILE]

Heads of Grok-1: 48 of queries, 8 of keys and values, 128 wide; of Gemma 2: 16, 8 and 256. Each implementation is
repeated for a while, so that the clock is the sustained one. Every visible query-key pair counts as two GEMMs forward
and five backward, however often it is computed. Without a softcap cuDNN is timed where it takes the heads, else
FlashAttention-2, as with a window. With --tiles each of our kernels is also timed with other tiles.
"""

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure.bench_report import BenchReport
from measure.device import describe_machine
from measure.device_timer import time_sustained
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.runtime.errors import OutOfResources

from llmb.ops.attention.window_attention import window_attention
from llmb.ops.device_capabilities import capabilities
from llmb.ops.softcap import softcap_attention_triton as kernels
from llmb.ops.softcap.softcap_attention_triton import Logits, SoftcapAttention
from llmb.ops.softcap.softcap_tiles import Tiles
from llmb.perfmodel.hardware import TERA

FORWARD, BACKWARD = 2, 5  # GEMMs per query-key pair
LIBRARY = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


class Heads(NamedTuple):
    """Heads of a model, and its softcap."""

    queries: int
    keys: int
    width: int
    softcap: float

    @property
    def scale(self) -> float:
        return self.width**-0.5


MODELS = {"grok1": Heads(48, 8, 128, 30.0), "gemma2": Heads(16, 8, 256, 50.0)}
TilesByKernel = dict[str, tuple[tuple[int, int, int, int], ...]]
TILES: TilesByKernel = {
    "softcap_forward": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 8, 3)),
    "softcap_backward_dq": ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 4)),
    "softcap_backward_dkv": ((32, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3)),
}
WIDE_TILES: TilesByKernel = {  # of heads of 256
    "softcap_forward": ((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 64, 4, 2), (64, 32, 4, 3)),
    "softcap_backward_dq": ((128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3)),
    "softcap_backward_dkv": ((32, 64, 8, 3), (32, 64, 8, 2), (32, 64, 8, 4), (64, 64, 8, 2), (64, 64, 8, 1)),
}


def random_tensors(heads: Heads, options: argparse.Namespace, device: torch.device) -> tuple[Tensor, ...]:
    """Return q, k, v and dy; tokens before heads in memory, as projections write them."""
    counts = (heads.queries, heads.keys, heads.keys, heads.queries)
    shapes = ((options.sequences, options.tokens, count, heads.width) for count in counts)
    return tuple(torch.randn(shape, device=device).bfloat16().transpose(1, 2) for shape in shapes)


def visible_pairs(tokens: int, window: int | None) -> int:
    """Return how many query-key pairs of a sequence count."""
    width = tokens if window is None else min(window, tokens)
    return width * (width + 1) // 2 + (tokens - width) * width


def implementations(
    heads: Heads, tokens: int, window: int | None, device: torch.device
) -> dict[str, Callable[..., Tensor]]:
    """Return functions of q, k and v by name."""
    flex = torch.compile(flex_attention, dynamic=False)
    width = tokens if window is None else window
    seen = create_block_mask(
        lambda _b, _h, query, key: (query >= key) & (query - key < width), None, None, tokens, tokens, device=device
    )

    def softcap(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return heads.softcap * torch.tanh(score / heads.softcap)

    def without_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if window is not None:
            return window_attention(q, k, v, heads.scale, window)
        with sdpa_kernel([*LIBRARY], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=heads.scale, enable_gqa=True)

    ways: dict[str, Callable[..., Tensor]] = {
        "library, no softcap": without_softcap,
        "ours": lambda q, k, v: SoftcapAttention.apply(q, k, v, heads.scale, heads.softcap, window),
        "flex_attention": lambda q, k, v: flex(q, k, v, softcap, seen, heads.scale, enable_gqa=True),
    }
    if capabilities(device).has("flash_attention_4"):
        ways["FlashAttention 4"] = partial(flash_attention_4, heads, window)
    return ways


def flash_attention_4(heads: Heads, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by the package flash-attn-4."""
    attend = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    out, *_ = attend(
        *(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=heads.scale, causal=True, softcap=heads.softcap,
        window_size=(None if window is None else window - 1, None if window is None else 0),
    )  # fmt: skip
    return out.transpose(1, 2)


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


def time_tiles(report: BenchReport, logits: Logits, tensors: tuple[Tensor, ...], flops: float, seconds: float) -> None:
    """Time each of our kernels with other tiles."""
    q, k, v, dy = tensors
    y, lse = kernels.softcap_forward(q, k, v, logits)
    _, dot = kernels.softcap_backward_dq(dy, y, lse, q, k, v, logits)
    operands = {
        "softcap_forward": (q, k, v),
        "softcap_backward_dq": (dy, y, lse, q, k, v),
        "softcap_backward_dkv": (dy, lse, dot, q, k, v),
    }
    gemms = {"softcap_forward": FORWARD, "softcap_backward_dq": 3, "softcap_backward_dkv": 4}  # GEMMs of each kernel
    for name, choices in (TILES if q.shape[-1] <= 128 else WIDE_TILES).items():
        rows: list[tuple[Any, ...]] = []
        for choice in choices:
            call = partial(getattr(kernels, name), *operands[name], logits, Tiles(*choice))
            try:
                spent = time_sustained(call, q.device, seconds)
            except OutOfResources as error:
                print(f"  {name} {choice}: {error}", flush=True)
                continue
            rows.append((*choice, 1000 * spent, gemms[name] * flops / spent / TERA))
            report.record("tiles", {"kernel": name, "tiles": choice, "seconds": spent})
        report.print_table(f"{name} with other tiles", ("queries", "keys", "warps", "stages", "ms", "TFLOP/s"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", choices=MODELS, default="grok1", help="of which model")
    parser.add_argument("--window", type=int, help="keys that a query sees at most")
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
    heads = MODELS[options.heads]
    tensors = random_tensors(heads, options, device)
    pairs = options.sequences * heads.queries * visible_pairs(options.tokens, options.window)
    gemm_flops, best, rows = 2 * heads.width * pairs, None, []
    for name, attend in implementations(heads, options.tokens, options.window, device).items():
        forward_s, backward_s = time_forward_backward(attend, tensors, options.seconds)
        best = best or forward_s + backward_s  # the library is first
        rates = (FORWARD * gemm_flops / forward_s / TERA, BACKWARD * gemm_flops / backward_s / TERA)
        rows.append((name, 1000 * forward_s, rates[0], 1000 * backward_s, rates[1], (forward_s + backward_s) / best))
        report.record("ways", {"implementation": name, "forward_s": forward_s, "backward_s": backward_s})
    window = "" if options.window is None else f", window of {options.window}"
    report.print_table(
        f"{options.sequences} x {options.tokens} tokens, heads of {options.heads}{window}",
        ("implementation", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "x of the library"),
        rows,
    )
    if options.tiles:
        logits = Logits(heads.scale, heads.softcap, options.window)
        time_tiles(report, logits, tensors, gemm_flops, options.seconds)


if __name__ == "__main__":
    main()
