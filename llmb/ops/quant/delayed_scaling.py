"""Delayed scaling of fp8 tensors: scales come from the largest magnitudes (amax) of the previous steps.

    scales = DelayedScaling({"x": E4M3, "dx": E5M2}, device)
    (scale_amax,) = scales.scale_amax_of("x", measure=lambda scale_amax: quantize_fp8(x_NK, scale_amax))
    quantize_fp8(x_NK, scale_amax, rows_NK, columns_KP)
    scales.update()                                     # once a step

The amax history is one tensor on the device and becomes scales there, without synchronizing with the host. Only the
first tensor of a name is measured beforehand, in a pass of its own. `state_dict` and `load_state_dict` are for
checkpoints.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from llmb.ops.quant.activation_quant import MIN_AMAX
from llmb.ops.quant.fp8_quant import ScaleAmax

HISTORY_STEPS = 16
SCALE_STRIDE = 4  # elements from one scale to the next: GEMMs take only scales aligned to 16 bytes
MARGIN = 2.0  # how much a tensor may grow beyond its history before values are clamped; one bit of range

Name = TypeVar("Name", bound=Hashable)


class DelayedScaling(Generic[Name]):
    """Scales and amax history of named tensors, each with its fp8 dtype."""

    def __init__(self, dtypes: Mapping[Name, torch.dtype], device: torch.device, steps: int = HISTORY_STEPS):
        count, largest = len(dtypes), [torch.finfo(dtype).max for dtype in dtypes.values()]
        self._index = {name: index for index, name in enumerate(dtypes)}
        self._factors_T = MARGIN / torch.tensor(largest, device=device)
        self._scales_T = torch.ones(count, SCALE_STRIDE, device=device)[:, 0]
        self._amax_T = torch.zeros(count, device=device)
        self._history_HT, self._next = torch.zeros(steps, count, device=device), 0
        self._scale_amax = [ScaleAmax(*pair) for pair in zip(self._scales_T, self._amax_T, strict=True)]
        self._measured: set[Name] = set()

    def scale_amax_of(self, *names: Name, measure: Callable[..., None]) -> tuple[ScaleAmax, ...]:
        """Return scale and amax of the tensors; `measure` updates amax from them, and is called for new names.

        A name has one scale within a step, so recomputation gives the same values.
        """
        scale_amax = tuple(self._scale_amax[self._index[name]] for name in names)
        new = [self._index[name] for name in names if name not in self._measured]
        if new:
            measure(*scale_amax)
            for index in new:
                self._set_scales(slice(index, index + 1), self._amax_T[index : index + 1])
            self._measured.update(names)
        return scale_amax

    def update(self) -> None:
        """End a step: add its amax to the history and compute the next scales."""
        self._history_HT[self._next].copy_(self._amax_T)
        self._next = (self._next + 1) % len(self._history_HT)
        self._amax_T.zero_()
        self._set_scales(slice(None), self._history_HT.amax(0))

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all state, the history oldest first, names in the order of the dtypes."""
        return {
            "scale": self._scales_T.clone(memory_format=torch.contiguous_format),
            "amax": self._amax_T.clone(),
            "history": self._history_HT.roll(-self._next, 0),
            "known": torch.tensor([name in self._measured for name in self._index]),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of an instance with the same names and dtypes."""
        for name, tensor in (("scale", self._scales_T), ("amax", self._amax_T), ("history", self._history_HT)):
            tensor.copy_(state[name])
        self._next = 0
        measured = state["known"].tolist()
        self._measured = {name for name, seen in zip(self._index, measured, strict=True) if seen}

    def _set_scales(self, some: slice, amax_T: Tensor) -> None:
        """A tensor of zeros tells nothing about the next steps: its scale is 1."""
        scales_T = amax_T.clamp(min=MIN_AMAX) * self._factors_T[some]
        self._scales_T[some].copy_(scales_T.masked_fill_(amax_T == 0, 1.0))
