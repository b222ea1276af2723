"""A fixture for tests that run Triton kernels in its interpreter, as all do where there is no GPU."""

import pytest


@pytest.fixture(scope="session")
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
