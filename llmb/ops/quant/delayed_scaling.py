"""Scales of 8-bit tensors, known before the tensors are: from the largest magnitudes that they had in the last steps.

    scales = Scales({"x": E4M3, "dx": E5M2}, device)
    (gauge,) = scales.gauges("x", look=lambda gauge: cast_both(x_NK, gauge))
    cast_both(x_NK, gauge, rows_NK, columns_KP)
    scales.roll()                                       # once a step

All magnitudes lie in one tensor on the device and become scales there; the host waits for nothing. Only the first
tensor of a name is looked at beforehand, in a pass of its own. `kept` and `restore` take all of this through a pause.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from llmb.ops.quant.activation_quant import SMALLEST_AMAX
from llmb.ops.quant.fp8_quant import Gauge

STEPS = 16  # that are remembered
APART = 4  # numbers from one scale to the next: products take only scales that begin at multiples of 16 bytes
MARGIN = 2.0  # how much a tensor may grow beyond all of them before anything is clamped; one bit of range

Name = TypeVar("Name", bound=Hashable)


class Scales(Generic[Name]):
    """Of tensors that go by names, each with its format."""

    def __init__(self, formats: Mapping[Name, torch.dtype], device: torch.device, steps: int = STEPS):
        count, largest = len(formats), [torch.finfo(dtype).max for dtype in formats.values()]
        self._places = {name: place for place, name in enumerate(formats)}
        self._factors_T = MARGIN / torch.tensor(largest, device=device)
        self._scales_T = torch.ones(count, APART, device=device)[:, 0]
        self._amax_T = torch.zeros(count, device=device)
        self._history_HT, self._turn = torch.zeros(steps, count, device=device), 0
        self._gauges = [Gauge(*cells) for cells in zip(self._scales_T, self._amax_T, strict=True)]
        self._known: set[Name] = set()

    def gauges(self, *names: Name, look: Callable[..., None]) -> tuple[Gauge, ...]:
        """The tensors' gauges; `look` has these find the magnitudes of now, and is called where none are known yet.

        All that comes under a name in a step has one scale, so that what is computed again is the same again.
        """
        found = tuple(self._gauges[self._places[name]] for name in names)
        new = [self._places[name] for name in names if name not in self._known]
        if new:
            look(*found)
            for place in new:
                self._set(slice(place, place + 1), self._amax_T[place : place + 1])
            self._known.update(names)
        return found

    def roll(self) -> None:
        """A step is over: what it found counts for the next ones."""
        self._history_HT[self._turn].copy_(self._amax_T)
        self._turn = (self._turn + 1) % len(self._history_HT)
        self._amax_T.zero_()
        self._set(slice(None), self._history_HT.amax(0))

    def kept(self) -> dict[str, Tensor]:
        """Copies of all that decides the scales to come, the steps oldest first, names in the order of the formats."""
        return {
            "scale": self._scales_T.clone(memory_format=torch.contiguous_format),
            "amax": self._amax_T.clone(),
            "history": self._history_HT.roll(-self._turn, 0),
            "known": torch.tensor([name in self._known for name in self._places]),
        }

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """Go on as scales of the same formats would have that `kept` this."""
        for name, own in (("scale", self._scales_T), ("amax", self._amax_T), ("history", self._history_HT)):
            own.copy_(kept[name])
        self._turn = 0
        self._known = {name for name, known in zip(self._places, kept["known"].tolist(), strict=True) if known}

    def _set(self, some: slice, largest_T: Tensor) -> None:
        """A tensor that was all zeros says nothing of what comes: its scale is 1."""
        scales_T = largest_T.clamp(min=SMALLEST_AMAX) * self._factors_T[some]
        self._scales_T[some].copy_(scales_T.masked_fill_(largest_T == 0, 1.0))
