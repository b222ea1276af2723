"""Limits of fp8 recipes with many scales per tensor: one line names the conflict and the alternative.

    check_many_scales(config)           of a training or out-of-core run; other recipes take any shape

`rowwise` and `blockwise` are recipes of Llama layers with explicit backward. Groups of 128 are never divided among
ranks, so that scales are those of one process on any layout.
"""

from dataclasses import replace

from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.native.number_formats import fp8_recipe
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import gpu
from llmb.perfmodel.params import FP8_ALIGNMENT, FP8_BLOCK, unaligned_fp8_widths

MULTIPLES = {"rowwise": FP8_ALIGNMENT, "blockwise": FP8_BLOCK}  # of a rank's widths, by recipe with many scales


def check_many_scales(config: RunConfig) -> None:
    """Refuse a recipe with many scales for a model, layout or GPU that it does not support."""
    recipe = fp8_recipe(config)
    if recipe not in MULTIPLES:
        return
    model, parallel, work = config.model, config.parallel, config.workload
    if not has_llama_layers(model):
        raise ConfigError(
            f"fp8_recipe={recipe} is one of layers with explicit backward, which {model.name} does not have; "
            "choose tensorwise_delayed or tensorwise_current"
        )
    shard = replace(
        model, heads=model.heads // parallel.tp, kv_heads=model.kv_heads // parallel.tp, ffn=model.ffn // parallel.tp
    )
    odd = unaligned_fp8_widths(shard, MULTIPLES[recipe])
    if odd:
        listed = ", ".join(f"{name} is {width}" for name, width in odd.items())
        other = "rowwise or " if recipe == "blockwise" and not unaligned_fp8_widths(shard) else ""
        raise ConfigError(
            f"fp8_recipe={recipe} takes widths that are multiples of {MULTIPLES[recipe]}: on a tp rank of {model.name} "
            f"{listed}; choose {other}tensorwise_delayed"
        )
    if recipe == "blockwise":
        _check_blockwise(config)
        if isinstance(work, Training) and parallel.cp > 1 and work.seqlen % (2 * parallel.cp * FP8_BLOCK):
            raise ConfigError(
                f"fp8_recipe=blockwise with cp={parallel.cp} takes sequences in multiples of "
                f"{2 * parallel.cp * FP8_BLOCK} tokens, so that ranks divide no group of {FP8_BLOCK}, got "
                f"seqlen={work.seqlen}; choose another seqlen or rowwise"
            )


def _check_blockwise(config: RunConfig) -> None:
    work, name = config.workload, config.launch_machine.gpu
    if isinstance(work, Training) and work.fp8_fast_accum:
        raise ConfigError(
            f"fp8_fast_accum=true has no effect with fp8_recipe=blockwise, which adds sums of {FP8_BLOCK} products in "
            "fp32; leave it out"
        )
    fabric = gpu(name).fabric
    if name != "cpu" and fabric is not None and fabric.family != "hopper":
        raise ConfigError(
            f"fp8_recipe=blockwise: cuBLAS has GEMMs with these scales on Hopper only, not on {gpu(name).title}; "
            "choose rowwise"
        )
