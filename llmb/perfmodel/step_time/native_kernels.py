"""Kernels that the native engine launches for a micro-batch, collectives among them.

    native_kernels(setup)       -> 460 for a stage of 10 layers of Llama 70b in fp8 with tp

Without CUDA graphs the host launches each by itself, most of them from autograd functions in Python. Counts are of dry
runs of Llama, Grok-1, Nemotron-H and DeepSeek (`tests/train/test_native_kernels.py`); norms of heads, biases and a
load-balancing loss launch a few more.
"""

from dataclasses import dataclass

from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.spec import Parallel
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.step_work import block_counts


@dataclass(frozen=True)
class Launches:
    """Kernels of a block, forward and backward: in bf16 with one rank, and what more each setting adds."""

    alone: int
    fp8: int
    tp: int = 0
    tp_fp8: int = 0
    cp: int = 0
    ep: int = 0
    fsdp: int = 0
    fsdp_fp8: int = 0

    def of(self, split: Parallel, is_quantized: bool) -> int:
        """Return the launches of one block."""
        tp, cp, ep = split.tp > 1, split.cp > 1, split.ep * split.etp > 1
        added = self.tp * tp + self.cp * cp + self.ep * ep + self.fsdp * split.fsdp
        return self.alone + added + is_quantized * (self.fp8 + self.tp_fp8 * tp + self.fsdp_fp8 * split.fsdp)


MODULES = {
    "attention": Launches(17, 16, tp=4, cp=13),
    "mla": Launches(37, 23, tp=6, cp=13),
    "mlp": Launches(13, 8, tp=4),
    "experts": Launches(51, 69, ep=11),
    "mamba": Launches(89, 8, tp=4),
}
ROPE = 4  # of an attention module: of queries and of keys
EXPLICIT = {  # of the layer with explicit backward
    "attention": Launches(14, 4, tp=6, tp_fp8=3, cp=21, fsdp=3, fsdp_fp8=4),
    "mlp": Launches(10, 3, tp=6, tp_fp8=3, fsdp=3, fsdp_fp8=4),
}


def native_kernels(setup: StepSetup) -> float:
    """Return the kernels that the host launches for a micro-batch's forward and backward."""
    model, counts, is_quantized = setup.shape.model, block_counts(setup), setup.dtype != "bf16"
    explicit = has_llama_layers(model)
    blocks = EXPLICIT if explicit else MODULES
    kernels = sum(count * blocks[kind].of(setup.parallel, is_quantized) for kind, count in counts.items())
    if not explicit and model.rope is not None:
        kernels += ROPE * counts.get("attention", 0.0)
    if model.experts is not None and model.experts.shared:
        kernels += blocks["mlp"].of(setup.parallel, is_quantized) * counts.get("experts", 0.0)
    return kernels
