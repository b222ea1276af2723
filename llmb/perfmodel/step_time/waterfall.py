"""Time of a training step as a sum of terms, from the work of a rank and the calibrated constants.

    step_terms(step_work(setup), calibrated())    -> {"gemm": ..., "attention": ..., ..., "overhead": ...}, in seconds

A micro-batch takes the sum of its compute and exposed communication. A pipeline runs `ga` of them, at the pace of its
slowest rank, and idles for (pp - 1) / vp more, or longer with fewer of them than ranks; data-parallel communication
hides behind one micro-batch.
"""

import math
from dataclasses import dataclass

from llmb.perfmodel.pipeline_schedule import ramp
from llmb.perfmodel.step_time.cluster_fabric import Device
from llmb.perfmodel.step_time.collective_time import NO_TRAFFIC, RankTraffic, Transfer, rank_traffic
from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.measured_device import device_of
from llmb.perfmodel.step_time.native_work import explicit_recompute, is_explicit, native_rates, native_work
from llmb.perfmodel.step_time.run_description import NATIVE
from llmb.perfmodel.step_time.saved_activations import offloaded_bytes
from llmb.perfmodel.step_time.step_constants import ENGINES
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.step_work import (
    QUANTIZED_KERNELS,
    SELECTIVE,
    BlockWork,
    RankWork,
    rank_work,
    stage_layers,
)

TERMS = (
    "gemm", "attention", "scan", "memory_bound", "quantization", "recompute", "tp", "cp", "ep", "pp", "dp", "fsdp",
    "copies", "offload", "bubble", "optimizer", "launch", "host", "overhead", "jitter", "engine",
)  # fmt: skip


HOST_NORM = 4
FORWARD = 1 / 3  # of a micro-batch
FORWARD_EXPERTS = 1 / 2  # of the all-to-all, which recompute repeats


@dataclass(frozen=True)
class StepWork:
    """A described step with its work and traffic, ready to be timed with any constants."""

    setup: StepSetup
    device: Device
    work: RankWork
    traffic: RankTraffic
    offloaded: float  # bytes of activations of a micro-batch, in one direction


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Sustained rates of one GPU: FLOP/s and bytes/s."""

    low: float  # GEMMs in the dtype of the run
    bf16: float
    grouped: float  # ratio for the GEMMs of several experts
    attention: float
    scan: float
    memory: float
    quantize: float
    hbm: float


def step_work(setup: StepSetup, on: Device | None = None, work: RankWork | None = None) -> StepWork:
    """Return the work of a step, on a GPU of the table or one with what-if changes; `work`: of its rank, if known."""
    on = on or device_of(setup.gpu, setup.rates)
    if work is None:
        work = rank_work(setup, on)
        if setup.engine == NATIVE:
            work = native_work(setup, work, on)
    traffic = rank_traffic(setup, work, on) if setup.local is None else NO_TRAFFIC
    return StepWork(setup, on, work, traffic, offloaded_bytes(setup))


def rates(step: StepWork, c: Constants) -> Rates:
    """Return the sustained rates for a step."""
    if step.setup.engine == NATIVE:
        return Rates(**native_rates(step.setup, step.device, _power_gain(step, c)))
    family = step.device.fabric.family
    generation = family.removesuffix("-ultra")
    gain = step.device.fabric.clock * (c["ultra_gain"] if family != generation else 1.0)
    gain *= _power_gain(step, c)
    peaks, kind = step.device.gpu.peak_flops, step.setup.peak_dtype
    bf16 = peaks["bf16"] * c[f"gemm_bf16_{generation}"] * gain
    low_name = f"gemm_{kind}_{generation}"
    low = bf16 if kind not in peaks or low_name not in c else _low_peak(step, kind) * c[low_name] * gain
    if step.setup.dtype in ("fp8-row", "fp8-block"):
        low *= c["gemm_many_scales"]
    bandwidth = step.device.memory_bandwidth
    return Rates(
        low=low,
        bf16=bf16,
        grouped=c["grouped_gemm"],
        attention=peaks["bf16"] * c[f"attention_{generation}"] * gain * _attention_kernel(step.setup, c),
        scan=bandwidth * c["scan"],
        memory=bandwidth * c["memory"],
        quantize=bandwidth * c["quantize"],
        hbm=bandwidth,
    )


def _power_gain(step: StepWork, c: Constants) -> float:
    """Return the compute rate at the run's power limit against the nominal one."""
    watts, nominal = step.setup.watts, step.device.fabric.watts
    return 1.0 if watts is None else float(min(1.0, watts / nominal) ** c["power"])


def _attention_kernel(setup: StepSetup, c: Constants) -> float:
    if setup.fp8_attention:
        return c["attention_fp8"]
    return c["attention_torchtitan"] if setup.engine == "torchtitan" else 1.0


