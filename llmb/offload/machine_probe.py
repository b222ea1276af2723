"""Probe of the machine: sustained rates of computation and copies, as out-of-core training does them.

    python -m llmb.offload.machine_probe cuda     # or cpu; progress on stderr, one line of JSON on stdout

On a GPU with the shapes of Llama 8B, on random numbers, each for seconds: a power-limited chip slows down, the more so
the more bits toggle, and only then shows what a long run will see. On a CPU with small shapes, in fp32.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmb.models.llama_layer.linear_gemms import Fp8LinearGemms, LinearGemms
from llmb.ops.attention.segment_attention import (
    Segment,
    causal_backward,
    segment_attention_backward,
    segment_attention_forward,
)
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2, quantize_fp8_current_scaling
from llmb.perfmodel.offload.task_durations import BACKWARD_ATTENTION
from llmb.perfmodel.offload.workspace import KEY_BLOCK

TERA, GIGA = 1e12, 1e9
SETTLING = 1 / 3  # fraction of each measurement that is discarded
TRIES = 3  # of what other processes may disturb


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes that are computed and copied, and for how long."""

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
        """Length of each of the short sequences that share a chunk."""
        return self.tokens // 2

    @property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's gemms."""
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
    """Return all rates, by the names of perfmodel/offload/machine_rates.py."""
    rates: dict[str, float | None] = {}

    def record(name: str, value: float, unit: str) -> None:
        rates[name] = value
        _say(f"{name.rsplit('_', 1)[0].replace('_', ' ')}: {value:.4g} {unit}")

    record("matmul_tflops", gemm_rate(LinearGemms(), device, sizes) / TERA, "TFLOP/s")
    rates["fp8_tflops"] = None
    if _has_fp8(device):
        record("fp8_tflops", gemm_rate(Fp8LinearGemms(), device, sizes) / TERA, "TFLOP/s")
    for name, value in attention_rates(device, sizes).items():
        record(name, value / TERA, "TFLOP/s")
    rates["square_tokens"] = sizes.square_tokens
    record("memory_gbs", memory_rate(device, sizes) / GIGA, "GB/s")
    for name, value in link_rates(device, sizes).items():
        record(name, value / GIGA, "GB/s")
    return rates


def gemm_rate(gemms: LinearGemms | Fp8LinearGemms, device: torch.device, sizes: Sizes) -> float:
    """Return FLOP/s over all gemms of a layer: forward, input gradients, accumulated weight gradients."""
    most = max(max(shape) for shape in sizes.weights)
    rows = _random(device, sizes.dtype, sizes.tokens * most)
    grads_in = _random(device, sizes.dtype, sizes.tokens * most)
    weights = [_random(device, sizes.dtype, m * k).view(m, k) for m, k in sizes.weights]
    grads = [torch.zeros_like(weight) for weight in weights]
    output = torch.empty_like(rows)
    operands: list[tuple[Any, Any, Any]] = [
        (_matrix(rows, sizes.tokens, weight.shape[1]), weight, _matrix(grads_in, sizes.tokens, weight.shape[0]))
        for weight in weights
    ]
    if isinstance(gemms, Fp8LinearGemms):  # their producers write fp8
        formats = (E4M3, E4M3, E5M2)
        operands = [tuple(map(quantize_fp8_current_scaling, some, formats)) for some in operands]  # type: ignore[misc]

    def layer() -> None:
        for (x, weight, dy), grad in zip(operands, grads, strict=True):
            m, k = grad.shape
            gemms.forward(x, weight, _matrix(output, sizes.tokens, m))
            gemms.input_gradient(dy, weight, _matrix(output, sizes.tokens, k))
            gemms.weight_gradient(dy, x, grad, accumulate=True)

    flops = 6.0 * sizes.tokens * sum(m * k for m, k in sizes.weights)
    return flops / _seconds(layer, device, sizes.seconds)


