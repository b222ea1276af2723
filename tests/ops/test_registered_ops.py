"""Every registered op: its Triton kernel agrees with its reference in outputs, written arguments and gradients."""

import inspect

import pytest
import torch
from op_cases import OpCase, all_cases
from op_comparison import compare_implementations

from llmb.ops.dispatch import registered

pytest.importorskip("triton")
CASES = all_cases(full_size=False)


@pytest.mark.parametrize("name", sorted(registered()))
def test_op_has_a_case(name: str) -> None:
    assert name in {case.op.name for case in CASES}, f"op {name} has no case in tests/ops/op_cases"


@pytest.mark.parametrize("name", sorted(registered()))
def test_kernel_takes_the_arguments_of_the_reference(name: str) -> None:
    """Positions and defaults; a kernel may have more arguments, for tests, or fewer that only the reference needs."""
    reference, kernel = (
        inspect.signature(function).parameters.values()
        for function in (registered()[name].reference, registered()[name].triton)
    )
    for expected, actual in zip(reference, kernel, strict=False):
        assert (actual.kind, actual.default) == (expected.kind, expected.default), f"{actual} instead of {expected}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kernel_matches_reference(case: OpCase, device: torch.device) -> None:
    compare_implementations(case, device)
