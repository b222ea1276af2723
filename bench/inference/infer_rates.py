"""Rates of the device, measured in the process that measures the engine: bandwidth, and FLOP/s of GEMMs.

Each is kept up for about a second on random data, as clocks fall under load and zeros would save power. A product is
that of one layer after the other, so that weights come from memory and not from a cache, in a CUDA graph: launched one
by one, small GEMMs would be bound by the host, and a ceiling would depend on it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure.device_timer import captured, copy_bandwidth, time_sustained
from measure.scaled_product import scaled_product
from torch import Tensor

from inference.infer_ceilings import product_shapes
from llmb.config.model import Model
from llmb.ops.quant.activation_quant import E4M3

BLOCKWISE = "fp8 blockwise"  # a scale per 128 inputs of a token, and per 128 x 128 of a weight


def bandwidths(device: torch.device, size: int, seconds: float) -> dict[str, float]:
    """bytes/s of a copy (read and written bytes counted), of a sum and of a dot product over fp32 numbers."""
    copied = copy_bandwidth(device, size, seconds)
    values = torch.randn(size // 4, device=device)
    first, second = values.chunk(2)
    return {
        "copy": copied,
        "sum": values.nbytes / time_sustained(values.sum, device, seconds),
        "dot": values.nbytes / time_sustained(lambda: torch.dot(first, second), device, seconds),
    }


def products_rate(model: Model, tokens: int, dtype: str, device: torch.device, seconds: float) -> float:
    """FLOP/s of the products of a dense layer."""
    return _rate(product_shapes(model), tokens, dtype, device, seconds)


def head_rate(model: Model, rows: int, device: torch.device, seconds: float) -> float:
    """FLOP/s of the head, which is in bf16."""
    return _rate([(model.vocab, model.hidden)], rows, "bf16", device, seconds)


def _rate(shapes: list[tuple[int, int]], tokens: int, dtype: str, device: torch.device, seconds: float) -> float:
    operands = [_operands(tokens, *shape, dtype, device) for shape in shapes]

    def layer() -> None:
        for product in operands:
            product()

    flops = 2.0 * tokens * sum(outputs * inputs for outputs, inputs in shapes)
    return flops / time_sustained(captured(layer, device), device, seconds)


def _operands(tokens: int, outputs: int, inputs: int, dtype: str, device: torch.device) -> Callable[[], Tensor]:
    """A product of random matrices, ready to be computed."""
    x_NK = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    w_OK = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    if not dtype.startswith("fp8") or device.type != "cuda":  # a CPU has no fp8 GEMM: a smoke run uses bf16
        return lambda: F.linear(x_NK, w_OK)
    x8_NK, w8_OK = x_NK.to(E4M3), w_OK.to(E4M3)
    if dtype == BLOCKWISE:
        return scaled_product(x8_NK, w8_OK, "blockwise")
    scales_N1 = torch.rand(tokens, 1, device=device) + 0.5
    scales_1O = torch.rand(1, outputs, device=device) + 0.5
    return lambda: torch._scaled_mm(x8_NK, w8_OK.T, scales_N1, scales_1O, out_dtype=torch.bfloat16, use_fast_accum=True)