def _low_peak(step: StepWork, kind: str) -> float:
    """Peak of a dtype; nvfp4 training GEMMs gain nothing from the higher nvfp4 peak of Blackwell Ultra."""
    peaks = step.device.gpu.peak_flops
    return min(peaks[kind], 2 * peaks["fp8"]) if kind == "nvfp4" else peaks[kind]


def block_terms(block: BlockWork, r: Rates) -> dict[str, float]:
    """Return the seconds of a forward or backward by kind of work; a GEMM is bound by FLOPs or by its traffic."""
    gemm = 0.0
    for g in block.gemms:
        rate = (r.low if g.low else r.bf16) * (r.grouped if g.grouped else 1.0)
        gemm += max(g.flops / rate, g.bytes / r.hbm)
    return {
        "gemm": gemm,
        "attention": block.attention_flops / r.attention,
        "scan": block.scan_bytes / r.scan + block.scan_s,
        "memory_bound": block.memory_bytes / r.memory,
        "quantization": block.quantize_bytes / r.quantize,
    }


def transfer_time(transfer: Transfer, on: Device, c: Constants, link_efficiency: str = "link") -> float:
    """Return the seconds of a transfer: links and network work at the same time, hops one after another."""
    link = transfer.link_bytes / (on.link_bandwidth * c[link_efficiency])
    network = transfer.network_bytes / (on.network * c["network"]) if transfer.network_bytes else 0.0
    return max(link, network) + transfer.hops * c["latency"]


def step_terms(step: StepWork, c: Constants) -> dict[str, float]:
    """Return the seconds of every term; they sum to the step time."""
    setup, work, traffic, on = step.setup, step.work, step.traffic, step.device
    split, ga, r = setup.parallel, setup.ga, rates(step, c)
    forward, backward, head = (block_terms(block, r) for block in (work.forward, work.backward, work.head))
    terms = dict.fromkeys(TERMS, 0.0)
    for name in forward:
        terms[name] = forward[name] + backward[name]
    terms["tp"] = _exposed_tp(setup, c) * transfer_time(traffic.tp, on, c)
    terms["cp"] = c["exposed_cp"] * transfer_time(traffic.cp, on, c)
    all_to_all = "all_to_all" if setup.dispatcher in ("alltoall", "tokendrop") else "fused_all_to_all"
    ep = transfer_time(traffic.ep, on, c, all_to_all) + transfer_time(traffic.etp, on, c)
    hidden = (1 - c["exposed_overlapped_experts"]) * (ga - 1) / ga  # the first forward and last backward are alone
    terms["ep"] = ep * (1 - hidden if setup.overlap_experts else 1.0)
    terms["recompute"] = _recompute(step, forward, transfer_time(traffic.tp_forward, on, c) + FORWARD_EXPERTS * ep)
    exposed_pp = c["exposed_pp"] if (split.vp or 1) > 1 else 1.0
    terms["pp"] = exposed_pp * transfer_time(traffic.pp, on, c)
    if setup.local is not None:
        terms["copies"] = setup.local.bytes / r.memory
    terms["launch"] = work.kernels * c["launch"]
    terms["host"] = _exposed_host(step, c, sum(terms.values()))
    layers = sum(terms.values())
    fsdp = transfer_time(traffic.fsdp, on, c)
    terms["fsdp"] = c["exposed_fsdp"] * fsdp + max(0.0, (1 - c["exposed_fsdp"]) * fsdp - layers)
    terms["offload"] = _exposed_offload(step, c, layers + terms["fsdp"])
    micro_batch = layers + terms["fsdp"] + terms["offload"]
    head_time = sum(head.values())
    terms = {name: seconds * ga for name, seconds in terms.items()}
    for name in head:
        terms[name] += ga * head[name] / split.pp
    terms["bubble"] = _pipeline_idle(step, micro_batch, head_time)
    terms["dp"] = _exposed_dp(step, c, micro_batch + head_time / split.pp)
    terms["optimizer"] = work.step_bytes / (on.memory_bandwidth * c["optimizer"])
    terms["overhead"] = c["step"]
    nodes = max(1.0, setup.gpus / on.gpu.gpus_per_node)
    total = sum(terms.values())
    terms["jitter"] = total * c["jitter"] * math.log2(nodes)
    factor = ENGINES[setup.engine][0]
    terms["engine"] = (total + terms["jitter"]) * ((c[factor] if factor else 1.0) - 1.0)
    return terms


def _exposed_tp(setup: StepSetup, c: Constants) -> float:
    """Return the part of TP collectives that GEMMs do not hide.

    Overlapped, a collective is a ring of tp chunks, each sent during the GEMM of another: the first and last are alone.
    The native engine waits for its collectives.
    """
    is_overlapped = setup.overlap_tp and setup.engine != NATIVE
    return min(1.0, c["tp_chunks"] / setup.parallel.tp) if is_overlapped else 1.0


