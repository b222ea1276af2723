"""Triton kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere (tests/conftest.py)."""

import pytest
import torch
from triton_interpreter import interpreter  # noqa: F401  # a fixture


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def interpreted(interpreter: None) -> None:  # noqa: F811
    pass
