"""Records the launches of Triton kernels: what Triton would compile for a GPU, of arguments on the meta device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

WARP = 32


@dataclass(frozen=True)
class Launch:
    """One specialization of a kernel, and the first step that launches it."""

    source: ASTSource
    options: Any  # those of Triton's backend
    step: str

    @property
    def kernel(self) -> str:
        """Module and name."""
        function = self.source.fn
        return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    @property
    def constants(self) -> dict[str, str]:
        names = self.source.fn.arg_names
        return {names[path[0]]: str(value) for path, value in sorted(self.source.constants.items()) if len(path) == 1}

    @property
    def types(self) -> dict[str, str]:
        """Types of the arguments that are no constants."""
        return {name: str(kind) for name, kind in self.source.signature.items() if kind != "constexpr"}

    @property
    def launch_options(self) -> dict[str, int]:
        options = {"num_warps": self.options.num_warps, "num_stages": self.options.num_stages}
        return options | ({"launch_pdl": 1} if self.options.launch_pdl else {})

    @property
    def title(self) -> str:
        """Kernel, types, constants and launch options: equal titles are equal kernels, alignment aside."""
        pairs = [f"{name}:{kind}" for name, kind in self.types.items()]
        pairs += [f"{name}={value}" for name, value in {**self.constants, **self.launch_options}.items()]
        return f"{self.kernel}({', '.join(pairs)})"

    @property
    def plain(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel, "step": self.step, "types": self.types, "constants": self.constants,
            "options": self.launch_options,
        }  # fmt: skip


class _Driver:
    """What Triton asks a driver before it compiles."""

    def __init__(self, target: int):
        self._target = GPUTarget("cuda", target, WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class LaunchRecorder:
    """The distinct launches of this process, in their order, for GPUs of one compute capability."""

    def __init__(self, target: int):
        self.step, self.target = "", target
        self._launches: dict[tuple[Any, ...], Launch] = {}
        driver.set_active(_Driver(target))

    @property
    def launches(self) -> list[Launch]:
        return list(self._launches.values())

    def forget(self, first: int) -> None:
        """Forget the launches from the first one on, in their order."""
        for key in list(self._launches)[first:]:
            del self._launches[key]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record instead of launching."""

        def record(
            function: JITFunction, _key: Any, signature: Any, _device: Any, constants: Any, options: Any,
            attributes: Any, _warmup: bool,
        ) -> None:  # fmt: skip
            key = (function, *(str(part) for part in (signature, constants, attributes)), options.hash())
            if key not in self._launches:
                self._launches[key] = Launch(ASTSource(function, signature, constants, attributes), options, self.step)

        compile_kernel = JITFunction._do_compile
        JITFunction._do_compile = record
        try:
            yield
        finally:
            JITFunction._do_compile = compile_kernel