def _recomputed_part(setup: StepSetup) -> float:
    """Return the fraction of a rank's layers whose whole forward is repeated."""
    return min(1.0, setup.recomputed_layers / (setup.layer_count / setup.parallel.pp))


def _recompute(step: StepWork, forward: dict[str, float], collectives: float) -> float:
    """Time of repeated forwards, with their collectives where whole layers are repeated.

    Of recomputed experts only the GEMMs count, and MLA's up projections (1 % of a step) do not: published rows fit
    worse with a second dispatch and permutation, and with the projections.
    """
    setup = step.setup
    if setup.recompute == "full":
        repeated = sum(forward.values())
        if setup.engine == NATIVE and is_explicit(setup):
            repeated = explicit_recompute(setup, forward)
        return _recomputed_part(setup) * (repeated + collectives)
    if setup.recompute == "selective":
        return SELECTIVE * sum(forward.values())
    modules = {
        "core_attn": forward["attention"],
        "layernorm": forward["memory_bound"] / 4,
        "moe_act": forward["memory_bound"] / 4,
        **{name: part * forward["gemm"] for name, part in step.work.module_gemms.items()},
    }
    return sum(modules.get(name, 0.0) for name in setup.recompute_modules)


def _exposed_host(step: StepWork, c: Constants, gpu: float) -> float:
    """Time of a micro-batch that the GPU waits for launches, with the host running ahead where the GPU is slower.

    The transition is smooth, as layers differ: a norm of 4 of both times.
    """
    setup, work = step.setup, step.work
    launches = work.launches * c["host_kernel"] + work.scan_layers * c["host_mamba"]
    launches += work.captured_blocks * c["host_replay"]
    if setup.local is not None:
        launches += setup.local.count * (1.0 - setup.graphs) * c["host_collective"]
    if setup.engine.startswith("megatron"):
        launches += work.sharded_blocks * c["host_fsdp"]
    kernels = 1.0 if setup.dtype == "bf16" else QUANTIZED_KERNELS
    dispatch = work.expert_layers * (c["host_dispatch"] + c["host_expert"] * work.local_experts * kernels)
    if setup.dispatcher == "tokendrop":
        dispatch *= c["sync_free"]
    wait = work.expert_layers * c["sync"]
    factor = ENGINES[setup.engine][1]
    if factor and setup.dispatcher == "hybridep":
        dispatch, wait = dispatch * c[factor], wait * c[factor]
    if setup.graphs == 1.0:
        dispatch = wait = 0.0
    slower = c["grace"] if step.device.fabric.grace else 1.0
    part = _recomputed_part(setup)  # of the layers, which are routed and dispatched a second time
    host = slower * (launches * (1 + FORWARD * part) + dispatch * (1 + part))
    busy = gpu + slower * (1 + part) * (0.0 if setup.dispatcher == "tokendrop" else wait)
    return float((busy**HOST_NORM + host**HOST_NORM) ** (1 / HOST_NORM) - gpu)


def _exposed_offload(step: StepWork, c: Constants, micro_batch: float) -> float:
    """Time of the copies to the host that the forward does not hide, and back that the backward does not.

    The native engine copies a layer while the next one computes, others while any layer does.
    """
    if not step.offloaded or step.device.gpu.host_bandwidth is None:
        return 0.0
    copy, hiding = step.offloaded / (step.device.gpu.host_bandwidth * c["host_link"]), micro_batch
    if step.setup.engine == NATIVE:
        hiding *= min(1.0, step.setup.offload_layers / step.setup.most_layers)
    return max(0.0, copy - FORWARD * hiding) + max(0.0, copy - (1 - FORWARD) * hiding)


def _exposed_dp(step: StepWork, c: Constants, micro_batch: float) -> float:
    """Time that the last backward does not hide of reducing gradients, nor the first forward of gathering weights."""
    dp, exposed = transfer_time(step.traffic.dp, step.device, c), c["exposed_dp"]
    gradients = step.traffic.dp_gradients
    reduction = (1 - exposed) * dp * gradients - (1 - FORWARD) * micro_batch
    gather = (1 - exposed) * dp * (1 - gradients) - FORWARD * micro_batch
    return (exposed + step.traffic.dp_bucket) * dp + max(0.0, reduction) + max(0.0, gather)


def _pipeline_idle(step: StepWork, micro_batch: float, head: float) -> float:
    """Idle time of the average rank: warm-up and cool-down, and waiting for the slowest rank in between."""
    setup, split = step.setup, step.setup.parallel
    if split.pp == 1:
        return 0.0
    layer = micro_batch * split.pp / (setup.layer_count + setup.shape.mtp_layers)
    most, last = stage_layers(setup)
    slowest = max(most * layer, last * layer + head)
    return setup.ga * (slowest - micro_batch - head / split.pp) + ramp(split.pp, split.vp, setup.ga) * micro_batch
