"""Compile the kernels of softcap attention at head_dim 256 for a GPU that need not be here.

    python tests/ops/compile_softcap.py 90

Prints a line for each kernel and kind of mask: its name, bytes of shared memory, bytes of spilled registers.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmb.ops.softcap import softcap_attention_triton as kernels
from llmb.ops.softcap.softcap_tiles import WIDE_TILES, WIDE_TILES_SMALL_MEMORY, Tiles

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
KERNELS = (
    kernels._softcap_attention_forward,
    kernels._softcap_attention_backward_dq,
    kernels._softcap_attention_backward_dkv,
)
MASKS = ({"CAUSAL": True, "WINDOW": 0}, {"CAUSAL": True, "WINDOW": 4096}, {"CAUSAL": False, "WINDOW": 0})
ALIGNED = [["tt.divisibility", 16]]


def compile_kernel(kernel: triton.JITFunction, tiles: Tiles, mask: dict[str, int], capability: int) -> tuple[int, int]:
    """Return the bytes of shared memory and of spilled registers."""
    constants = {"GROUP": 2, "D": 256, "M": tiles.queries, "N": tiles.keys, "EVEN": True, **mask}
    signature = {name: "constexpr" if name in constants else argument_type(name) for name in kernel.arg_names}
    aligned = {
        (index,): ALIGNED for index, name in enumerate(kernel.arg_names) if signature[name] in ("*fp32", "*bf16", "i32")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.metadata.shared, spilled_bytes(compiled.asm["ptx"], capability)


def argument_type(name: str) -> str:
    if name.endswith("_ptr"):
        return "*fp32" if name in ("lse_ptr", "delta_ptr") else "*bf16"
    return "fp32" if name.endswith("scale") else "i32"


def spilled_bytes(ptx: str, capability: int) -> int:
    """Return what ptxas reports."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        gpu = f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(PTXAS), "-v", gpu, file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(report.partition(" bytes spill stores")[0].rpartition(" ")[2])


def main() -> None:
    capability = int(sys.argv[1])
    for mask in MASKS:
        for kernel, tiles in zip(KERNELS, WIDE_TILES if capability == 90 else WIDE_TILES_SMALL_MEMORY, strict=True):
            print(kernel.__name__, *compile_kernel(kernel, tiles, mask, capability), flush=True)


if __name__ == "__main__":
    main()
