"""Part `rates` of `train_gpu.py`: sustained rates of libraries and memory, measured in the process that then trains.

All calls of a row take turns for some seconds, on random numbers, each as often as in a step: a chip that runs out of
power slows down, and what one call sees depends on the others. Each is timed by its own events, and its median counts.
Of cuBLAS's algorithms `llmb/ops/gemm/matmul.py` takes the fastest, of kernels of attention this program: torch's, and
FlashAttention 4 where it is installed, unless only torch's are asked for.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from math import inf
from statistics import median

import torch
import torch.nn.functional as F
from measure.device_timer import DeviceTimer, time_sustained
from measure.scaled_product import scaled_product
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmb.ops.attention.attention_block import AttentionBlock
from llmb.ops.attention.flash_attention_4 import FLASH4
from llmb.ops.attention.window_attention import window_attention
from llmb.ops.device_capabilities import capabilities
from llmb.ops.gemm.algorithm_trial import time_interleaved
from llmb.ops.gemm.matmul import matmul
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.blockwise_quant import grouped_tokens
from training.train_calls import AttentionCall, Call, GemmCall, MemoryCall, TimedCall

Candidate = Callable[[], object]
SETTLING = 1 / 3  # of a row's turns, which do not count
FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
E5M2 = torch.float8_e5m2


class RandomPool:
    """Random numbers of one format, from which operands of any shape are cut: random because zeros would save power."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def matrix(self, rows: int, columns: int) -> Tensor:
        if self._flat.numel() < rows * columns:
            values = torch.randn(rows * columns, device=self._device, dtype=torch.bfloat16)
            self._flat = values.to(self._dtype)
        return self._flat[: rows * columns].view(rows, columns)


class Operands:
    """Inputs, weights and gradients in separate memory, so that no call finds all of its operands in the cache."""

    def __init__(self, device: torch.device):
        self.device = device
        self.x, self.w, self.dy = (RandomPool(torch.bfloat16, device) for _ in range(3))
        self.x8, self.w8 = (RandomPool(E4M3, device) for _ in range(2))
        self.dy8 = RandomPool(E5M2, device)


def measured(
    calls: Mapping[Call, int], memory: float, device: torch.device, seconds: float, torch_only: bool = False
) -> dict[Call, float]:
    """Return the seconds of each call, interleaved in these proportions; memory calls by bytes over bandwidth."""
    operands = Operands(device)
    torch.manual_seed(0)
    seconds_by_call: dict[Call, float] = {call: call.bytes / memory for call in calls if isinstance(call, MemoryCall)}
    best = {call: fastest_call(call, operands, torch_only) for call in calls if not isinstance(call, MemoryCall)}
    return seconds_by_call | _time_interleaved_calls(best, calls, device, seconds)


def has_flash4(device: torch.device) -> bool:
    """Return whether FlashAttention 4 is among the libraries."""
    return capabilities(device).supports("flash_attention_4")


def fastest_call(call: TimedCall, operands: Operands, torch_only: bool = False) -> Candidate:
    """Return the fastest candidate for a call."""
    if isinstance(call, AttentionCall):
        candidates = _attention_ways(call, operands.device)
        if has_flash4(operands.device) and not torch_only:
            candidates.append(_flash4_way(call, operands.device))
        return _fastest(candidates, operands.device)
    if call.scales:
        return _scaled_way(call, operands)
    if call.dtype == "fp8" and operands.device.type == "cuda":
        return _fp8_way(call, operands)
    return _bf16_way(call, operands)  # a CPU has no fp8 GEMM: a smoke run uses bf16


def _bf16_way(call: GemmCall, operands: Operands) -> Candidate:
    n, m, k = call.rows, call.outputs, call.inputs
    x_NK, w_MK, dy_NM = operands.x.matrix(n, k), operands.w.matrix(m, k), operands.dy.matrix(n, m)
    match call.way:
        case "forward":
            return lambda: matmul(x_NK, w_MK.T)
        case "input gradient":
            return lambda: matmul(dy_NM, w_MK)
        case "weight gradient":
            return lambda: matmul(dy_NM.T, x_NK)


def _fp8_way(call: GemmCall, operands: Operands) -> Candidate:
    """One scale a tensor, with fast accumulation. The hardware wants both operands as rows of summands."""
    n, m, k = call.rows, call.outputs, call.inputs
    match call.way:
        case "forward":
            left, right = operands.x8.matrix(n, k), operands.w8.matrix(m, k)
        case "input gradient":
            left, right = operands.dy8.matrix(n, m), operands.w8.matrix(k, m)
        case "weight gradient":
            left, right = operands.dy8.matrix(m, n), operands.x8.matrix(k, n)
    scale = torch.ones((), device=operands.device)
    return lambda: matmul(left, right.T, dtype=torch.bfloat16, scales=(scale, scale), fast=True)


