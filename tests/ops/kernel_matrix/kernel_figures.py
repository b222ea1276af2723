"""Compiles a recorded launch and reads what it needs: shared memory, registers, spilled bytes, copies under way.

Figures are kept beside Triton's own cache, by everything that they follow from.
"""

import hashlib
import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from kernel_matrix.launch_recorder import WARP, Launch

CACHE = "llmb-kernel-figures"


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """Figures of one compiled kernel; only `error` if it does not compile."""

    shared_bytes: int | None = None
    registers: int | None = None  # of a thread
    spilled_bytes: int | None = None  # stored, of a thread
    copies_under_way: int | None = None  # fewest groups of asynchronous copies while the loop computes; null: no loop
    error: str | None = None

    def failure(self, shared_limit: int) -> str | None:
        """Return why a GPU with so much shared memory cannot launch it; None if it can."""
        if self.error is None and (self.shared_bytes or 0) > shared_limit:
            return f"{self.shared_bytes} bytes of shared memory of {shared_limit}"
        return self.error


def compiled_figures(launch: Launch, target: int) -> KernelFigures:
    """Return the figures of a launch on GPUs of a compute capability."""
    gpu = GPUTarget("cuda", target, WARP)
    key = "-".join((launch.source.hash(), launch.options.hash(), _compiler_hash(target)))
    path = Path(knobs.cache.dir) / CACHE / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if path.exists():
        return KernelFigures(**json.loads(path.read_text()))
    figures = _compile(launch, gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{id(figures)}")
    partial.write_text(json.dumps(asdict(figures)))
    partial.replace(path)
    return figures


@cache
def _compiler_hash(target: int) -> str:
    """Return what names versions of Triton and ptxas."""
    return f"{triton.__version__}-{make_backend(GPUTarget('cuda', target, WARP)).hash()}"


def _compile(launch: Launch, gpu: GPUTarget) -> KernelFigures:
    output = io.StringIO()
    try:
        with redirect_stdout(output), knobs.nvidia.scope(), knobs.compilation.scope():
            knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
            kernel = triton.compile(launch.source, target=gpu, options=launch.options.__dict__)
    except Exception as error:  # of any of a dozen types: what the compiler, LLVM or ptxas says
        return KernelFigures(error=_first_lines(error))
    log = output.getvalue()
    return KernelFigures(
        shared_bytes=kernel.metadata.shared,
        registers=_number(r"Used (\d+) registers", log),
        spilled_bytes=_number(r"(\d+) bytes spill stores", log),
        copies_under_way=_copies_under_way(kernel.asm["ttgir"]),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"ptxas printed no {pattern}: {text[-500:]}"
    return int(match[1])


def _copies_under_way(ttgir: str) -> int | None:
    loop = ttgir.partition("scf.for")[2]
    loop = loop[: loop.rfind("scf.yield")]
    return min(map(int, re.findall(r"async_wait %.*?num = (\d+)", loop)), default=None)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines()]
    return " | ".join([line for line in lines if line][:6])[:600]
