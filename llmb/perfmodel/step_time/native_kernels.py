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
    """Kernels of a block, forward and backward: with one rank, and what more each dimension of a layout adds."""

    alone: int
    tp: int = 0
    cp: int = 0
    ep: int = 0
    fsdp: int = 0

    def of(self, split: Parallel) -> int:
        """Return the launches of one block."""
        added = {"tp": split.tp > 1, "cp": split.cp > 1, "ep": split.ep * split.etp > 1, "fsdp": split.fsdp}
        return self.alone + sum(getattr(self, name) for name, is_split in added.items() if is_split)


# By whether GEMMs are quantized: blocks that are modules, and those of the layer with explicit backward.
MODULES = {
    False: {
        "attention": Launches(17, tp=4, cp=13),
        "mla": Launches(37, tp=6, cp=13),
        "mlp": Launches(13, tp=4),
        "experts": Launches(51, ep=11),
        "mamba": Launches(89, tp=4),
    },
    True: {
        "attention": Launches(33, tp=4, cp=13),
        "mla": Launches(60, tp=6, cp=13),
        "mlp": Launches(21, tp=4),
        "experts": Launches(120, ep=11),
        "mamba": Launches(97, tp=4),
    },
}
ROPE = 4  # of an attention module: of queries and of keys
EXPLICIT = {
    False: {"attention": Launches(14, tp=6, cp=21, fsdp=3), "mlp": Launches(10, tp=6, fsdp=3)},
    True: {"attention": Launches(18, tp=9, cp=21, fsdp=7), "mlp": Launches(13, tp=9, fsdp=7)},
}


def native_kernels(setup: StepSetup) -> float:
    """Return the kernels that the host launches for a micro-batch's forward and backward."""
    model, counts, is_quantized = setup.shape.model, block_counts(setup), setup.dtype != "bf16"
    explicit = has_llama_layers(model)
    blocks = (EXPLICIT if explicit else MODULES)[is_quantized]
    kernels = sum(count * blocks[kind].of(setup.parallel) for kind, count in counts.items())
    if not explicit and model.rope is not None:
        kernels += ROPE * counts.get("attention", 0.0)
    if model.experts is not None and model.experts.shared:
        kernels += blocks["mlp"].of(setup.parallel) * counts.get("experts", 0.0)
    return kernels
