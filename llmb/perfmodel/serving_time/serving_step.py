"""Seconds of one engine step on one rank, by kind of work.

Weights are read once per step and multiplied with all its tokens: whichever takes longer bounds a GEMM, with a smooth
transition, as shapes differ. All arithmetic works on floats and on arrays of rows alike, which the fit uses.
"""

from dataclasses import dataclass
from typing import Any

from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_work import ServingWork
from llmb.perfmodel.step_time.cluster_fabric import Device
from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.step_constants import calibrated

TERMS = ("gemm", "experts", "attention", "memory_bound", "communication", "launch", "host")
NORM = 4
# Rows of an expert that are lost to its tiles and to filling them, by the number of its tokens.
LEAST_PADDING, MOST_PADDING = 16, 128
EVEN = 0.01  # variance of the popularity of experts with random weights, which the native engine benchmarks

# Family of a GPU -> that of its constants: there is no published row of the others. Blackwell Ultra gains what it gains
# in training, by its power limit.
FAMILIES = {"ampere": "hopper", "hopper": "hopper", "blackwell": "blackwell", "blackwell-ultra": "blackwell"}

Number = Any  # float, or an array with one value per row


@dataclass(frozen=True, kw_only=True)
class ServingRates:
    """Sustained rates of one GPU and times of its engine: FLOP/s, bytes/s, seconds."""

    low: Number
    high: Number
    head: Number
    expert: Number
    low_read: Number
    high_read: Number
    expert_read: Number
    kv_read: Number
    prefill_attention: Number
    memory: Number
    ramp: Number  # of a GEMM that reading its weights bounds
    decode_attention: Number
    link: Number
    reduce: Number
    ring: Number
    skew: Number
    kernel: Number
    expert_kernel: Number  # more per kernel of a block with experts
    eager: Number
    host_step: Number
    host_request: Number
    first_token: Number


def serving_rates(setup: ServingSetup, on: Device, c: Constants) -> ServingRates:
    """Return the rates of a setup."""
    family, peaks = FAMILIES[on.fabric.family], on.gpu.peak_flops
    native = "_native" if setup.engine == "native" else ""
    clock = on.fabric.clock * (calibrated()["ultra_gain"] if on.fabric.family.endswith("-ultra") else 1.0)
    bf16 = peaks["bf16"] * c[f"gemm_bf16_{family}"] * clock
    low = {
        "bf16": bf16,
        "fp8": peaks["fp8"] * c[f"gemm_fp8_{family}"] * clock if "fp8" in peaks else bf16,
        "nvfp4": min(peaks["nvfp4"], 2 * peaks["fp8"]) * c["gemm_nvfp4_blackwell"] * clock
        if "nvfp4" in peaks
        else bf16 * c["weight_only"],
    }[setup.dtype]
    bandwidth = on.memory_bandwidth
    expert, expert_read = low * c[f"experts{native}"], bandwidth * c[f"read_{family}"] * c["experts_read"]
    if native and setup.dtype == "nvfp4" and "nvfp4" not in peaks:
        expert, expert_read = (
            peaks["bf16"] * c["experts_4bit_native"] * clock,
            bandwidth * c["experts_4bit_read_native"],
        )
    if native and setup.has_block_scales:
        low *= c["block_scales_native"]
    read = bandwidth * c[f"read_{family}"]
    low_read = read * (c["read_4bit"] if setup.dtype == "nvfp4" else 1.0)
    generation, ranks = setup.generation, setup.tp * setup.attention_dp
    old = generation.endswith("2025")
    kernel = c[f"kernel_{family}"] * (c["kernels_2025"] if old else 1.0)
    attention = peaks["bf16"] * c[f"attention_{family}"] * clock
    return ServingRates(
        low=low,
        high=bf16,
        head=bf16,
        expert=expert,
        low_read=low_read,
        high_read=read,
        expert_read=expert_read / (1.0 + c["ep_imbalance"] * (1 - 1 / setup.ep)),
        kv_read=bandwidth * c[f"kv_read{native}"] * (c["mla_read"] if setup.shape.model.mla else 1.0),
        prefill_attention=attention * (c["attention_fp8_native"] if setup.attention_dtype else 1.0),
        memory=bandwidth * c["memory"],
        ramp=c["ramp_native"] if native else 0.0,
        decode_attention=peaks["bf16"] * c["mla_decode_native"] * clock
        if native and setup.shape.model.mla
        else attention,
        link=(on.link_bandwidth if ranks <= on.fabric.link_domain else on.network) * c["link"],
        reduce=c["reduce"],
        ring=c["ring"],
        skew=EVEN if native else c["routing_skew"],
        kernel=kernel,
        expert_kernel=kernel * (c["expert_kernels_2025"] - 1) if old else 0.0,
        eager=c[f"eager{native}"],
        host_step=c[f"host_step_{generation}"],
        host_request=c[f"host_request{native}"],
        first_token=c[f"first_token_{setup.engine}"],
    )


