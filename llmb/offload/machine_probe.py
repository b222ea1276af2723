"""How fast this machine computes and copies when it does so for long, in the way out-of-core training does.

    python -m llmb.offload.machine_probe cuda     # or cpu; progress on stderr, one line of JSON on stdout

On a GPU with the shapes of Llama 8B, on random numbers, each for seconds: a chip that runs out of power slows down, the
more so the more bits change, and only then shows what a long run will see. On a CPU with small shapes, in fp32.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmb.models.llama_layer.linear_gemms import Fp8Products, Products
from llmb.ops.attention.segment_attention import Span, attend, attend_backward, squares_backward
from llmb.ops.gemm.fp8_linear import E5M2
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import in_both_forms
from llmb.perfmodel.offload.task_durations import BACKWARD_ATTENTION
from llmb.perfmodel.offload.workspace import KEYS_AT_ONCE

TERA, GIGA = 1e12, 1e9
SETTLING = 1 / 3  # of each measurement, which does not count
TRIES = 3  # at what other work may disturb


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is computed and copied, and for how long."""

    dtype: torch.dtype
    tokens: int  # of a chunk
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    past: int  # tokens before the chunk, of a long sequence
    copied: int  # bytes
    seconds: float  # of the longest measurement

    @property
    def square_tokens(self) -> int:
        """Of each of the short sequences that share a chunk."""
        return self.tokens // 2

    @property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's products."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (width + 2 * kv_width, self.hidden),
            (self.hidden, width),
            (2 * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        )


ON_GPU = Sizes(
    dtype=torch.bfloat16, tokens=16384, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, past=49152,
    copied=1 << 30, seconds=6.0,
)  # fmt: skip
ON_CPU = Sizes(
    dtype=torch.float32, tokens=256, hidden=256, ffn=896, heads=8, kv_heads=2, head_dim=32, past=768,
    copied=1 << 24, seconds=0.6,
)  # fmt: skip


def measure(device: torch.device, sizes: Sizes) -> dict[str, float | None]:
    """All rates, by the names of predict/rates.py."""
    found: dict[str, float | None] = {}

    def keep(name: str, value: float, unit: str) -> None:
        found[name] = value
        _say(f"{name.rsplit('_', 1)[0].replace('_', ' ')}: {value:.4g} {unit}")

    keep("matmul_tflops", products_rate(Products(), device, sizes) / TERA, "TFLOP/s")
    found["fp8_tflops"] = None
    if _has_fp8(device):
        keep("fp8_tflops", products_rate(Fp8Products(), device, sizes) / TERA, "TFLOP/s")
    for name, value in attention_rates(device, sizes).items():
        keep(name, value / TERA, "TFLOP/s")
    found["square_tokens"] = sizes.square_tokens
    keep("memory_gbs", memory_rate(device, sizes) / GIGA, "GB/s")
    for name, value in link_rates(device, sizes).items():
        keep(name, value / GIGA, "GB/s")
    return found


def products_rate(products: Products | Fp8Products, device: torch.device, sizes: Sizes) -> float:
    """FLOP/s of all products of a layer: forward, gradients of the input, gradients of the weights added up."""
    most = max(max(shape) for shape in sizes.weights)
    rows = _random(device, sizes.dtype, sizes.tokens * most)
    slopes = _random(device, sizes.dtype, sizes.tokens * most)
    weights = [_random(device, sizes.dtype, m * k).view(m, k) for m, k in sizes.weights]
    grads = [torch.zeros_like(weight) for weight in weights]
    made = torch.empty_like(rows)
    operands: list[tuple[Any, Any, Any]] = [
        (_matrix(rows, sizes.tokens, weight.shape[1]), weight, _matrix(slopes, sizes.tokens, weight.shape[0]))
        for weight in weights
    ]
    if isinstance(products, Fp8Products):  # what makes them writes 8 bits
        formats = (E4M3, E4M3, E5M2)
        operands = [tuple(map(in_both_forms, some, formats)) for some in operands]  # type: ignore[misc]

    def layer() -> None:
        for (x, weight, dy), grad in zip(operands, grads, strict=True):
            m, k = grad.shape
            products.forward(x, weight, _matrix(made, sizes.tokens, m))
            products.input_gradient(dy, weight, _matrix(made, sizes.tokens, k))
            products.weight_gradient(dy, x, grad, fresh=False)

    flops = 6.0 * sizes.tokens * sum(m * k for m, k in sizes.weights)
    return flops / _seconds(layer, device, sizes.seconds)


