"""Per-tensor scales of fp8 tensors, from the largest magnitudes (amax) of previous steps or of the tensor itself.

    scales = DelayedScaling({"layers.3.x1": E4M3, "layers.3.dqkv": E5M2}, device)        # or CurrentScaling
    (scale_amax,) = scales.scale_amax_of("layers.3.x1", measure=lambda scale_amax: quantize_fp8(x_NK, scale_amax))
    quantize_fp8(x_NK, scale_amax, rows_NK, columns_KP)
    scales.update()                                     # once a step

`DelayedScaling` keeps an amax history in one tensor on the device and computes scales there, without synchronizing with
the host. Only the first tensor of a name is measured beforehand, in a pass of its own. `CurrentScaling` measures every
tensor so, and keeps nothing.

Ranks that share a tensor get the scales of one process: `reduce_max` replaces amaxes by their maximum over these ranks,
with an all-reduce. Delayed scaling calls it once a step, and for each new name. In the first step one process measures
its first micro-batch, several replicas the first of each; from the second step on all micro-batches of the previous
steps count, and scales no longer depend on the layout. Current scaling calls it at each use.

`state_dict` and `load_state_dict` are for checkpoints. A name has one tensor there, the same on all ranks that share
it, and any other layout that knows the name can load it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llmb.ops.quant.activation_quant import MIN_AMAX
from llmb.ops.quant.fp8_quant import ScaleAmax

HISTORY_STEPS = 16
SCALE_STRIDE = 4  # elements from one scale to the next: GEMMs take only scales aligned to 16 bytes
MARGIN = 2.0  # how much a tensor may grow beyond its history before values are clamped; one bit of range

ReduceMax = Callable[[Tensor], object]  # replaces the integers of a tensor by their maximum over ranks, in place


class DelayedScaling:
    """Scales and amax history of named tensors, each with its fp8 dtype."""

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        reduce_max: ReduceMax | None = None,
        steps: int = HISTORY_STEPS,
    ):
        count, factors = len(dtypes), [MARGIN / torch.finfo(dtype).max for dtype in dtypes.values()]
        self._index = {name: index for index, name in enumerate(dtypes)}
        self._factors_T = torch.empty(count, device=device)
        for element, factor in zip(self._factors_T, factors, strict=True):
            element.fill_(factor)
        self._scales_T = torch.ones(count, SCALE_STRIDE, device=device)[:, 0]
        self._amax_T = torch.zeros(count, device=device)
        self._history_HT, self._next = torch.zeros(steps, count, device=device), 0
        self._scale_amax = [ScaleAmax(*pair) for pair in zip(self._scales_T, self._amax_T, strict=True)]
        self._measured: set[str] = set()
        self._reduce_max = reduce_max

    def scale_amax_of(self, *names: str, measure: Callable[..., None]) -> tuple[ScaleAmax, ...]:
        """Return scale and amax of the tensors; `measure` updates amax from them, and is called for new names.

        A name has one scale within a step, so recomputation gives the same values.
        """
        scale_amax = tuple(self._scale_amax[self._index[name]] for name in names)
        new = [self._index[name] for name in names if name not in self._measured]
        if new:
            measure(*scale_amax)
            amax_N = torch.stack([self._amax_T[index] for index in new])
            reduce_amax(amax_N, self._reduce_max)
            for index, amax in zip(new, amax_N, strict=True):
                self._scales_T[index].copy_(_delayed_scales(amax, self._factors_T[index]))
            self._measured.update(names)
        return scale_amax

    def update(self) -> None:
        """End a step: add its amax, over all ranks, to the history and compute the next scales."""
        reduce_amax(self._amax_T, self._reduce_max)
        self._history_HT[self._next].copy_(self._amax_T)
        self._next = (self._next + 1) % len(self._history_HT)
        self._amax_T.zero_()
        self._scales_T.copy_(_delayed_scales(self._history_HT.amax(0), self._factors_T))

    def restart_step(self) -> None:
        """Forget the amaxes of this step, which is repeated."""
        self._amax_T.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return for each name its scale, 0 if not measured yet, its amax in this step and the history, oldest first.

        A collective: the amax is that of all ranks.
        """
        reduce_amax(self._amax_T, self._reduce_max)
        history_HT = self._history_HT.roll(-self._next, 0)
        state = {}
        for name, index in self._index.items():
            scale = self._scales_T[index] if name in self._measured else self._scales_T.new_zeros(())
            state[name] = torch.stack((scale, self._amax_T[index], *history_HT[:, index]))
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the names that `state` has; others are measured anew, and names of other layouts ignored."""
        self._next = 0
        self._measured.clear()
        for name in self._index.keys() & state.keys():
            index, scale = self._index[name], state[name][0].item()
            if scale != 0:
                self._measured.add(name)
                self._scales_T[index] = scale
            self._amax_T[index].copy_(state[name][1])
            self._history_HT[:, index].copy_(state[name][2:])


class CurrentScaling:
    """Scales from the tensors themselves, at each use; the methods are those of `DelayedScaling`."""

    def __init__(self, dtypes: Mapping[str, torch.dtype], device: torch.device, reduce_max: ReduceMax | None = None):
        self._factors = {name: 1 / torch.finfo(dtype).max for name, dtype in dtypes.items()}
        self._unit_scale = torch.ones((), device=device)  # for `measure`, which only wants the amax
        self._reduce_max = reduce_max

    def scale_amax_of(self, *names: str, measure: Callable[..., None]) -> tuple[ScaleAmax, ...]:
        """Return the scales of the tensors that `measure` reads; there is no amax to update."""
        amax_N = self._unit_scale.new_zeros(len(names))
        measure(*(ScaleAmax(self._unit_scale, amax) for amax in amax_N))
        reduce_amax(amax_N, self._reduce_max)
        scales_N = amax_N.new_empty(len(names), SCALE_STRIDE)[:, 0]
        for name, amax, scale in zip(names, amax_N, scales_N, strict=True):
            torch.mul(amax.clamp(min=MIN_AMAX), self._factors[name], out=scale)
        return tuple(ScaleAmax(scale, None) for scale in scales_N)

    def update(self) -> None:
        """End a step, of which nothing is kept."""

    def restart_step(self) -> None:
        """Begin a step again, of which nothing was kept."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Ignore the state of a run with delayed scaling."""


Scaling = DelayedScaling | CurrentScaling
SCALINGS: dict[str, type[Scaling]] = {  # by fp8_recipe of a run
    "tensorwise_delayed": DelayedScaling,
    "tensorwise_current": CurrentScaling,
}


def reduce_amax(amax_T: Tensor, reduce_max: ReduceMax | None) -> None:
    """Replace amaxes by their maximum over ranks: as integers of the same bits, which have their order, NaN last."""
    if reduce_max is not None:
        reduce_max(amax_T.view(torch.int32))


def _delayed_scales(amax_T: Tensor, factors_T: Tensor) -> Tensor:
    """A tensor of zeros tells nothing about the next steps: its scale is 1."""
    return (amax_T.clamp(min=MIN_AMAX) * factors_T).masked_fill_(amax_T == 0, 1.0)
