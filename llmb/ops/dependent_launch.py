"""Programmatic dependent launch (PDL): a kernel's programs may start while the previous kernel still runs.

A chain of small kernels then has no gaps between them. Every kernel launched so calls `pdl_wait` where it first needs
the output of previous kernels; until then it may read tensors that no kernel writes, such as weights.

Large kernels gain nothing and would only have the programs of their successor occupy SMs: see `pdl_options`.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from llmb.ops.device_capabilities import capabilities
from llmb.ops.dispatch import INTERPRETED

MAX_TOKENS = 16  # of a step whose kernels use PDL

if not INTERPRETED:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def pdl_wait(USE_PDL: tl.constexpr):
        """Let the next kernel's programs start, and wait for the memory of previous kernels."""
        if USE_PDL:
            gdc_launch_dependents()
            gdc_wait()
else:  # the interpreter runs one kernel after the other

    @triton.jit
    def pdl_wait(USE_PDL: tl.constexpr):
        pass


@cache
def _has_pdl() -> bool:
    """Return whether the GPUs of this process have PDL; ranks of a machine have GPUs of one type."""
    return torch.cuda.is_available() and capabilities(torch.device("cuda", torch.cuda.current_device())).has("pdl")


def pdl_options(tokens: int, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """Return the launch arguments for a step with this many tokens: PDL if it is small."""
    if INTERPRETED or tokens > max_tokens or not _has_pdl():
        return {"USE_PDL": False}
    return {"USE_PDL": True, "launch_pdl": True}
