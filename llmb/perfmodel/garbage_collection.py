"""Pause of the cyclic garbage collector while many objects are built.

It would look through all of them again and again: a quarter of the time of a plan search.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause it inside the context, or in a function that this decorates."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
