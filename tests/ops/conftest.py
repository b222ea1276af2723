"""Triton kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere (tests/conftest.py)."""

from dataclasses import replace

import pytest
import torch
from triton_interpreter import force_kernels, interpreter  # noqa: F401  # fixtures

from llmb.ops.dispatch import triton_installed


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def interpreted(interpreter: None) -> None:  # noqa: F811
    """Without debug mode the interpreter discards its checks for overflow, which take a quarter of the time."""
    if triton_installed():
        from triton.runtime.interpreter import interpreter_builder as builder

        builder.options = replace(builder.options, sanitize_overflow=False)


@pytest.fixture(params=["reference", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Run a test with the references and with the kernels of all ops."""
    if request.param == "triton":
        request.getfixturevalue("force_kernels")
    return request.param
