"""Probe of the machine: sustained rates of computation and copies, launch latency and host memory.

    python -m llmb.offload.machine_probe cuda '[[16384, 6144, 4096]]'     # or cpu; rows, outputs, inputs of GEMMs
    python -m llmb.offload.machine_probe cuda '[]' /nvme                  # with the disk of a folder

Progress on stderr, one line of JSON on stdout. On a GPU with the shapes of Llama 8B, as out-of-core training has them,
on random numbers, each for seconds: a power-limited chip slows down, the more so the more bits toggle, and only then
shows what a long run will see. On a CPU with small shapes, in fp32. The GEMMs of the command line are measured too, in
every dtype that the device has.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmb.errors import LaunchError
from llmb.models.llama_layer.linear_gemms import Fp8LinearGemms, LinearGemms
from llmb.offload.disk import disk_probe
from llmb.ops.attention.segment_attention import (
    Segment,
    causal_backward,
    segment_attention_backward,
    segment_attention_forward,
)
from llmb.ops.device_capabilities import capabilities
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2, quantize_fp8_current_scaling
from llmb.perfmodel.offload.task_durations import BACKWARD_ATTENTION
from llmb.perfmodel.offload.workspace import KEY_BLOCK
from llmb.perfmodel.probe.probe_record import Spread
from llmb.runtime.probe import host_probe
from llmb.runtime.probe.repeated_calls import Measurement, repeat_calls

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
TRIES = 3  # of what other processes may disturb


GemmShape = tuple[int, int, int]  # rows (tokens), outputs, inputs


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
    def gemms(self) -> tuple["GemmShape", ...]:
        """Rows, outputs and inputs of a layer's gemms."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (self.tokens, width + 2 * kv_width, self.hidden),
            (self.tokens, self.hidden, width),
            (self.tokens, 2 * self.ffn, self.hidden),
            (self.tokens, self.hidden, self.ffn),
        )


ON_GPU = Sizes(
    dtype=torch.bfloat16, tokens=16384, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, past=49152,
    copied=1 << 30, seconds=6.0,
)  # fmt: skip
ON_CPU = Sizes(
    dtype=torch.float32, tokens=256, hidden=256, ffn=896, heads=8, kv_heads=2, head_dim=32, past=768,
    copied=1 << 28, seconds=0.6,  # beyond the caches
)  # fmt: skip


class Probe:
    """Measurements so far: rates by the names of perfmodel/offload/machine_rates.py, and everything with its spread."""

    def __init__(self) -> None:
        self.rates: dict[str, float | None] = {}
        self.spreads: dict[str, Spread | None] = {}

    def record(self, name: str, measured: Measurement, unit: float, text: str) -> None:
        """Keep a rate of machine_rates.py, and say it."""
        self.rates[name], self.spreads[name] = measured.rate / unit, measured.rates(unit)
        _say(f"{name.rsplit('_', 1)[0].replace('_', ' ')}: {measured.rate / unit:.4g} {text}")


def measure(
    device: torch.device, sizes: Sizes, shapes: Sequence[GemmShape] = (), disk: Path | None = None
) -> dict[str, Any]:
    """Return all rates, and under `details` what else was measured, by the names of perfmodel/probe/probe_record.py."""
    probe = Probe()
    probe.record("matmul_tflops", gemm_rate(LinearGemms(), device, sizes), TERA, "TFLOP/s")
    probe.rates["fp8_tflops"] = None
    if capabilities(device).has("fp8_gemm"):
        probe.record("fp8_tflops", gemm_rate(Fp8LinearGemms(), device, sizes), TERA, "TFLOP/s")
    for name, measured in attention_rates(device, sizes).items():
        probe.record(name, measured, TERA, "TFLOP/s")
    probe.rates["square_tokens"] = sizes.square_tokens
    probe.record("memory_gbs", memory_rate(device, sizes), GIGA, "GB/s")
    for name, measured in link_rates(device, sizes).items():
        probe.record(name, measured, GIGA, "GB/s")
    if disk is not None:
        disk_sizes = disk_probe.ON_GPU if device.type == "cuda" else disk_probe.ON_CPU
        for name, measured in disk_probe.disk_rates(disk, disk_sizes).items():
            probe.record(name, measured, GIGA, "GB/s")
    return {**probe.rates, "details": {"rates": _plain(probe.spreads), **_details(device, sizes, shapes)}}


