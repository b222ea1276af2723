"""Work and rates of the native engine, where they differ from those of the engines that publish results.

Its Llama layer has an explicit backward with fused norms, activation and casts (`models/llama_layer`); other blocks are
modules, whose casts are passes of their own. Gradients accumulate in epilogues of GEMMs, those of experts in a pass of
its own. GEMM algorithms are chosen by trial, so that only lost waves cost more than the sustained rate, and in backward
accumulation of fp8 GEMMs in fp32.

Recipes with many scales per tensor (rowwise, blockwise) quantize in passes of their own; GEMMs with scales of blocks
are slower.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.perfmodel.block_costs import BLOCK_COSTS
from llmb.perfmodel.offload.machine_rates import H200, known_rates
from llmb.perfmodel.offload.task_durations import causal_rate
from llmb.perfmodel.shards import recomputed_macs_per_token
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, Device
from llmb.perfmodel.step_time.fitted_constants import native_constants
from llmb.perfmodel.step_time.native_kernels import native_kernels
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.step_work import (
    BACKWARD_ATTENTION,
    BACKWARD_SCAN,
    BF16,
    BlockWork,
    RankWork,
    block_counts,
)

LOGIT_BYTES = 16.0  # per logit, of the work that this module starts from
WIDEST_TILED_HEAD = 128  # of softcap kernels with their usual tiles
CAST_BYTES = {True: 3.0, False: 4.0}  # per weight and direction: read, and written in one layout or in both
STATE_COLUMNS, STATE_TOKENS = 64, 128  # of a program that carries states from chunk to chunk, and of one of its steps
STATE_PROGRAMS = 2  # of these on a multiprocessor at once
RESIDUAL_PASSES = 2.0  # of a block's backward, which the norm's spares
GROUP_CAST_BYTES = 6.0  # per weight of an expert: read for its amax, read, and written in both layouts


def is_explicit(setup: StepSetup) -> bool:
    """Return whether the engine trains the layer with explicit backward."""
    return has_llama_layers(setup.shape.model)


def native_work(setup: StepSetup, work: RankWork, on: Device) -> RankWork:
    """Return the work of a rank as the native engine does it."""
    c, explicit, kernels = native_constants("work"), is_explicit(setup), native_kernels(setup)
    casts = _cast_bytes(setup, work, explicit)
    gradients = _accumulated(setup, work) + (0.0 if explicit else _module_bytes(setup))
    forward = _scanned(setup, on, _block(setup, work.forward, explicit, 0.0, casts), 1, 1.0)
    backward = _scanned(setup, on, _block(setup, work.backward, explicit, gradients, casts), 2, BACKWARD_SCAN)
    # The chunked loss has a gradient of its own, which is then added to the head's.
    head_weights = setup.shape.model.vocab * setup.shape.model.hidden / setup.parallel.tp
    head_bytes = (
        work.head.memory_bytes * c["logit_bytes"] / LOGIT_BYTES + 3 * setup.formats.gradient_bytes * head_weights
    )
    return replace(
        work,
        forward=forward,
        backward=_slowly_accumulated(setup, backward),
        head=replace(work.head, memory_bytes=head_bytes),
        kernels=kernels,
        launches=kernels * (1.0 - setup.graphs),
        step_bytes=setup.formats.update_bytes * work.sharded_weights,
    )


def _accumulated(setup: StepSetup, work: RankWork) -> float:
    """Return the bytes to add a micro-batch's gradients: in the epilogue of a GEMM, of experts in a pass of its own.

    Grouped GEMMs write theirs in bf16, which that pass reads.
    """
    dense, both_ways = work.dense_weights - work.end_weights, 2 * setup.formats.gradient_bytes
    return both_ways * dense + (BF16 + both_ways) * work.routed_weights


def _module_bytes(setup: StepSetup) -> float:
    """Return the bytes of a micro-batch's backward that modules move beyond those of other engines.

    Gradients of the parts of a Mamba layer's projection, and of its convolution's output, are concatenated. In fp8
    queries, keys and values have a GEMM each for the gradient of their input, of all ranks' tokens, and are added. The
    backward of a norm adds the gradient of the residual, so no other pass does.
    """
    model, counts = setup.shape.model, block_counts(setup)
    values = 0.0
    if (m := model.mamba) is not None:
        convolved = m.heads * m.head_dim + 2 * m.groups * m.state
        values += counts.get("mamba", 0.0) * 2 * (m.heads * m.head_dim + m.heads + 2 * convolved) / setup.parallel.tp
    if setup.dtype != "bf16":
        values += counts.get("attention", 0.0) * 2 * 3 * model.hidden
    values -= sum(counts.values()) * RESIDUAL_PASSES * model.hidden / setup.parallel.tp
    return BF16 * setup.tokens * values


def _cast_bytes(setup: StepSetup, work: RankWork, explicit: bool) -> float:
    """Return the bytes of a micro-batch's casts of weights to fp8 for one direction, at the rate of copies.

    The explicit layer casts a weight once a step, modules in every micro-batch; experts are cast once where they stay.
    """
    if setup.dtype == "bf16":
        return 0.0
    dense, stays = work.dense_weights - work.end_weights, not setup.parallel.fsdp
    experts = GROUP_CAST_BYTES / 2 * _group_cast() * work.routed_weights / (setup.ga if stays else 1)
    return CAST_BYTES[explicit] * dense / (setup.ga if explicit else 1) + experts


def _group_cast() -> float:
    """Return the time of a byte that casts of groups of rows move, against one of copies."""
    c = native_constants("rates")
    return c["memory"] / c["group_casts"]


def _slowly_accumulated(setup: StepSetup, block: BlockWork) -> BlockWork:
    """Return the backward with the time of fp8 GEMMs that accumulate in fp32 outside of the tensor cores."""
    if setup.dtype in ("bf16", "fp8-block") or setup.formats.fp8_fast_accum:
        return block
    c = native_constants("work")
    costs = {True: c["slow_accumulation_grouped"], False: c["slow_accumulation"]}
    return replace(
        block, gemms=tuple(replace(g, flops=g.flops * (costs[g.grouped] if g.low else 1.0)) for g in block.gemms)
    )


def _scanned(setup: StepSetup, on: Device, block: BlockWork, walks: int, passes: float) -> BlockWork:
    """Return the block with the scan of Mamba-2 by the native kernels, `walks` of them from chunk to chunk.

    A walking kernel carries a tile of a head's state through the sequence, STATE_TOKENS at a time, and writes the
    states in bf16. Others are parallel over chunks: x, z, B, C, y, and the states that they read.
    """
    m, split = setup.shape.model.mamba, setup.parallel
    if m is None:
        return block
    layers, inner = block_counts(setup).get("mamba", 0.0), m.heads * m.head_dim
    values = 4 * inner + 2 * m.groups * m.state + inner * m.state / m.chunk
    programs = setup.mbs * m.heads / split.tp * math.ceil(m.state / STATE_COLUMNS)
    waves = math.ceil(programs / (STATE_PROGRAMS * on.fabric.sms))
    steps = setup.seqlen / STATE_TOKENS * native_constants("work")["state_step"]
    return replace(
        block,
        scan_bytes=passes * layers * BF16 * values * setup.tokens / split.tp,
        scan_s=walks * layers * waves * steps,
    )


def _block(setup: StepSetup, block: BlockWork, explicit: bool, gradients: float, casts: float) -> BlockWork:
    c = native_constants("work")
    own_passes = {"fp8-row": c["rowwise_casts"], "fp8-block": c["blockwise_casts"]}
    fused = c["fused_quantization"] if explicit else 1.0
    quantized = block.quantize_bytes + (_group_cast() - 1) * block.group_quantize_bytes
    return replace(
        block,
        attention_flops=block.attention_flops * _softcap_cost(setup.shape.model) * _chunk_cost(setup),
        memory_bytes=block.memory_bytes * (c["fused_passes"] if explicit else 1.0) + gradients,
        quantize_bytes=quantized * own_passes.get(setup.dtype, fused) + casts,
    )


def _chunk_cost(setup: StepSetup) -> float:
    """Return the time of attention by chunks of a sequence, two on each rank of cp, against one causal call."""
    cp = setup.parallel.cp
    chunk = setup.seqlen / (2 * cp)
    return 1.0 if cp == 1 else 1.0 + native_constants("work")["chunk_tokens"] / chunk


def _softcap_cost(model: Model) -> float:
    """Return the time of attention by our softcap kernels against cuDNN's without a softcap."""
    if model.attn_logit_softcap is None:
        return 1.0
    return native_constants("work")["softcap" if model.head_dim <= WIDEST_TILED_HEAD else "softcap_wide"]


