"""Combinations of settings of which `make test` takes a diagonal and `make test-all` the rest.

    @pytest.mark.parametrize(("dtype", "layout"), by_turns(("fp32", "bf16", "fp8"), ("dp 2", "one process")))

Each setting of every axis is tested by day, with settings of the other axes that take turns.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def by_turns(*axes: Iterable[Any], period: int = 2, name: Callable[[Any], str] | None = None) -> list[Any]:
    """Return the product of the axes as parameters, nightly but for one combination in `period`."""
    return [
        pytest.param(
            *(setting for _, setting in combination),
            id=None if name is None else "-".join(name(setting) for _, setting in combination),
            marks=[] if sum(index for index, _ in combination) % period == 0 else [pytest.mark.nightly],
        )
        for combination in product(*(list(enumerate(axis)) for axis in axes))
    ]
