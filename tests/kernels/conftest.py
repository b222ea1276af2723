"""Triton kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere (tests/conftest.py)."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def whole_numbers_from_arrays_of_one() -> None:
    """Triton's interpreter takes int() of an array with one value, which NumPy 2.4 refuses: unpack it first."""
    try:
        import triton.runtime.interpreter as interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_unpack(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_unpack