def attention_rates(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """FLOP/s of a chunk's own keys, in two causal squares, and of the keys before a chunk, there and back.

    A chunk at the end of a long sequence has as many queries as the two squares, so their diagonals take the same: what
    it takes beyond them is due to the keys that it sees beyond theirs, a few of its own and all that were before it.
    """
    tokens, half = sizes.tokens, sizes.square_tokens
    for _ in range(TRIES):
        timed = (
            _attention_seconds([Span(0, half, 0, 0), Span(half, tokens, half, half)], device, sizes),
            _attention_seconds([Span(0, tokens, 0, sizes.past)], device, sizes),
        )
        if all(short < long for short, long in zip(*timed, strict=True)):
            break
    else:
        raise RuntimeError("attention to more keys took no longer: other work disturbs the probe, run it again")
    own = 4.0 * tokens * (half / 2) * sizes.heads * sizes.head_dim
    beyond = 4.0 * tokens * (sizes.past + tokens / 2) * sizes.heads * sizes.head_dim - own
    found = {}
    for way, factor, short, long in zip(("forward", "backward"), (1.0, BACKWARD_ATTENTION), *timed, strict=True):
        found[f"attention_{way}_tflops"] = factor * own / short
        found[f"past_attention_{way}_tflops"] = factor * beyond / (long - short)
    return found


def _attention_seconds(spans: list[Span], device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Of a chunk there and back, as a block computes it."""
    heads, groups, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    before = spans[0].here
    q_NHD, out_NHD, dout_NHD, dq_NHD = (
        _random(device, sizes.dtype, sizes.tokens * heads * width).view(-1, heads, width) for _ in range(4)
    )
    k_TGD, v_TGD = (
        _random(device, sizes.dtype, (before + sizes.tokens) * groups * width).view(-1, groups, width) for _ in range(2)
    )
    dk_TGD, dv_TGD = (torch.zeros_like(k_TGD, dtype=torch.float32) for _ in range(2))
    lse_HN = torch.empty(heads, sizes.tokens, dtype=torch.float32, device=device)
    scale = width**-0.5

    def there() -> None:
        attend(q_NHD, k_TGD, v_TGD, spans, scale, KEYS_AT_ONCE, (out_NHD, lse_HN))

    def back() -> None:
        if before == 0:  # no other chunk sees these keys, so their slopes are not added up
            squares_backward(dout_NHD, q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, spans, scale)
        else:
            attend_backward(
                dout_NHD, q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, spans, dq_NHD, dk_TGD, dv_TGD, False, scale,
                KEYS_AT_ONCE,
            )  # fmt: skip

    lasting = sizes.seconds / 2
    return _seconds(there, device, lasting), _seconds(back, device, lasting)


def memory_rate(device: torch.device, sizes: Sizes) -> float:
    """Bytes a second, read and written, of a copy within the device."""
    source = _random(device, torch.float32, sizes.copied // 4)
    target = torch.empty_like(source)
    return 2.0 * sizes.copied / _seconds(lambda: target.copy_(source), device, sizes.seconds / 6)


def link_rates(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Bytes a second between pinned host memory and the device: in, out, and each way when both are busy."""
    pinned = device.type == "cuda"
    there, back = (torch.ones(sizes.copied, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    received, sent = (torch.empty(sizes.copied, dtype=torch.uint8, device=device) for _ in range(2))
    sent.copy_(back)
    lanes = [torch.cuda.Stream(device) for _ in range(2)] if pinned else [None, None]

    def inward() -> None:
        with torch.cuda.stream(lanes[0]):  # without a GPU this does nothing
            received.copy_(there, non_blocking=True)

    def outward() -> None:
        with torch.cuda.stream(lanes[1]):
            back.copy_(sent, non_blocking=True)

    def both() -> None:
        inward()
        outward()

    lasting = sizes.seconds / 6
    ways = {"link_in_gbs": inward, "link_out_gbs": outward, "link_both_gbs": both}
    return {name: sizes.copied / _seconds(copies, device, lasting) for name, copies in ways.items()}


def _seconds(action: Callable[[], object], device: torch.device, lasting: float) -> float:
    """Of one call among many, when the device has settled."""
    for _ in range(2):  # kernels are chosen and planned
        action()
    _finish(device)
    began = now = time.perf_counter()
    settled, calls = None, 0
    while now - began < lasting or not calls:
        action()
        _finish(device)
        now = time.perf_counter()
        if settled is not None:
            calls += 1
        elif now - began >= SETTLING * lasting:
            settled = now
    assert settled is not None
    return (now - settled) / calls


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _random(device: torch.device, dtype: torch.dtype, numbers: int) -> Tensor:
    return torch.randn(numbers, device=device, dtype=dtype)


def _matrix(flat: Tensor, rows: int, columns: int) -> Tensor:
    return flat[: rows * columns].view(rows, columns)


def _say(line: str) -> None:
    print(f"probe: {line}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Measure the device named; a failure is one line."""
    device = torch.device(arguments[0] if arguments else "cpu")
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            found = measure(device, ON_GPU if device.type == "cuda" else ON_CPU)
    except (RuntimeError, ImportError) as error:  # out of memory, no driver, a kernel that is not there
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
