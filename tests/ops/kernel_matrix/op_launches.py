"""Launches of ops by themselves: the cases of tests/ops/op_cases, on the meta device, and blocks of attention."""

import re
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
from op_cases import OpCase, all_cases
from op_comparison import run
from torch import Tensor
from torch.fx.experimental import _config

from kernel_matrix.gpu_families import MIN_FP8
from kernel_matrix.launch_recorder import LaunchRecorder
from llmb.ops.attention.attention_block import AttentionBlock
from llmb.ops.gemm.split_k_gemm import takes_split_k_gemm
from llmb.ops.softcap.softcap_block_triton import SOFTCAP

META = torch.device("meta")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GUARDS: dict[str, Callable[..., bool]] = {  # what callers ask before they take an op
    "gemm.split_k_gemm.split_k_gemm": lambda x, *_arguments: takes_split_k_gemm(x),
}


def launch_op_cases(recorder: LaunchRecorder, full_size: bool, pattern: str = "") -> None:
    """Call the kernel of each case whose id has the pattern, and its backward pass where it has one."""
    # What arguments of cases are built with, and the meta device lacks: sizes that follow from numbers.
    all_nonzero = patch.object(_config, "meta_nonzero_assume_all_nonzero", True)
    with all_nonzero, patch.object(Tensor, "bincount", _bincount):
        for case in all_cases(full_size):
            if re.search(pattern, case.id):
                _launch_case(recorder, case)


def _launch_case(recorder: LaunchRecorder, case: OpCase) -> None:
    recorder.step, first = case.id, len(recorder.launches)
    arguments = case.arguments(META)
    recorder.forget(first)  # what builds arguments is not the op
    if case.op.name in GUARDS and not GUARDS[case.op.name](*arguments[0]):
        return
    values = dict(run(replace(case, build=lambda *_params: arguments), META, kernel=True)).values()
    if recorder.target < MIN_FP8 and any(isinstance(x, Tensor) and x.dtype in FP8 for x in values):
        recorder.forget(first)  # no run gets that far: `check_dtypes`


def launch_softcap_block(recorder: LaunchRecorder) -> None:
    """Attend to all keys of another rank, as context parallelism does, with the heads of Gemma 2."""
    recorder.step = "softcap_block-gemma-2-9b"
    queries, keys, dtype = 4096, 4096, torch.bfloat16
    q, k, v = (
        torch.empty(n, heads, 256, dtype=dtype, device=META) for n, heads in ((queries, 16), (keys, 8), (keys, 8))
    )
    block = AttentionBlock(q, k, v, (queries,), False, 256**-0.5, None, 50.0)
    out, lse = SOFTCAP.forward(block)
    SOFTCAP.backward(torch.empty_like(out), block, out, lse)


def _bincount(tensor: Tensor, *, minlength: int) -> Tensor:
    return tensor.new_empty(minlength, dtype=torch.int64)
