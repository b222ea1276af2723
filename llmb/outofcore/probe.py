"""How fast this machine computes and copies when it does so for long, in the way out-of-core training does.

    python -m llmb.outofcore.probe cuda     # or cpu; progress on stderr, one line of JSON on stdout

On a GPU with the shapes of Llama 8B, on random numbers, each for seconds: a chip that runs out of power slows down, the
more so the more bits change, and only then shows what a long run will see. On a CPU with small shapes, in fp32.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.kernels.span_attention import Span, attend, attend_backward
from llmb.outofcore.products import Fp8Products, Products

TERA, GIGA = 1e12, 1e9
SETTLING = 1 / 3  # of each measurement, which does not count


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
    forward, backward = attention_rates(device, sizes)
    keep("attention_forward_tflops", forward / TERA, "TFLOP/s")
    keep("attention_backward_tflops", backward / TERA, "TFLOP/s")
    keep("memory_gbs", memory_rate(device, sizes) / GIGA, "GB/s")
    for name, value in link_rates(device, sizes).items():
        keep(name, value / GIGA, "GB/s")
    return found


def products_rate(products: Products, device: torch.device, sizes: Sizes) -> float:
    """FLOP/s of all products of a layer: forward, gradients of the input, gradients of the weights added up."""
    most = max(max(shape) for shape in sizes.weights)
    rows = _random(device, sizes.dtype, sizes.tokens * most)
    slopes = _random(device, sizes.dtype, sizes.tokens * most)
    weights = [_random(device, sizes.dtype, m * k).view(m, k) for m, k in sizes.weights]
    grads = [torch.zeros_like(weight) for weight in weights]
    made = torch.empty_like(rows)

    def layer() -> None:
        for weight, grad in zip(weights, grads, strict=True):
            m, k = weight.shape
            x, dy = (_matrix(flat, sizes.tokens, width) for flat, width in ((rows, k), (slopes, m)))
            products.forward(x, weight, out=_matrix(made, sizes.tokens, m))
            products.input_gradient(dy, weight, out=_matrix(made, sizes.tokens, k))
            products.weight_gradient(dy, x, grad, fresh=False)

    flops = 6.0 * sizes.tokens * sum(m * k for m, k in sizes.weights)
    return flops / _seconds(layer, device, sizes.seconds)


def attention_rates(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """FLOP/s there and back, as much of it in two short sequences as in a chunk at the end of a long one."""
    half = sizes.tokens // 2
    short = [Span(0, half, 0, 0), Span(half, sizes.tokens, half, half)]
    long = [Span(0, sizes.tokens, 0, sizes.past)]
    timed = [_attention_seconds(spans, device, sizes) for spans in (short, long)]  # of a FLOP
    there, back = (len(timed) / sum(each) for each in zip(*timed, strict=True))
    return there, back


def _attention_seconds(spans: list[Span], device: torch.device, sizes: Sizes) -> tuple[float, float]:
    heads, groups, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    context = spans[-1].here + spans[-1].end - spans[-1].first
    q_NHD, out_NHD, dout_NHD, dq_NHD = (
        _random(device, sizes.dtype, sizes.tokens * heads * width).view(-1, heads, width) for _ in range(4)
    )
    k_TGD, v_TGD = (_random(device, sizes.dtype, context * groups * width).view(-1, groups, width) for _ in range(2))
    dk_TGD, dv_TGD = (torch.empty_like(k_TGD, dtype=torch.float32) for _ in range(2))
    lse_HN = torch.empty(heads, sizes.tokens, dtype=torch.float32, device=device)
    scale = width**-0.5
    pairs = sum((s.end - s.first) * (s.here - s.past) + (s.end - s.first) ** 2 / 2 for s in spans)
    forward_flops = 4.0 * pairs * heads * width

    def there() -> None:
        attend(q_NHD, k_TGD, v_TGD, spans, out_NHD, lse_HN, scale)

    def back() -> None:
        attend_backward(dout_NHD, q_NHD, k_TGD, v_TGD, out_NHD, lse_HN, spans, dq_NHD, dk_TGD, dv_TGD, True, scale)

    lasting = sizes.seconds / 2
    return (
        _seconds(there, device, lasting) / forward_flops,
        _seconds(back, device, lasting) / (2.5 * forward_flops),  # five products of each pair instead of two
    )


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
