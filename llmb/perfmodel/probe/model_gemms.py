"""GEMM shapes of a model that the probe measures: one of each kind of block, on one GPU.

model_gemms(find_model("llama3.1-8b"), on_cpu=False) -> [(16384, 6144, 4096), ...]: rows, outputs, inputs
"""

from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.shapes.model_catalog import ModelShape
from llmb.perfmodel.step_time.gemm_shapes import block_gemms
from llmb.perfmodel.step_time.setup_fields import build_setup

SEQLEN, SEQUENCES = 8192, 2  # tokens of a micro-batch: 16,384
MOST_EXPERTS = 8  # measured one after the other; more of them have the same rate
CPU_FRACTION, CPU_TOKENS = 16, 256  # on a CPU: widths divided by, and rows at most
MULTIPLE = 16  # of every dimension, which fp8 GEMMs need


def model_gemms(shape: ModelShape, on_cpu: bool) -> list[tuple[int, int, int]]:
    """Return rows, outputs and inputs of a layer's GEMMs; on a CPU with narrower layers and fewer rows."""
    setup = build_setup(shape, "h200", 1, "bf16", {"seqlen": SEQLEN, "mbs": SEQUENCES})
    gemms = []
    for kind, _, _ in block_stack(shape.model):
        for gemm in block_gemms(setup, kind):
            if not gemm.low:  # a router: too small to matter
                continue
            rows, outputs, inputs = gemm.m, gemm.n, gemm.k
            if on_cpu:
                rows, outputs, inputs = min(rows, CPU_TOKENS), outputs / CPU_FRACTION, inputs / CPU_FRACTION
            gemms += [(_rounded(rows), _rounded(outputs), _rounded(inputs))] * min(
                MOST_EXPERTS, max(1, int(gemm.count))
            )
    return gemms


def _rounded(size: float) -> int:
    return max(1, round(size / MULTIPLE)) * MULTIPLE
