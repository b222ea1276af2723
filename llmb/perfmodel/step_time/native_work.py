"""Work and rates of the native engine, where they differ from those of the engines that publish results.

Its Llama layer has an explicit backward with fused norms, activation and casts (`models/llama_layer`); other blocks are
modules, whose casts and gradient accumulation are passes of their own. GEMM algorithms are chosen by trial, so that
only lost waves cost more than the sustained rate.

Recipes with many scales per tensor (rowwise, blockwise) quantize in passes of their own; GEMMs with scales of blocks
are slower.
"""

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
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.step_work import BACKWARD_ATTENTION, BlockWork, RankWork

LOGIT_BYTES = 16.0  # per logit, of the work that this module starts from
WIDEST_TILED_HEAD = 128  # of softcap kernels with their usual tiles
CAST_BYTES = {True: 3.0, False: 4.0}  # per weight and direction: read, and written in one layout or in both


def is_explicit(setup: StepSetup) -> bool:
    """Return whether the engine trains the layer with explicit backward."""
    return has_llama_layers(setup.shape.model)


def native_work(setup: StepSetup, work: RankWork) -> RankWork:
    """Return the work of a rank as the native engine does it."""
    c, explicit = native_constants("work"), is_explicit(setup)
    weights = work.dense_weights + work.routed_weights - work.end_weights
    is_quantized = setup.dtype != "bf16"
    # Accumulation is in the epilogue of a bf16 GEMM of the explicit layer, elsewhere a pass that reads the addend too.
    accumulated = (2.0 if explicit and not is_quantized else 3.0) * setup.formats.gradient_bytes * weights
    # The explicit layer casts a weight once a step for each direction, modules in every micro-batch.
    casts = CAST_BYTES[explicit] * weights / (setup.ga if explicit else 1) if is_quantized else 0.0
    return replace(
        work,
        forward=_block(setup, work.forward, explicit, 0.0, casts),
        backward=_block(setup, work.backward, explicit, accumulated, casts),
        head=replace(work.head, memory_bytes=work.head.memory_bytes * c["logit_bytes"] / LOGIT_BYTES),
        step_bytes=setup.formats.update_bytes * work.sharded_weights,
    )


def _block(setup: StepSetup, block: BlockWork, explicit: bool, accumulated: float, casts: float) -> BlockWork:
    c = native_constants("work")
    own_passes = {"fp8-row": c["rowwise_casts"], "fp8-block": c["blockwise_casts"]}
    fused = c["fused_quantization"] if explicit else 1.0
    return replace(
        block,
        attention_flops=block.attention_flops * _softcap_cost(setup.shape.model),
        memory_bytes=block.memory_bytes * (c["fused_passes"] if explicit else 1.0) + accumulated,
        quantize_bytes=block.quantize_bytes * own_passes.get(setup.dtype, fused) + casts,
    )


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