def native_rates(setup: StepSetup, on: Device, power_gain: float = 1.0) -> dict[str, float]:
    """Return the fields of waterfall.Rates: fractions of a GPU's peaks, scaled by what `probe` measured here."""
    c, peaks = native_constants("rates"), on.gpu.peak_flops
    speed, bandwidth = _chip_speed(setup, on)
    speed *= power_gain
    bf16, hbm = peaks["bf16"] * speed, on.memory_bandwidth * bandwidth
    low = min(peaks[setup.peak_dtype], 2 * peaks.get("fp8", 0.0)) * c["gemm_fp8"] * speed
    low *= c["gemm_blockwise"] if setup.dtype == "fp8-block" else 1.0
    ratio = H200.square_tokens / setup.seqlen
    forward = causal_rate(c["attention_forward"], c["long_attention_forward"], ratio)
    backward = causal_rate(c["attention_backward"], c["long_attention_backward"], ratio)
    attention = (1 + BACKWARD_ATTENTION) / (1 / forward + BACKWARD_ATTENTION / backward)
    return {
        "low": low if setup.dtype != "bf16" else bf16 * c["gemm_bf16"],
        "bf16": bf16 * c["gemm_bf16"],
        "grouped": 1 / c["grouped_bf16" if setup.dtype == "bf16" else "grouped_fp8"],
        "attention": bf16 * attention,
        "scan": hbm * c["scan"],
        "memory": hbm * c["memory"],
        "quantize": hbm * c["memory"],
        "hbm": hbm,
    }


def _chip_speed(setup: StepSetup, on: Device) -> tuple[float, float]:
    """Return compute and memory rates of this chip against those that its type is known to have."""
    if setup.rates is None or on.key not in FABRICS:  # then the device consists of the rates
        return 1.0, 1.0
    usual = known_rates(on.key)
    return setup.rates.matmul_tflops / usual.matmul_tflops, setup.rates.memory_gbs / usual.memory_gbs


def explicit_recompute(setup: StepSetup, forward: Mapping[str, float]) -> float:
    """Return the seconds of a micro-batch's recompute in explicit layers, of all layers: keys, values and attention
    are saved, so only the other projections, one norm and the activation are repeated."""
    model = setup.shape.model
    gemms = recomputed_macs_per_token(model) / sum(BLOCK_COSTS[kind](model).token_macs for kind in ("attention", "mlp"))
    return gemms * forward["gemm"] + (forward["memory_bound"] + forward["quantization"]) / 2