def longer(a: Number, b: Number) -> Number:
    """Return about the longer of two times; more where they are near each other."""
    return (a**NORM + b**NORM) ** (1 / NORM)


def shorter(a: Number, b: Number) -> Number:
    """Return about the shorter of two times."""
    return (a**-NORM + b**-NORM) ** (-1 / NORM)


def active_experts(routed: Number, tokens: Number, skew: Number) -> Number:
    """Return the fraction of experts that some token is routed to.

    The first token has its own. Popularities of experts follow a gamma distribution of mean 1 and variance `skew`:
    n more tokens of probability p reach 1 - (1 + skew p n)^(-1 / skew) of the others; 1 - exp(-p n) if all were equal.
    """
    return routed + (1 - routed) * (1 - (1 + skew * routed * (tokens - 1)) ** (-1 / skew))


def step_seconds(
    work: ServingWork,
    r: ServingRates,
    *,
    tokens: Number,
    all_tokens: Number,
    sampled: Number,
    decodes: Number,
    context: Number,
    pairs: Number = 0.0,
    window_pairs: Number = 0.0,
    rows: Number | None = None,
    expert_rows: Number | None = None,
) -> dict[str, Number]:
    """Return the seconds of a step by kind.

    `tokens`: of this replica; `all_tokens`: of all replicas; `sampled`: tokens whose logits are needed; `decodes`:
    requests in decode with `context` cached tokens each; `pairs`: (query, key) pairs of prefill; `rows`: of dense GEMMs
    where padding to tiles is known, `expert_rows` the same of an active expert.
    """
    rows = tokens if rows is None else rows
    active = active_experts(work.routed, all_tokens, r.skew)
    routed_rows = work.routed * all_tokens / _positive(active)  # of an active expert
    if expert_rows is None:
        expert_rows = routed_rows + _smaller(LEAST_PADDING + routed_rows / 2, MOST_PADDING)
    expert_macs = work.expert_macs * expert_rows * active / _positive(work.routed)
    inside = _smaller(context, work.window)
    cached = decodes * (context * work.kv_bytes + inside * work.window_kv_bytes)
    decode_macs = decodes * (context * work.kv_macs + inside * work.window_kv_macs)
    return {
        "gemm": longer(work.low_bytes / r.low_read + work.low_gemms * r.ramp, 2 * work.low_macs * rows / r.low)
        + longer(work.high_bytes / r.high_read + work.high_gemms * r.ramp, 2 * work.high_macs * rows / r.high)
        + longer(work.head_bytes / r.high_read + r.ramp, 2 * work.head_macs * sampled / r.head),
        "experts": longer(work.expert_bytes * active / r.expert_read, 2 * expert_macs / r.expert),
        "attention": longer((cached + decodes * work.state_bytes) / r.kv_read, 2 * decode_macs / r.decode_attention)
        + 2 * (pairs * work.pair_macs + window_pairs * work.window_pair_macs) / r.prefill_attention,
        "memory_bound": tokens * work.activation_bytes / r.memory,
        "communication": work.reduces
        * shorter(r.reduce + all_tokens * work.direct_bytes / r.link, r.ring + all_tokens * work.ring_bytes / r.link),
        "launch": work.kernels * r.kernel + work.expert_kernels * r.expert_kernel,
        "host": r.host_step + r.host_request * decodes,
    }


def _positive(value: Number) -> Number:
    return value + (value == 0.0)


def _smaller(a: Number, b: Number) -> Number:
    """Return the smaller of two numbers, of floats and arrays alike."""
    return (a + b - abs(a - b)) / 2
