"""Communication of one rank: bytes and messages of each parallel dimension, and the bandwidth they travel with.

Ring collectives move (n - 1) / n of the data. Ranks are numbered tp, cp, dp, pp from the inside out, so a group of n
ranks with stride s stays in one NVLink domain when n * s does. Between domains every GPU has its own network card, and
a group with g members per domain uses g of them.
"""

from dataclasses import dataclass, replace

from llmb.perfmodel.params import BYTES
from llmb.perfmodel.step_time.cluster_fabric import Device
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.step_time.step_work import (
    BF16,
    OPERAND_BYTES,
    RankWork,
    block_counts,
    gathers_quantized,
    gradient_bytes,
)

TP_GATHERS, TP_SCATTERS = (1, 2), (1, 1)  # per block, forward and backward, which gathers the input again
# Weights of a bucket whose gradients Megatron reduces together (its DDP's default): at least so many, and more the more
# replicas there are, as a ring sends each of them its own chunk.
BUCKET_WEIGHTS, BUCKET_WEIGHTS_PER_RANK = 40e6, 1e6
LINK_HOP = 0.2  # of the latency between domains: a hop of a ring inside one takes about 2 us, not 10
FSDP_COLLECTIVES = 3  # of a layer and micro-batch: weights gathered forward and backward, gradients reduced


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Data that a rank sends in a micro-batch or a step."""

    link_bytes: float = 0.0  # inside an NVLink domain
    network_bytes: float = 0.0  # of each network card
    hops: float = 0.0  # latencies between domains, one after another


@dataclass(frozen=True, kw_only=True)
class RankTraffic:
    """Communication of the average pipeline rank."""

    tp: Transfer  # per micro-batch
    tp_forward: Transfer  # its part that recompute repeats
    cp: Transfer
    ep: Transfer
    etp: Transfer  # gather and scatter of routed tokens
    pp: Transfer
    fsdp: Transfer
    dp: Transfer  # per step
    dp_gradients: float  # fraction of dp that is the reduction of gradients; the rest gathers weights
    dp_bucket: float  # fraction of dp that is one bucket: nothing is left to compute while the last one is reduced


NOTHING = Transfer()
NO_TRAFFIC = RankTraffic(  # of a rank without peers
    tp=NOTHING, tp_forward=NOTHING, cp=NOTHING, ep=NOTHING, etp=NOTHING, pp=NOTHING, fsdp=NOTHING, dp=NOTHING,
    dp_gradients=0.0, dp_bucket=0.0,
)  # fmt: skip


def rank_traffic(setup: StepSetup, work: RankWork, device: Device) -> RankTraffic:
    """Return what the average pipeline rank sends."""
    split = setup.parallel
    fsdp = split.fsdp and setup.sharding_ranks > 1
    tp_forward, tp_backward = (_tp_bytes(setup, *counts) for counts in zip(TP_GATHERS, TP_SCATTERS, strict=True))
    data = _data_parallel(setup, work, device)
    return RankTraffic(
        tp=ring_transfer(device, split.tp, 1, tp_forward + tp_backward),
        tp_forward=ring_transfer(device, split.tp, 1, tp_forward),
        cp=_cp_ring(setup, device),
        ep=_experts(setup, work, device),
        etp=_expert_tp(setup, work),
        pp=_sends(setup, device),
        fsdp=data if fsdp else NOTHING,
        dp=NOTHING if fsdp or setup.task == "lora" else data,
        dp_gradients=_gradient_fraction(setup, work),
        dp_bucket=_bucket_fraction(setup, work),
    )


def ring_transfer(device: Device, ranks: int, stride: int, size: float) -> Transfer:
    """Ring collective of `size` bytes in all over `ranks` ranks."""
    if ranks <= 1 or not size:
        return Transfer()
    sent, domain = size * (ranks - 1) / ranks, device.fabric.link_domain
    if ranks * stride <= domain:
        return Transfer(link_bytes=sent)
    members = max(1, domain // stride)
    hops = ranks / members * (1 + LINK_HOP * (members - 1))
    return Transfer(link_bytes=sent if members > 1 else 0.0, network_bytes=sent / members, hops=hops)


def _blocks_with_tp(setup: StepSetup) -> float:
    """Blocks of a rank whose GEMMs tp splits; routed experts are split by etp instead."""
    model, counts = setup.shape.model, block_counts(setup)
    shared = model.experts is not None and model.experts.shared > 0
    experts = counts.get("experts", 0) * (1.0 if shared or setup.parallel.etp > 1 else 0.0)
    return sum(count for kind, count in counts.items() if kind != "experts") + experts


def _tp_bytes(setup: StepSetup, gathers: int, scatters: int) -> float:
    """Bytes of gathers, of quantized values where the engine has them, and of scatters in every block."""
    gathered = OPERAND_BYTES[setup.dtype] if gathers_quantized(setup) else BF16
    return _blocks_with_tp(setup) * setup.tokens * setup.shape.model.hidden * (gathers * gathered + scatters * BF16)


def _cp_ring(setup: StepSetup, device: Device) -> Transfer:
    """Ring of sends: unlike a collective, a rank whose neighbour is in another domain has one network card for it."""
    split = setup.parallel
    ring = ring_transfer(device, split.cp, split.tp, _cp_bytes(setup))
    if not ring.network_bytes:
        return ring
    return replace(ring, network_bytes=ring.network_bytes * max(1, device.fabric.link_domain // split.tp))


def _cp_bytes(setup: StepSetup) -> float:
    """Keys and values of the whole sequence, forward and backward, and their gradients."""
    model, split, counts = setup.shape.model, setup.parallel, block_counts(setup)
    layers = counts.get("attention", 0) + counts.get("mla", 0)
    width = model.kv_heads * model.head_dim
    return 3 * 2 * width / split.tp * layers * setup.tokens * split.cp * BF16


def _experts(setup: StepSetup, work: RankWork, device: Device) -> Transfer:
    """Dispatch and combine, forward and backward."""
    experts, split = setup.shape.model.experts, setup.parallel
    ranks = split.ep * split.etp
    if experts is None or split.ep <= 1:
        return Transfer()
    token = setup.tokens / split.tp * (experts.latent or setup.shape.model.hidden) * BF16
    domain = device.fabric.link_domain
    passes = 4.0 * work.expert_layers
    routed = passes * token * experts.top_k * (split.ep - 1) / split.ep
    if ranks <= domain:
        return Transfer(link_bytes=routed)
    nodes = ranks / domain
    copies = experts.top_k * (nodes - 1) / nodes
    if setup.dispatcher != "alltoall":  # a token travels once to each node
        copies = (nodes - 1) * (1 - (1 - 1 / nodes) ** experts.top_k)
    return Transfer(link_bytes=routed, network_bytes=passes * token * copies, hops=passes)


def _expert_tp(setup: StepSetup, work: RankWork) -> Transfer:
    """Tokens of all etp ranks gathered before their experts and scattered after them, forward and backward."""
    experts, split = setup.shape.model.experts, setup.parallel
    if experts is None or split.etp <= 1:
        return Transfer()
    routed = setup.tokens / split.tp * experts.top_k * (experts.latent or setup.shape.model.hidden) * BF16
    return Transfer(link_bytes=4.0 * work.expert_layers * routed * (split.etp - 1))


def _sends(setup: StepSetup, device: Device) -> Transfer:
    """Activations and their gradients between pipeline stages."""
    split = setup.parallel
    if split.pp == 1:
        return Transfer()
    stages = split.vp or 1
    size = 2.0 * stages * setup.tokens / split.tp * setup.shape.model.hidden * BF16
    outside = sends_outside(setup.gpus, split.pp, device)
    return Transfer(link_bytes=size * (1 - outside), network_bytes=size * outside, hops=2.0 * stages)


def sends_outside(gpus: int, pp: int, device: Device) -> float:
    """Return the fraction of a pipeline's sends that leave the link domain: stages are gpus / pp ranks apart."""
    domain = device.fabric.link_domain
    return 0.0 if gpus <= domain else min(1.0, gpus / pp / domain)