def _details(device: torch.device, sizes: Sizes, shapes: Sequence[GemmShape]) -> dict[str, Any]:
    """Return what plans do not use: GEMMs of other shapes and dtypes, launch latency, host memory."""
    duration = sizes.seconds / 6
    by_dtype: dict[str, Spread | None] = {}
    for name in _dtypes(device) if shapes else ():
        try:
            measured = dtype_gemm_rate(name, device, shapes, sizes.seconds / 3)
        except RuntimeError as error:  # too large for this GPU, or no kernel: the other figures are still worth having
            _say(f"gemms of the model, {name}: none, {str(error).splitlines()[0]}")
            continue
        by_dtype[name] = measured.rates(TERA)
        _say(f"gemms of the model, {name}: {measured.rate / TERA:.4g} TFLOP/s")
    back_to_back, waited = (probe(device, duration) for probe in (host_probe.launches, host_probe.launch_and_wait))
    _say(
        f"launch: {back_to_back.mean_s / back_to_back.amount / MICRO:.3g} us, {waited.mean_s / MICRO:.3g} us with wait"
    )
    host = host_probe.host_memory(sizes.copied, duration)
    _say(f"host memory: {host.rate / GIGA:.4g} GB/s")
    spreads = {
        "launch_us": back_to_back.times(MICRO), "launch_and_wait_us": waited.times(MICRO),
        "host_memory_gbs": host.rates(GIGA),
    }  # fmt: skip
    return {"gemm_tflops": _plain(by_dtype), **_plain(spreads)}


def gemm_rate(
    gemms: LinearGemms | Fp8LinearGemms, device: torch.device, sizes: Sizes, shapes: Sequence[GemmShape] = ()
) -> Measurement:
    """Measure FLOPs of all gemms of a layer, or of `shapes`: forward, input gradients, accumulated weight gradients."""
    shapes = shapes or sizes.gemms
    most = max(rows * max(m, k) for rows, m, k in shapes)
    flat_x, flat_dy = (_random(device, sizes.dtype, most) for _ in range(2))
    weights = [_random(device, sizes.dtype, m * k).view(m, k) for _, m, k in shapes]
    grads = [torch.zeros_like(weight) for weight in weights]
    output = torch.empty_like(flat_x)
    operands: list[tuple[Any, Any, Any]] = [
        (_matrix(flat_x, rows, k), weight, _matrix(flat_dy, rows, m))
        for (rows, m, k), weight in zip(shapes, weights, strict=True)
    ]
    if isinstance(gemms, Fp8LinearGemms):  # their producers write fp8
        formats = (E4M3, E4M3, E5M2)
        operands = [tuple(map(quantize_fp8_current_scaling, some, formats)) for some in operands]  # type: ignore[misc]

    def layer() -> None:
        for (rows, m, k), (x, weight, dy), grad in zip(shapes, operands, grads, strict=True):
            gemms.forward(x, weight, _matrix(output, rows, m))
            gemms.input_gradient(dy, weight, _matrix(output, rows, k))
            gemms.weight_gradient(dy, x, grad, accumulate=True)

    flops = 6.0 * sum(rows * m * k for rows, m, k in shapes)
    return repeat_calls(layer, device, sizes.seconds, flops)


def dtype_gemm_rate(name: str, device: torch.device, shapes: Sequence[GemmShape], duration: float) -> Measurement:
    """Measure GEMMs of these shapes in a dtype by its name; tf32 is fp32 whose products have fewer bits."""
    usual = ON_GPU if device.type == "cuda" else ON_CPU
    dtype = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    sizes = replace(usual, dtype=dtype, seconds=duration)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        return gemm_rate(Fp8LinearGemms() if name == "fp8" else LinearGemms(), device, sizes, shapes)
    finally:
        torch.set_float32_matmul_precision(before)