def _scaled_way(call: GemmCall, operands: Operands) -> Candidate:
    """The GEMM of a recipe with many scales, all of them e4m3."""
    n, m, k = call.rows, call.outputs, call.inputs
    x8, w8, blocks = operands.x8, operands.w8, call.way != "weight gradient"
    match call.way:
        case "forward":
            left, right = x8.matrix(n, k), w8.matrix(m, k)
        case "input gradient":
            left, right = x8.matrix(n, m), w8.matrix(k, m)
        case "weight gradient":
            tokens = grouped_tokens(n)  # padded
            left, right = x8.matrix(m, tokens), w8.matrix(k, tokens)
    return scaled_product(left, right, call.scales, blocks)


def _attention_ways(call: AttentionCall, device: torch.device) -> list[Candidate]:
    """Return torch's fused kernels that support the call.

    Of those only FlashAttention has a window, so the others compute a sequence with as many pairs.
    """
    q, k, v = _random_heads(call, call.causal_tokens, device)
    candidates = [] if call.window is None else [_windowed_way(call, call.window, device)]
    for backend in FUSED if device.type == "cuda" else (None,):
        with nullcontext() if backend is None else sdpa_kernel(backend):
            try:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=call.heads != call.kv_heads)
                dy = torch.randn_like(out)
                torch.autograd.grad(out, (q, k, v), dy, retain_graph=True)
            except RuntimeError:  # it does not take these sizes
                continue
        candidates.append(_backward(out, (q, k, v), dy) if call.backward else _forward(call, (q, k, v), backend))
    if not candidates:
        raise RuntimeError(f"no fused kernel takes {call}")
    return candidates


def _random_heads(call: AttentionCall, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v; tokens before heads in memory, as projections write them."""
    q, k, v = (
        torch.randn(call.sequences, tokens, heads, width, device=device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads, width in ((call.heads, call.key), (call.kv_heads, call.key), (call.kv_heads, call.value))
    )
    return q, k, v


def _windowed_way(call: AttentionCall, window: int, device: torch.device) -> Candidate:
    inputs = _random_heads(call, call.seqlen, device)
    attend = partial(window_attention, *inputs, call.key**-0.5, window)
    if call.backward:
        out = attend()
        return _backward(out, inputs, torch.randn_like(out))
    return torch.no_grad()(attend)


def _flash4_way(call: AttentionCall, device: torch.device) -> Candidate:
    q, k, v = (x.detach().transpose(1, 2).flatten(0, 1) for x in _random_heads(call, call.seqlen, device))
    block = AttentionBlock(q, k, v, call.sequences * (call.seqlen,), True, call.key**-0.5, call.window)
    if not call.backward:
        return lambda: FLASH4.forward(block)
    out, lse = FLASH4.forward(block)
    dout = torch.randn_like(out)
    return lambda: FLASH4.backward(dout, block, out, lse)


def _forward(call: AttentionCall, inputs: tuple[Tensor, Tensor, Tensor], backend: SDPBackend | None) -> Candidate:
    grouped = call.heads != call.kv_heads

    def attend() -> None:
        with torch.no_grad(), nullcontext() if backend is None else sdpa_kernel(backend):
            F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)

    return attend


def _backward(out: Tensor, inputs: tuple[Tensor, ...], dy: Tensor) -> Candidate:
    return lambda: torch.autograd.grad(out, inputs, dy, retain_graph=True)


def _fastest(candidates: list[Candidate], device: torch.device) -> Candidate:
    def seconds(candidate: Candidate) -> float:
        try:
            return time_sustained(candidate, device, 0.0)
        except RuntimeError:  # it does not take these formats
            return inf

    return candidates[0] if len(candidates) == 1 else min(candidates, key=seconds)


def _time_interleaved_calls(
    best: dict[TimedCall, Candidate], often: Mapping[Call, int], device: torch.device, seconds: float
) -> dict[Call, float]:
    """The median of each when all follow one another for so long, as often as in a step."""
    most = max((often[call] for call in best), default=1)
    every = {call: max(1, round(most / often[call])) for call in best}
    times: dict[TimedCall, list[float]] = {call: [] for call in best}
    began, number = time.perf_counter(), 0
    while not all(times.values()) or time.perf_counter() - began < seconds:
        settled = time.perf_counter() - began >= SETTLING * seconds
        seconds_by_call = _round({call: make for call, make in best.items() if number % every[call] == 0}, device)
        number += 1
        for call, spent in seconds_by_call.items() if settled else ():
            times[call].append(spent)
    return {call: median(seconds_by_call) for call, seconds_by_call in times.items()}


def _round(best: dict[TimedCall, Candidate], device: torch.device) -> dict[TimedCall, float]:
    """Seconds of each call, once."""
    if device.type != "cuda":
        return {call: _timed(make, device) for call, make in best.items()}
    return {call: spent / 1000 for call, spent in zip(best, time_interleaved(list(best.values())), strict=True)}


def _timed(make: Candidate, device: torch.device) -> float:
    watch = DeviceTimer(device)
    watch.start()
    make()
    return watch.stop()