def _bucket_fraction(setup: StepSetup, work: RankWork) -> float:
    """Return the fraction of a rank's weights in one bucket of Megatron's gradient reduction."""
    if not setup.engine.startswith("megatron"):
        return 0.0
    replicas = setup.dp * setup.parallel.cp
    return min(
        1.0, max(BUCKET_WEIGHTS, BUCKET_WEIGHTS_PER_RANK * replicas) / (work.dense_weights + work.routed_weights)
    )


def _reduced_bytes(setup: StepSetup) -> float:
    return BF16 if setup.parallel.fsdp else gradient_bytes(setup)


def _gathered_bytes(setup: StepSetup) -> float:
    """Return the bytes in which a weight of the blocks is gathered.

    With one scale per tensor Megatron gathers updated weights in fp8 (fp8_params, later fp8_param_gather). Not those of
    MXFP8, whose copies for rows and for columns have scales of their own: they travel in bf16 and are quantized by
    every rank. Recipes with other scales leave fp8_param_gather off.
    """
    if setup.parallel.fsdp:  # in the dtype of its GEMM, by JAX before it is quantized
        return BF16 if setup.dtype == "bf16" or setup.engine == "jax" else BYTES["fp8"]
    return BYTES["fp8"] if setup.engine.startswith("megatron") and setup.dtype == "fp8" else BF16