def _dtypes(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return ("fp32", "bf16")
    recent = torch.cuda.get_device_capability(device) >= (8, 0)
    return ("fp32", *(("tf32",) if recent else ()), "fp16", *(("bf16",) if recent else ()), *_fp8_name(device))


def _fp8_name(device: torch.device) -> tuple[str, ...]:
    return ("fp8",) if capabilities(device).has("fp8_gemm") else ()


def _plain(spreads: dict[str, Spread | None]) -> dict[str, Any]:
    return {name: asdict(each) for name, each in spreads.items() if each is not None}


def attention_rates(device: torch.device, sizes: Sizes) -> dict[str, Measurement]:
    """Measure FLOPs for a chunk's own keys, in two causal squares, and for the keys before a chunk, in both directions.

    A chunk at the end of a long sequence has as many queries as the two squares, so their diagonals take the same: what
    it takes beyond them is due to the keys that it sees beyond theirs, a few of its own and all that were before it.
    """
    tokens, half = sizes.tokens, sizes.square_tokens
    for _ in range(TRIES):
        timed = (
            _attention_seconds([Segment(0, half, 0, 0), Segment(half, tokens, half, half)], device, sizes),
            _attention_seconds([Segment(0, tokens, 0, sizes.past)], device, sizes),
        )
        if all(_mean(short) < _mean(long) for short, long in zip(*timed, strict=True)):
            break
    else:
        raise RuntimeError("attention to more keys took no longer: other work disturbs the probe, run it again")
    causal = 4.0 * tokens * (half / 2) * sizes.heads * sizes.head_dim
    beyond = 4.0 * tokens * (sizes.past + tokens / 2) * sizes.heads * sizes.head_dim - causal
    rates = {}
    for direction, factor, short, long in zip(("forward", "backward"), (1.0, BACKWARD_ATTENTION), *timed, strict=True):
        rates[f"attention_{direction}_tflops"] = Measurement(factor * causal, short)
        usual = _mean(short)
        rates[f"past_attention_{direction}_tflops"] = Measurement(factor * beyond, tuple(s - usual for s in long))
    return rates


def _attention_seconds(
    segments: list[Segment], device: torch.device, sizes: Sizes
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of each of a chunk's forwards and backwards, as a layer computes it."""
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
    return repeat_calls(forward, device, duration, 1).seconds, repeat_calls(backward, device, duration, 1).seconds


def memory_rate(device: torch.device, sizes: Sizes) -> Measurement:
    """Measure bytes, read and written, of a copy within the device."""
    source = _random(device, torch.float32, sizes.copied // 4)
    target = torch.empty_like(source)
    return repeat_calls(lambda: target.copy_(source), device, sizes.seconds / 6, 2.0 * sizes.copied)


def link_rates(device: torch.device, sizes: Sizes) -> dict[str, Measurement]:
    """Measure bytes between pinned host memory and the device: in, out, and per direction when both are busy."""
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
    return {name: repeat_calls(copies, device, duration, sizes.copied) for name, copies in ways.items()}


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def _random(device: torch.device, dtype: torch.dtype, numel: int) -> Tensor:
    return torch.randn(numel, device=device, dtype=dtype)


def _matrix(flat: Tensor, rows: int, columns: int) -> Tensor:
    return flat[: rows * columns].view(rows, columns)


def _say(line: str) -> None:
    print(f"probe: {line}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Measure the named device; a failure is one line."""
    device = torch.device(arguments[0] if arguments else "cpu")
    shapes = [(rows, m, k) for rows, m, k in json.loads(arguments[1])] if len(arguments) > 1 else []
    disk = Path(arguments[2]) if len(arguments) > 2 else None
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            rates = measure(device, ON_GPU if device.type == "cuda" else ON_CPU, shapes, disk)
    except (RuntimeError, ImportError, LaunchError) as error:  # out of memory, no driver, no kernel; a full disk
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
