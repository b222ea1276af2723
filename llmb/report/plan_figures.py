"""Figures of an out-of-core plan: what `llmb-run plan` prints, and its JSON.

The names of the first group are those of published plans in recipes, so that the two can be compared. Null: not known,
as the times on a machine that was not measured.
"""

from dataclasses import asdict, dataclass
from typing import Any

from llmb.config.offload_plan import ATTENTION, FULL, INPUT, Plan
from llmb.config.spec import OutOfCore, Prediction, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel import flops, hardware, metrics
from llmb.perfmodel.offload.buffers import ParamBuckets, buffer_bytes
from llmb.perfmodel.offload.plan_memory import disk_buckets, host_slot_counts

BUSY = 0.97  # fraction of the time, from which on a stream bounds the others
JSON_NAMES = {"host_slots": "at_home", "buffer_bytes": "piece_bytes"}  # fields that the JSON calls otherwise


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Division of a step, and what the device and the host hold of it."""

    chunk_size: int  # tokens
    chunks_per_round: int
    seqs_per_round: int
    rounds_per_step: int
    seqs_per_step: int
    global_batch_tokens: int
    param_blocks: int  # on the device, residents included
    grad_blocks: int
    activation_slots: int  # fully saved (layer, chunk)s that are there when backward begins
    light_slots: int  # with input, context and attention saved
    host_activations: int  # (layer, chunk)s of a round that are on the host then
    host_fully_saved: int
    host_inp_context_attn: int
    host_inp_context: int


@dataclass(frozen=True, kw_only=True)
class BufferPlacement:
    """Placement of the buffers of one kind."""

    kind: str
    resident: int | None  # permanently on the device; null: not applicable to this kind
    passing: int  # device buffers for the others
    host_slots: int
    on_disk: int
    buffer_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """All figures of a plan."""

    name: str
    model: str
    gpu: str
    dtype: str
    update: str
    lora_rank: int  # 0: all weights are trained
    frozen_weights: str | None  # dtype; none: all weights are trained
    seqlen: int
    host_gib: float
    device_gib: float
    disk_gib: float  # 0: no disk
    layout: StepLayout
    last_chunk_tokens: int  # of a sequence or group; fewer than a chunk has where it does not divide
    param_buckets: int  # layers and vocabulary shards
    placements: tuple[BufferPlacement, ...]
    step_s: float | None
    tokens_per_s: float | None
    tflops: float | None
    mfu: float | None
    hfu: float | None
    recompute_share: float  # of the FLOPs executed
    compute_share: float | None  # of the step's time in which each is busy
    inbound_share: float | None
    outbound_share: float | None
    inbound_gb: float  # a step, in 1e9 bytes
    outbound_gb: float
    disk_read_share: float | None
    disk_write_share: float | None
    disk_read_gb: float
    disk_write_gb: float
    bound: str | None  # what bounds it, in a sentence
    device_bytes: dict[str, int]  # by kind
    host_bytes: dict[str, int]
    disk_bytes: dict[str, int]
    rates: dict[str, Any]
    published: dict[str, Any] | None  # another's plan of the same configuration, by the names of StepLayout


def plan_figures(config: RunConfig) -> PlanFigures:
    """Return the figures of a resolved out-of-core run."""
    work = config.workload
    if not isinstance(work, OutOfCore):
        raise ConfigError(f"plans are made for out-of-core runs; {config.target} is of kind {work.kind}")
    plan, prediction = work.plan, work.prediction
    if plan is None or prediction is None:
        raise ConfigError(f"{config.name} has no plan: it is made when a run is resolved")
    useful = plan.gbs * flops.run_flops_per_sequence(config)
    once = plan.gbs * flops.hardware_flops_per_sequence(config.model, plan.seqlen, "causal", 0)  # as the plan counts
    if plan.lora is not None:
        once -= plan.gbs * flops.frozen_flops_per_sequence(config.model, plan.lora, plan.seqlen)
    peak = hardware.peak_flops(config.machine.gpu, plan.dtype)
    tflops = metrics.tflops_per_gpu(useful, prediction.step_s, 1)
    executed = metrics.tflops_per_gpu(prediction.hardware_flops, prediction.step_s, 1)
    recomputed = max(0.0, 1 - once / prediction.hardware_flops)
    return PlanFigures(
        name=config.name,
        model=config.model.name,
        gpu=config.machine.gpu,
        dtype=plan.dtype,
        update=plan.update,
        lora_rank=0 if plan.lora is None else plan.lora.rank,
        frozen_weights=None if plan.lora is None else plan.lora.frozen_weights,
        seqlen=plan.seqlen,
        host_gib=work.host_gib,
        device_gib=work.device_gib,
        disk_gib=work.disk_gib,
        layout=step_layout(plan, prediction),
        last_chunk_tokens=plan.group_tokens - (plan.chunks_per_group - 1) * plan.chunk_tokens,
        param_buckets=ParamBuckets(config.model).count,
        placements=_placements(config, plan, prediction),
        step_s=prediction.step_s,
        tokens_per_s=metrics.tokens_per_s(plan.seqlen, plan.gbs, prediction.step_s),
        tflops=tflops,
        mfu=metrics.mfu(tflops, peak),
        hfu=metrics.mfu(executed, peak),
        recompute_share=recomputed,
        compute_share=_fraction(prediction.compute_s, prediction.step_s),
        inbound_share=_fraction(prediction.inbound_s, prediction.step_s),
        outbound_share=_fraction(prediction.outbound_s, prediction.step_s),
        inbound_gb=prediction.inbound_bytes / hardware.GB,
        outbound_gb=prediction.outbound_bytes / hardware.GB,
        disk_read_share=_fraction(prediction.disk_read_s, prediction.step_s),
        disk_write_share=_fraction(prediction.disk_write_s, prediction.step_s),
        disk_read_gb=prediction.disk_read_bytes / hardware.GB,
        disk_write_gb=prediction.disk_write_bytes / hardware.GB,
        bound=_bound(prediction, recomputed),
        device_bytes=prediction.device_bytes,
        host_bytes=prediction.host_bytes,
        disk_bytes=prediction.disk_bytes,
        rates=prediction.rates,
        published=config.reference.plan if config.reference else None,
    )


def step_layout(plan: Plan, prediction: Prediction) -> StepLayout:
    """Return the figures that published plans have, too."""
    full, attention, least = (plan.levels.count(level) for level in (FULL, ATTENTION, INPUT))
    full_on_host = prediction.host_slots.get("rest", 0)
    light_on_host = min(attention, max(0, prediction.host_slots.get("attn", 0) - full_on_host))
    return StepLayout(
        chunk_size=min(plan.chunk_tokens, plan.group_tokens),
        chunks_per_round=plan.chunks_per_round,
        seqs_per_round=plan.groups_per_round * plan.seqs_per_group,
        rounds_per_step=plan.rounds,
        seqs_per_step=plan.gbs,
        global_batch_tokens=plan.step_tokens,
        param_blocks=plan.resident_params + plan.param_blocks,
        grad_blocks=plan.resident_grads + plan.grad_blocks,
        activation_slots=full - full_on_host,
        light_slots=attention - light_on_host,
        host_activations=full_on_host + light_on_host + least,
        host_fully_saved=full_on_host,
        host_inp_context_attn=light_on_host,
        host_inp_context=least,
    )


def _placements(config: RunConfig, plan: Plan, prediction: Prediction) -> tuple[BufferPlacement, ...]:
    sizes = buffer_bytes(config.model, plan)
    host_slots = host_slot_counts(config.model, plan, prediction.host_slots)
    kinds = (
        ("param", plan.resident_params, plan.param_blocks),
        ("grad", plan.resident_grads, plan.grad_blocks),
        ("state", plan.resident_states, plan.state_blocks),
        ("inp", None, plan.inp_slots),
        ("kv", None, plan.kv_slots),
        ("attn", None, plan.attn_slots),
        ("rest", None, plan.rest_slots),
    )
    return tuple(
        BufferPlacement(
            kind=kind,
            resident=resident,
            passing=passing,
            host_slots=host_slots[kind],
            on_disk=disk_buckets(plan).get(kind, 0),
            buffer_bytes=sizes[kind],
        )
        for kind, resident, passing in kinds
    )


def _fraction(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _bound(prediction: Prediction, recomputed: float) -> str | None:
    """Return what limits the step time, in a sentence."""
    compute = _fraction(prediction.compute_s, prediction.step_s)
    inbound, outbound = (
        _fraction(prediction.inbound_s, prediction.step_s),
        _fraction(prediction.outbound_s, prediction.step_s),
    )
    if compute is None or inbound is None or outbound is None:
        return None
    recompute = f", {_percent(recomputed)} of it to recompute activations" if recomputed >= 0.005 else ""
    link = f"the link is busy {_percent(inbound)} of it inbound and {_percent(outbound)} outbound"
    read, written = (
        _fraction(seconds, prediction.step_s) or 0.0 for seconds in (prediction.disk_read_s, prediction.disk_write_s)
    )
    link += f", the disk {_percent(read)} reading and {_percent(written)} writing" if prediction.disk_bytes else ""
    if compute >= BUSY:
        return f"compute-bound: the device computes {_percent(compute)} of the time{recompute}; {link}"
    waits = f"the device waits {_percent(1 - compute)} of the time"
    if max(inbound, outbound) >= BUSY:
        direction, fraction = ("to", inbound) if inbound >= outbound else ("from", outbound)
        return f"link-bound: {waits}, while copies {direction} the device take {_percent(fraction)} of it"
    if max(read, written) >= BUSY:
        return f"disk-bound: {waits}, while {link}"
    return f"latency-bound: {waits} for copies that cannot begin sooner, though {link}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def as_data(figures: PlanFigures) -> dict[str, Any]:
    """Return plain data for JSON: flat where the published names are."""
    plain = asdict(figures)
    plain["units"] = plain.pop("param_buckets")
    plain["places"] = [
        {JSON_NAMES.get(name, name): value for name, value in placement.items()}
        for placement in plain.pop("placements")
    ]
    return {**plain.pop("layout"), **plain}
