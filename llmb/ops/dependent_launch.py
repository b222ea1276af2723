"""Programmatic dependent launch: a kernel's programs may start while the kernel before it is still at work.

A chain of small kernels then has no pauses between them. Every kernel launched so says with `begins` where it first
needs what came before, and waits there; until then it may read what no kernel writes, such as weights.

Large kernels gain nothing and would only have their successor's programs waiting on the processors: see `dependent`.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from llmb.ops.dispatch import INTERPRETED

SMALL = 16  # tokens of a step whose kernels are launched so

if not INTERPRETED:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def begins(DEPENDENT: tl.constexpr):
        """What the kernels before have written is needed from here on; the next kernel's programs may start."""
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
else:  # the interpreter runs one kernel after the other

    @triton.jit
    def begins(DEPENDENT: tl.constexpr):
        pass


@cache
def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def dependent(tokens: int, small: int = SMALL) -> dict[str, Any]:
    """What a launch for so many tokens is given: whether the kernel waits by itself, and that it may start early."""
    if INTERPRETED or tokens > small or not _hopper():
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
