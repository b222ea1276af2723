"""Gated MLPs of many experts, each token through the few that its router chose: weighted sums, [N, C].

    y_NC = routed_mlp(x, Visits(weights_NK, chosen_NK, experts=256), both, down, "silu", torch.bfloat16)

A visit is one token at one expert. This rank may have only some of the experts, `first` on: visits to the others add
nothing here. Nothing is read on the host and every shape follows from N, so a step can be captured in a CUDA graph; a
token's visits are added in their own order, so equal inputs give equal bits.

Shapes: N tokens, K visits a token, E experts of this rank, C hidden width, F an expert's width, O outputs and I inputs
of one matrix.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.kernels.forms import E4M3, GROUP, Activation, Form, Rows8, as_plain, in_form
from llmb.kernels.fp8_block import in_blocks
from llmb.kernels.gated import gated_reference
from llmb.kernels.triton_device import takes_triton


class Visits(NamedTuple):
    """Where each token goes and what comes of it; experts are counted over all ranks."""

    weights_NK: Tensor  # fp32
    chosen_NK: Tensor  # int64
    experts: int  # of all ranks
    first: int = 0  # the first of this rank


class Stacked(NamedTuple):
    """One matrix of every expert, as plain numbers or in 8 bits."""

    values: Tensor  # [E, O, I]
    scales: Tensor | None = None  # fp32: [E, O], of each output; or [E, O / 128, I / 128], of each block

    @property
    def form(self) -> Form:
        """The form of the activations that it meets."""
        if self.scales is None:
            return "plain"
        return "rows8" if self.scales.dim() == 2 else "groups8"


def empty_stack(shape: tuple[int, int, int], form: Form, dtype: torch.dtype, device: torch.device) -> Stacked:
    """Room for the matrices that meet activations of a form; `dtype` is that of plain ones. Blocks must be whole."""
    experts, outputs, inputs = shape
    if form == "plain":
        return Stacked(torch.empty(shape, dtype=dtype, device=device))
    assert form != "groups8" or outputs % GROUP == inputs % GROUP == 0
    scales = (experts, outputs) if form == "rows8" else (experts, outputs // GROUP, inputs // GROUP)
    return Stacked(
        torch.empty(shape, dtype=E4M3, device=device), torch.empty(scales, dtype=torch.float32, device=device)
    )


def fill_rows(stack: Stacked, expert: int, start: int, weight_OI: Tensor, alike: bool = False) -> None:
    """Round a matrix into an expert's outputs from `start` on; `alike`: the scales of its outputs are the same."""
    rows = slice(start, start + len(weight_OI))
    if stack.scales is None:
        stack.values[expert, rows] = weight_OI
    elif stack.form == "rows8":
        rounded = in_form(weight_OI.reshape(1, -1) if alike else weight_OI, "rows8")
        assert isinstance(rounded, Rows8)
        stack.values[expert, rows] = rounded.values.view(weight_OI.shape)
        stack.scales[expert, rows] = rounded.scales.squeeze(-1)
    else:
        blocks = slice(start // GROUP, rows.stop // GROUP)
        made = in_blocks(weight_OI)
        stack.values[expert, rows] = made.values
        stack.scales[expert, blocks] = made.scales[:, : stack.scales.shape[-1]]


def plain_matrix(stack: Stacked, expert: int) -> Tensor:
    """One expert's matrix, in fp32: the numbers that its bits stand for."""
    values_OI = stack.values[expert].float()
    if stack.scales is None:
        return values_OI
    scales = stack.scales[expert]
    if stack.form == "rows8":
        return values_OI * scales[:, None]
    return values_OI * scales.repeat_interleave(GROUP, dim=0).repeat_interleave(GROUP, dim=1)


def routed_mlp_reference(
    x: Activation, visits: Visits, both: Stacked, down: Stacked, activation: str, dtype: torch.dtype
) -> Tensor:
    """Expert by expert in plain torch; reads on the host who visits whom."""
    x_NC, (tokens, top_k) = as_plain(x, torch.float32), visits.chosen_NK.shape
    answers_MC = torch.zeros(tokens * top_k, x_NC.shape[1], dtype=dtype, device=x_NC.device)
    for expert in range(len(both.values)):
        here_V = (visits.chosen_NK.flatten() == visits.first + expert).nonzero().squeeze(-1)
        both_V2F = F.linear(x_NC[here_V // top_k], plain_matrix(both, expert)).to(dtype)
        hidden_VF = as_plain(gated_reference(both_V2F, activation, down.form), torch.float32)
        answer_VC = F.linear(hidden_VF, plain_matrix(down, expert))
        answers_MC[here_V] = (answer_VC * visits.weights_NK.flatten()[here_V, None]).to(dtype)
    return answers_MC.unflatten(0, (tokens, top_k)).sum(dim=1, dtype=torch.float32).to(dtype)


def routed_mlp(
    x: Activation, visits: Visits, both: Stacked, down: Stacked, activation: str, dtype: torch.dtype
) -> Tensor:
    """Every token's visits to this rank's experts, added up. `both` has gate's outputs first, then up's."""
    if takes_triton(visits.chosen_NK):
        from llmb.kernels.routed_triton import routed_mlp_triton

        return routed_mlp_triton(x, visits, both, down, activation, dtype)
    return routed_mlp_reference(x, visits, both, down, activation, dtype)
