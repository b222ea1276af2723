"""Fixtures for tests that run Triton kernels in its interpreter, as all do where there is no GPU."""

from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Triton's interpreter, which then works with this NumPy and spends its time on kernels."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _unpack_arrays_of_one(interpreter)
    _round_to_the_nearest(interpreter)
    _patch_once_a_launch(interpreter)


@pytest.fixture
def force_kernels(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ops take their Triton kernels, wherever their tensors are."""
    pytest.importorskip("triton")
    monkeypatch.setattr("llmb.ops.dispatch.takes_triton", lambda _tensor: True)


def _unpack_arrays_of_one(interpreter: Any) -> None:
    """It takes int() of an array with one value, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_and_unpack(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_unpack


def _round_to_the_nearest(interpreter: Any) -> None:
    """Where rounding to 8 bits carries into the exponent, it loses the carry; torch does not."""
    formats = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    convert = interpreter._convert_float

    def convert_as_torch(numbers, from_format, to_format, rounding):
        if from_format.name != "fp32" or to_format.name not in formats:
            return convert(numbers, from_format, to_format, rounding)
        return torch.tensor(numbers).to(formats[to_format.name]).view(torch.uint8).numpy()

    interpreter._convert_float = convert_as_torch


def _patch_once_a_launch(interpreter: Any) -> None:
    """Whenever a kernel calls a function, the interpreter replaces the language that the function's module sees, name
    by name, though it may be replaced already: a third of the time of a kernel that calls a few."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # the global names of modules

    def patch_unless_done(function):
        if id(function.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(function.__globals__))
        return patch(function)

    def launch_anew(self, *arguments, **named):
        patched.clear()
        return launch(self, *arguments, **named)

    interpreter._patch_lang = patch_unless_done
    interpreter.GridExecutor.__call__ = launch_anew
