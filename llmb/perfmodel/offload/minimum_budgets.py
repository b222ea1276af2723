"""Minimum budgets with which a plan would fit, for a one-line refusal."""

from collections.abc import Callable
from typing import Protocol

MAX_GIB = 1 << 20


class Fits(Protocol):
    """Whether budgets in GiB suffice; without `disk_gib` that of the run."""

    def __call__(self, host_gib: float, device_gib: float, disk_gib: float = ..., /) -> bool: ...


def minimum_budgets(fits: Fits, host_gib: float, device_gib: float, disk_gib: float = 0.0) -> str:
    """Return what each side needs with the others as given; where that does not help, what host and device need."""
    host = _minimum(lambda gib: fits(gib, device_gib))
    device = _minimum(lambda gib: fits(host_gib, gib))
    options = []
    if host is not None:
        options.append(f"with {device_gib:g} GiB on the device it needs {host} GiB on the host")
    if device is not None:
        options.append(f"with {host_gib:g} GiB on the host it needs {device} GiB on the device")
    disk = _minimum(lambda gib: fits(host_gib, device_gib, gib)) if disk_gib else None
    if disk is not None:
        options.append(f"with both as they are it needs {disk} GiB on disk")
    if not options:
        least = _minimum(lambda gib: fits(MAX_GIB, gib))
        if least is None:
            return "no budgets suffice with the other settings as they are"
        options.append(
            f"it needs {_minimum(lambda gib: fits(gib, least))} GiB on the host and {least} GiB on the device"
        )
    return "; ".join(options)


def _minimum(fits: Callable[[float], bool]) -> int | None:
    """Return the least integer of GiB that fits; none where even the maximum does not."""
    low, high = 0, 1
    while not fits(high):
        low, high = high, 2 * high
        if high > MAX_GIB:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