def _gradient_fraction(setup: StepSetup, work: RankWork) -> float:
    """Return the fraction of data-parallel bytes that reduces gradients."""
    weights = work.dense_weights + work.routed_weights
    gathered = _gathered_bytes(setup) * (weights - work.end_weights) + BF16 * work.end_weights
    reduced = _reduced_bytes(setup) * weights
    return reduced / (reduced + gathered)


def _data_parallel(setup: StepSetup, work: RankWork, device: Device) -> Transfer:
    """Gradients reduced and weights gathered; with FSDP weights twice, and all of it for every micro-batch."""
    split = setup.parallel
    fsdp, shards = split.fsdp, setup.sharding_ranks
    gathers, weight_bytes = 2.0 if fsdp else 1.0, _gathered_bytes(setup)
    per_weight = gathers * weight_bytes + _reduced_bytes(setup)
    ends = 0.0 if fsdp else (BF16 - weight_bytes) * work.end_weights  # whose GEMMs are in bf16
    dense = ring_transfer(device, shards, split.tp, per_weight * work.dense_weights + ends)
    replicas = setup.dp * split.cp * split.tp // (split.ep * split.etp)
    routed = ring_transfer(device, replicas, split.ep * split.etp, per_weight * work.routed_weights)
    collectives = _data_parallel_collectives(setup, work)
    # Groups that each hold all weights reduce their shards once a step.
    groups = ring_transfer(
        device, setup.dp * split.cp // shards, split.tp * shards, 2.0 * BF16 * work.dense_weights / shards / setup.ga
    )
    return Transfer(
        link_bytes=dense.link_bytes + routed.link_bytes + groups.link_bytes,
        network_bytes=dense.network_bytes + routed.network_bytes + groups.network_bytes,
        hops=(dense.hops + routed.hops) * collectives + groups.hops,
    )


def _data_parallel_collectives(setup: StepSetup, work: RankWork) -> float:
    """Return how many rings follow one another: three a layer with FSDP, two a bucket in Megatron."""
    if setup.parallel.fsdp:
        return FSDP_COLLECTIVES * setup.layer_count / setup.parallel.pp
    bucket = _bucket_fraction(setup, work)
    return 2.0 / bucket if bucket else 1.0
