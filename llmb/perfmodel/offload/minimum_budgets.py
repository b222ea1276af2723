"""The smallest budgets that would do, for one line that says so."""

from collections.abc import Callable

MOST_GIB = 1 << 20

Fits = Callable[[float, float], bool]  # GiB of the host and of the device


def smallest_budgets(fits: Fits, host_gib: float, device_gib: float) -> str:
    """What each side needs beside the other as it is given; where that does not help, what both need."""
    host = _smallest(lambda gib: fits(gib, device_gib))
    device = _smallest(lambda gib: fits(host_gib, gib))
    ways = []
    if host is not None:
        ways.append(f"beside {device_gib:g} GiB on the device it needs {host} GiB on the host")
    if device is not None:
        ways.append(f"beside {host_gib:g} GiB on the host it needs {device} GiB on the device")
    if not ways:
        least = _smallest(lambda gib: fits(MOST_GIB, gib))
        if least is None:
            return "no budgets would do with the other settings as they are"
        ways.append(f"it needs {_smallest(lambda gib: fits(gib, least))} GiB on the host and {least} GiB on the device")
    return "; ".join(ways)


def _smallest(fits: Callable[[float], bool]) -> int | None:
    """The least whole number of GiB that fits; none where even the most does not."""
    low, high = 0, 1
    while not fits(high):
        low, high = high, 2 * high
        if high > MOST_GIB:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
