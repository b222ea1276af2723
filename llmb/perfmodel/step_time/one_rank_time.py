"""Time that a rank which runs alone does not measure: communication with its peers, and the pipeline bubble.

    time = one_rank_time(config, measured_s=11.2)
    time.communication_s        -> {"tp": 1.4, "pp": 0.3, "dp": 0.1}: seconds of a step, not hidden behind compute
    time.bubble_s

Communication is that of the collectives that the native engine calls (`communication.step_traffic`), at the calibrated
bandwidths of the GPU type that the layout is for. Of tp and ep nothing is hidden: the engine waits for them. The others
overlap with compute, by the calibrated fractions. The bubble follows from the measured step: ranks wait while the
pipeline fills and drains, and for a stage with more work than this one.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from llmb.config.parallel_layout import stage_layers
from llmb.config.spec import RunConfig, Training
from llmb.errors import LlmbError
from llmb.perfmodel.communication import ALL_REDUCE, ALL_TO_ALL, CollectiveTraffic, step_traffic
from llmb.perfmodel.pipeline_schedule import ramp
from llmb.perfmodel.shards import rank_flops
from llmb.perfmodel.step_time.cluster_fabric import Device, device
from llmb.perfmodel.step_time.collective_time import Transfer, ring_transfer, sends_outside
from llmb.perfmodel.step_time.fitted_constants import Constants
from llmb.perfmodel.step_time.step_constants import calibrated
from llmb.perfmodel.step_time.step_setup import LocalCollectives, StepSetup
from llmb.perfmodel.step_time.waterfall import transfer_time

# Mesh dimension of a collective -> kind under which its time is added.
KINDS = {"tp": "tp", "cp": "cp", "ep": "ep", "etp": "ep", "pp": "pp", "replicas": "dp", "stage": "dp", "edp": "dp"}


@dataclass(frozen=True, kw_only=True)
class OneRankTime:
    """Modelled seconds of a step, beside the measured ones of a rank."""

    communication_s: dict[str, float] | None  # exposed, by kind; none: no network is known for this type of GPU
    bubble_s: float

    @property
    def total_s(self) -> float | None:
        return None if self.communication_s is None else sum(self.communication_s.values()) + self.bubble_s


def rank_setup(config: RunConfig, setup: StepSetup) -> StepSetup:
    """Return the rank of a layout as a run of its own: the layers of its pipeline stages, the LM head on the last."""
    split, rank, shape = setup.parallel, config.pipeline_rank or 0, setup.shape
    setup = replace(setup, local=local_collectives(config))
    if split.pp == 1:
        return setup
    stages = stage_layers(setup.layer_count, split.pp, split.vp)[rank :: split.pp]
    if rank < split.pp - 1:
        shape = replace(shape, model=replace(shape.model, vocab=1))
    return replace(
        setup, shape=shape, gpus=setup.gpus // split.pp, parallel=replace(split, pp=1, vp=None),
        layers=sum(len(layers) for layers in stages),
    )  # fmt: skip


def local_collectives(config: RunConfig) -> LocalCollectives:
    """Return the copies inside the GPU that stand for a rank's collectives; that of a receive is its send's, too."""
    work, traffic = config.workload, step_traffic(config, config.pipeline_rank or 0)
    assert isinstance(work, Training)
    copied = sum(2 * collective.bytes for collective in traffic if collective.kind != "receive")
    return LocalCollectives(sum(collective.count for collective in traffic) / work.ga, copied / work.ga)


def one_rank_time(config: RunConfig, measured_s: float) -> OneRankTime:
    """Return what has to be added to the measured step of a rank that ran alone."""
    work = config.workload
    assert isinstance(work, Training)
    try:
        on = device(config.machine.gpu)
    except LlmbError:  # a CPU, or a GPU that is not in the table
        return OneRankTime(communication_s=None, bubble_s=_bubble(config, work, measured_s / work.ga))
    communication = _exposed(config, work, on, calibrated(), measured_s)
    per_step = communication.get("dp", 0.0)  # of the last micro-batch; everything else is part of each
    micro_batch = (measured_s + sum(communication.values()) - per_step) / work.ga
    return OneRankTime(communication_s=communication, bubble_s=_bubble(config, work, micro_batch))


def _exposed(config: RunConfig, work: Training, on: Device, c: Constants, measured_s: float) -> dict[str, float]:
    """Return the seconds of a step in which a rank waits for its peers, by kind."""
    parallel, seconds = config.parallel, defaultdict[str, float](float)
    for traffic in step_traffic(config, config.pipeline_rank or 0):
        if traffic.kind != "receive":  # at the same time as a send
            efficiency = "all_to_all" if traffic.kind == ALL_TO_ALL else "link"
            seconds[KINDS[traffic.dimension]] += transfer_time(_transfer(config, traffic, on), on, c, efficiency)
    sends_overlap = (parallel.vp or 1) > 1 and parallel.overlap_send
    exposed = {"cp": c["exposed_cp"], "pp": c["exposed_pp"] if sends_overlap else 1.0}
    result = {kind: exposed.get(kind, 1.0) * seconds[kind] for kind in ("tp", "cp", "ep", "pp") if seconds[kind]}
    if seconds["dp"]:  # hidden behind one micro-batch, with fsdp behind all
        kind = "fsdp" if parallel.fsdp else "dp"
        compute = measured_s if parallel.fsdp else measured_s / work.ga
        fraction = c[f"exposed_{kind}"]
        result[kind] = fraction * seconds["dp"] + max(0.0, (1 - fraction) * seconds["dp"] - compute)
    return result


def _transfer(config: RunConfig, traffic: CollectiveTraffic, on: Device) -> Transfer:
    """Return what a rank sends in all collectives of one kind."""
    parallel, size, domain = config.parallel, float(traffic.bytes), on.fabric.link_domain
    if traffic.dimension == "pp":
        outside = sends_outside(config.machine.gpus, parallel.pp, on)
        return Transfer(link_bytes=size * (1 - outside), network_bytes=size * outside, hops=traffic.count)
    strides = {"cp": parallel.tp, "replicas": parallel.tp, "ep": parallel.etp, "edp": parallel.ep * parallel.etp}
    stride, ranks = strides.get(traffic.dimension, 1), traffic.ranks
    if traffic.kind == ALL_TO_ALL:
        sent, outside = size * (ranks - 1) / ranks, max(0.0, 1 - domain / (ranks * stride))
        return Transfer(link_bytes=sent, network_bytes=size * outside, hops=traffic.count if outside else 0.0)
    return ring_transfer(on, ranks, stride, size * (2 if traffic.kind == ALL_REDUCE else 1))


def _bubble(config: RunConfig, work: Training, micro_batch: float) -> float:
    """Return the idle time of the pipeline, from the time of a micro-batch on this rank.

    Warm-up and cool-down pass through all stages, so they take the time of the average one; in between a rank waits
    for the stage with the most work.
    """
    pp = config.parallel.pp
    if pp == 1:
        return 0.0
    work_of = [rank_flops(config, rank) for rank in range(pp)]
    this_rank = work_of[config.pipeline_rank or 0]
    ends = ramp(pp, config.parallel.vp, work.ga) * micro_batch * sum(work_of) / pp / this_rank
    return ends + work.ga * micro_batch * (max(work_of) / this_rank - 1)
