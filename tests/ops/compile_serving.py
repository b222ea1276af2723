"""Compile the kernels that bound serving for a GPU that need not be here.

    python tests/ops/compile_serving.py 90

Prints a line for each kernel: its name, bytes of shared memory, bytes of spilled registers, and the fewest groups of
asynchronous copies that its loop leaves under way while it computes.
"""

import re
import sys

import triton
import triton.language as tl
from compile_softcap import ALIGNED, spilled_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmb.ops.attention import paged_attention_triton as attention
from llmb.ops.gemm import split_k_gemm_triton as split_k
from llmb.ops.moe import fused_moe_fp8_triton as experts

POINTERS = {
    "q_ptr": "*bf16", "keys_ptr": "*fp8e4nv", "values_ptr": "*fp8e4nv", "sinks_ptr": "*fp32", "out_ptr": "*bf16",
    "lse_ptr": "*fp32", "block_table_ptr": "*i32", "seq_lens_ptr": "*i32", "cu_seqlens_ptr": "*i32",
    "x": "*fp8e4nv", "x_scales": "*fp32", "weight": "tensordesc<fp8e4nv[128,128]>", "weight_scales": "*fp32",
    "out": "*bf16", "topk_weights": "*fp32", "sorted_token_ids": "*i32", "expert_ids": "*i32",
    "used_blocks": "*i32", "x_ptr": "*fp8e4nv", "x_scales_ptr": "*fp32", "weight_ptr": "*fp8e4nv",
    "scales_ptr": "*fp32", "partial_ptr": "*fp32", "arrivals_ptr": "*i32",
}  # fmt: skip
FLOATS = ("scale", "value_scale", "softcap")


def compile_kernel(
    kernel: triton.JITFunction, constants: dict[str, object], options: dict[str, int], capability: int
) -> str:
    """Return what is printed of a kernel."""
    types = {name: POINTERS.get(name, "fp32" if name in FLOATS else "i32") for name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (index,): ALIGNED
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("q_stride", "outputs", "inputs")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    loop = compiled.asm["ttgir"].partition("scf.for")[2]
    loop = loop[: loop.rindex("scf.yield")]
    under_way = min(map(int, re.findall(r"async_wait %.*?num = (\d+)", loop)))
    return f"{compiled.metadata.shared} {spilled_bytes(compiled.asm['ptx'], capability)} {under_way}"


def main() -> None:
    capability = int(sys.argv[1])
    for group, kv_heads, splits in ((8, 4, 1), (4, 8, 2)):
        constants = {
            "GROUP": group, "ROWS": 16, "G": kv_heads, "D": 128, "L": 64, "SPLITS": splits, "COMPUTE": tl.float16,
            "HAS_SOFTCAP": False, "HAS_WINDOW": False, "HAS_SINKS": False, "STAGES": 3, "USE_PDL": False,
        }  # fmt: skip
        options = {"num_warps": 2 * splits}
        print("_paged_decode", compile_kernel(attention._paged_decode, constants, options, capability))
    for tokens, config in split_k.CONFIGS.items():
        constants = {
            "OUTPUTS": 4096, "INPUTS": 14336, "BLOCK_N": tokens, "BLOCK_O": config.block_o, "BLOCK_K": config.block_k,
            "SPLITS": 7, "STAGES": config.num_stages, "USE_PDL": False,
        }  # fmt: skip
        options = {"num_warps": config.num_warps}
        print("_split_k_gemm", compile_kernel(split_k._split_k_gemm, constants, options, capability))
    for block_m, config in experts.CONFIGS.items():
        constants = {
            "TOP_K": 1, "MUL_ROUTED_WEIGHT": True, "GROUP": 128, "BLOCK_M": block_m, "HALVES": config.halves,
            "GROUP_M": experts.GROUP_M, "OFFSET": tl.int32,
        }  # fmt: skip
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        print("experts", compile_kernel(experts._moe_gemm_fp8_kernel, constants, options, capability))


if __name__ == "__main__":
    main()
