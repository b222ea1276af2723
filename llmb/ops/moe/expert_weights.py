"""One matrix of every expert, stacked, as plain numbers or rounded to one of the formats that products know.

    stack = empty_stack((experts, outputs, inputs), "groups8", torch.bfloat16, device)
    fill_rows(stack, expert, 0, weight_OI)

Filled matrix by matrix, so that only one of them need be there unrounded.

Shapes: E experts, O outputs and I inputs of a matrix.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import Blocks8, from_blocks, in_blocks
from llmb.ops.quant.activation_quant import E4M3, GROUP, Form, Rows8, in_form, in_form_reference
from llmb.ops.quant.nvfp4 import NVFP4_GROUP, Nvfp4, from_nvfp4, in_nvfp4

# Named by the form of the activations that they meet, but for 4 bits, which meet plain ones.
Kind = Literal["plain", "rows8", "groups8", "nvfp4"]


class Stacked(NamedTuple):
    """The matrices of all experts of this rank."""

    kind: Kind
    values: Tensor  # [E, O, I]; two to a byte for nvfp4: [E, O, I / 2]
    scales: Tensor | None = None  # rows8: [E, O] fp32; groups8: [E, O / 128, I / 128] fp32; nvfp4: [E, O, I / 16] e4m3
    factors: Tensor | None = None  # nvfp4: [E, O] fp32, the scale of the matrix that an output is of

    @property
    def form(self) -> Form:
        """The form of the activations that it meets."""
        return "plain" if self.kind == "nvfp4" else self.kind

    @property
    def inputs(self) -> int:
        return self.values.shape[2] * (2 if self.kind == "nvfp4" else 1)


def empty_stack(shape: tuple[int, int, int], kind: Kind, dtype: torch.dtype, device: torch.device) -> Stacked:
    """Room for matrices of [E, O, I]; `dtype` is that of plain ones. Blocks and groups must be whole."""
    experts, outputs, inputs = shape

    def room(dtype: torch.dtype, *size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    if kind == "plain":
        return Stacked(kind, room(dtype, *shape))
    if kind == "rows8":
        return Stacked(kind, room(E4M3, *shape), room(torch.float32, experts, outputs))
    if kind == "groups8":
        assert outputs % GROUP == inputs % GROUP == 0
        scales = room(torch.float32, experts, outputs // GROUP, inputs // GROUP)
        return Stacked(kind, room(E4M3, *shape), scales)
    assert inputs % NVFP4_GROUP == 0
    packed, scales = (
        room(torch.uint8, experts, outputs, inputs // 2),
        room(E4M3, experts, outputs, inputs // NVFP4_GROUP),
    )
    return Stacked(kind, packed, scales, room(torch.float32, experts, outputs))


def fill_rows(stack: Stacked, expert: int, start: int, weight_OI: Tensor, alike: bool = False) -> None:
    """Round a matrix into an expert's outputs from `start` on; `alike`: outputs that have scales have the same."""
    rows = slice(start, start + len(weight_OI))
    if stack.scales is None:
        stack.values[expert, rows] = weight_OI
    elif stack.kind == "rows8":
        rounded = in_form_reference(weight_OI.reshape(1, -1), "rows8") if alike else in_form(weight_OI, "rows8")
        assert isinstance(rounded, Rows8)
        stack.values[expert, rows] = rounded.values.view(weight_OI.shape)
        stack.scales[expert, rows] = rounded.scales.squeeze(-1)
    elif stack.kind == "groups8":
        blocks = in_blocks(weight_OI)
        stack.values[expert, rows] = blocks.values
        stack.scales[expert, start // GROUP : rows.stop // GROUP] = blocks.scales[:, : stack.scales.shape[-1]]
    else:
        assert stack.factors is not None
        stored = in_nvfp4(weight_OI)
        stack.values[expert, rows], stack.scales[expert, rows] = stored.packed, stored.scales
        stack.factors[expert, rows] = stored.scale


def plain_matrix(stack: Stacked, expert: int) -> Tensor:
    """One expert's matrix, in fp32: the numbers that its bits stand for."""
    values = stack.values[expert]
    if stack.scales is None:
        return values.float()
    scales = stack.scales[expert]
    if stack.kind == "rows8":
        return values.float() * scales[:, None]
    if stack.kind == "groups8":
        return from_blocks(Blocks8(values, scales), len(values))
    assert stack.factors is not None
    return from_nvfp4(Nvfp4(values, scales, stack.factors[expert, :, None]))