def attention_rates(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Return FLOP/s for a chunk's own keys, in two causal squares, and for the keys before a chunk, in both directions.

    A chunk at the end of a long sequence has as many queries as the two squares, so their diagonals take the same: what
    it takes beyond them is due to the keys that it sees beyond theirs, a few of its own and all that were before it.
    """
    tokens, half = sizes.tokens, sizes.square_tokens
    for _ in range(TRIES):
        timed = (
            _attention_seconds([Segment(0, half, 0, 0), Segment(half, tokens, half, half)], device, sizes),
            _attention_seconds([Segment(0, tokens, 0, sizes.past)], device, sizes),
        )
        if all(short < long for short, long in zip(*timed, strict=True)):
            break
    else:
        raise RuntimeError("attention to more keys took no longer: other work disturbs the probe, run it again")
    causal = 4.0 * tokens * (half / 2) * sizes.heads * sizes.head_dim
    beyond = 4.0 * tokens * (sizes.past + tokens / 2) * sizes.heads * sizes.head_dim - causal
    rates = {}
    for direction, factor, short, long in zip(("forward", "backward"), (1.0, BACKWARD_ATTENTION), *timed, strict=True):
        rates[f"attention_{direction}_tflops"] = factor * causal / short
        rates[f"past_attention_{direction}_tflops"] = factor * beyond / (long - short)
    return rates


def _attention_seconds(segments: list[Segment], device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds of a chunk's forward and backward, as a layer computes it."""
    heads, groups, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    before = segments[0].causal_start
    q_NHD, out_NHD, dout_NHD, dq_NHD = (
        _random(device, sizes.dtype, sizes.tokens * heads * width).view(-1, heads, width) for _ in range(4)
    )
    k_TGD, v_TGD = (
        _random(device, sizes.dtype, (before + sizes.tokens) * groups * width).view(-1, groups, width) for _ in range(2)
    )
    dk_TGD, dv_TGD = (torch.zeros_like(k_TGD, dtype=torch.float32) for _ in range(2))
    k_NGD, v_NGD, dk_NGD, dv_NGD = (x[before:] for x in (k_TGD, v_TGD, dk_TGD, dv_TGD))
    lse_HN = torch.empty(heads, sizes.tokens, dtype=torch.float32, device=device)
    scale = width**-0.5

    def forward() -> None:
        segment_attention_forward(q_NHD, k_NGD, v_NGD, k_TGD, v_TGD, segments, scale, KEY_BLOCK, (out_NHD, lse_HN))

    def backward() -> None:
        if before == 0:  # no other chunk sees these keys, so their grads_in are not added up
            causal_backward(dout_NHD, q_NHD, k_NGD, v_NGD, out_NHD, lse_HN, segments, scale)
        else:
            segment_attention_backward(
                dout_NHD, q_NHD, k_NGD, v_NGD, k_TGD, v_TGD, out_NHD, lse_HN, segments, dq_NHD, dk_NGD, dv_NGD,
                dk_TGD, dv_TGD, True, scale, KEY_BLOCK,
            )  # fmt: skip

    duration = sizes.seconds / 2
    return _seconds(forward, device, duration), _seconds(backward, device, duration)


def memory_rate(device: torch.device, sizes: Sizes) -> float:
    """Return bytes/s, read and written, of a copy within the device."""
    source = _random(device, torch.float32, sizes.copied // 4)
    target = torch.empty_like(source)
    return 2.0 * sizes.copied / _seconds(lambda: target.copy_(source), device, sizes.seconds / 6)


def link_rates(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Return bytes/s between pinned host memory and the device: in, out, and per direction when both are busy."""
    pinned = device.type == "cuda"
    source, destination = (torch.ones(sizes.copied, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    received, sent = (torch.empty(sizes.copied, dtype=torch.uint8, device=device) for _ in range(2))
    sent.copy_(destination)
    streams = [torch.cuda.Stream(device) for _ in range(2)] if pinned else [None, None]

    def inward() -> None:
        with torch.cuda.stream(streams[0]):  # without a GPU this does nothing
            received.copy_(source, non_blocking=True)

    def outward() -> None:
        with torch.cuda.stream(streams[1]):
            destination.copy_(sent, non_blocking=True)

    def both() -> None:
        inward()
        outward()

    duration = sizes.seconds / 6
    ways = {"link_in_gbs": inward, "link_out_gbs": outward, "link_both_gbs": both}
    return {name: sizes.copied / _seconds(copies, device, duration) for name, copies in ways.items()}


def _seconds(action: Callable[[], object], device: torch.device, duration: float) -> float:
    """Return the seconds of one call among many, when the device has settled."""
    for _ in range(2):  # kernels are chosen and compiled
        action()
    _finish(device)
    began = now = time.perf_counter()
    settled, calls = None, 0
    while now - began < duration or not calls:
        action()
        _finish(device)
        now = time.perf_counter()
        if settled is not None:
            calls += 1
        elif now - began >= SETTLING * duration:
            settled = now
    assert settled is not None
    return (now - settled) / calls


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _random(device: torch.device, dtype: torch.dtype, numel: int) -> Tensor:
    return torch.randn(numel, device=device, dtype=dtype)


def _matrix(flat: Tensor, rows: int, columns: int) -> Tensor:
    return flat[: rows * columns].view(rows, columns)


def _say(line: str) -> None:
    print(f"probe: {line}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Measure the named device; a failure is one line."""
    device = torch.device(arguments[0] if arguments else "cpu")
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            rates = measure(device, ON_GPU if device.type == "cuda" else ON_CPU)
    except (RuntimeError, ImportError) as error:  # out of memory, no driver, a kernel that is not there
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
