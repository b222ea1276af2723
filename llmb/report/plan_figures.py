"""Everything a plan of an out-of-core run says, in figures: what `llmb-run plan` prints, and its JSON.

The names of the first group are those under which recipes keep published plans, so that the two can be laid side by
side. Null: not known, as the times on a machine that nobody has measured.
"""

from dataclasses import asdict, dataclass
from typing import Any

from llmb.config.offload_plan import ATTENTION, FULL, INPUT, Plan
from llmb.config.spec import OutOfCore, Prediction, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel import flops, hardware, metrics
from llmb.perfmodel.offload.buffers import Units, piece_bytes
from llmb.perfmodel.offload.plan_memory import homes_of

BUSY = 0.97  # of the time, from which on a lane is said to bound the others


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a step is cut, and what the device and the host hold of it."""

    chunk_size: int  # tokens
    chunks_per_round: int
    seqs_per_round: int
    rounds_per_step: int
    seqs_per_step: int
    global_batch_tokens: int
    param_blocks: int  # on the device, residents included
    grad_blocks: int
    activation_slots: int  # whole (layer, chunk)s that are there when a round turns back
    light_slots: int  # of which input, context and attention are
    host_activations: int  # (layer, chunk)s of a round that wait on the host then
    host_fully_saved: int
    host_inp_context_attn: int
    host_inp_context: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one kind of piece rests."""

    kind: str
    resident: int | None  # on the device for good; null: no piece of this kind is
    passing: int  # buffers on the device for the others
    at_home: int  # places on the host
    piece_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """All of it."""

    name: str
    model: str
    gpu: str
    dtype: str
    update: str
    seqlen: int
    host_gib: float
    device_gib: float
    cut: Cut
    last_chunk_tokens: int  # of a sequence or group; fewer than a chunk has where it does not divide
    units: int  # that weights are cut into: the layers and parts of the vocabulary
    places: tuple[Place, ...]
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
    bound: str | None  # what bounds it, in a sentence
    device_bytes: dict[str, int]  # by kind
    host_bytes: dict[str, int]
    rates: dict[str, Any]
    published: dict[str, Any] | None  # another's plan of the same configuration, by the names of Cut


def plan_figures(config: RunConfig) -> PlanFigures:
    """Of a resolved out-of-core run."""
    work = config.workload
    if not isinstance(work, OutOfCore):
        raise ConfigError(f"plans are made for out-of-core runs; {config.target} is of kind {work.kind}")
    plan, expected = work.plan, work.prediction
    if plan is None or expected is None:
        raise ConfigError(f"{config.name} has no plan: it is made when a run is resolved")
    useful = plan.gbs * flops.train_flops_per_sequence(config.model, plan.seqlen, config.flops_convention)
    once = plan.gbs * flops.hardware_flops_per_sequence(config.model, plan.seqlen, "causal", 0)  # as the plan counts
    peak = hardware.peak_flops(config.machine.gpu, plan.dtype)
    tflops = metrics.tflops_per_gpu(useful, expected.step_s, 1)
    executed = metrics.tflops_per_gpu(expected.hardware_flops, expected.step_s, 1)
    recomputed = max(0.0, 1 - once / expected.hardware_flops)
    return PlanFigures(
        name=config.name,
        model=config.model.name,
        gpu=config.machine.gpu,
        dtype=plan.dtype,
        update=plan.update,
        seqlen=plan.seqlen,
        host_gib=work.host_gib,
        device_gib=work.device_gib,
        cut=cut_of(plan, expected),
        last_chunk_tokens=plan.group_tokens - (plan.chunks_per_group - 1) * plan.chunk_tokens,
        units=Units(config.model).count,
        places=_places(config, plan, expected),
        step_s=expected.step_s,
        tokens_per_s=metrics.tokens_per_s(plan.seqlen, plan.gbs, expected.step_s),
        tflops=tflops,
        mfu=metrics.mfu(tflops, peak),
        hfu=metrics.mfu(executed, peak),
        recompute_share=recomputed,
        compute_share=_share(expected.compute_s, expected.step_s),
        inbound_share=_share(expected.inbound_s, expected.step_s),
        outbound_share=_share(expected.outbound_s, expected.step_s),
        inbound_gb=expected.inbound_bytes / hardware.GB,
        outbound_gb=expected.outbound_bytes / hardware.GB,
        bound=_bound(expected, recomputed),
        device_bytes=expected.device_bytes,
        host_bytes=expected.host_bytes,
        rates=expected.rates,
        published=config.reference.plan if config.reference else None,
    )


def cut_of(plan: Plan, expected: Prediction) -> Cut:
    """The figures that other plans of this kind have, too."""
    full, attention, least = (plan.levels.count(level) for level in (FULL, ATTENTION, INPUT))
    full_at_home = expected.home_slots.get("rest", 0)
    light_at_home = min(attention, max(0, expected.home_slots.get("attn", 0) - full_at_home))
    return Cut(
        chunk_size=min(plan.chunk_tokens, plan.group_tokens),
        chunks_per_round=plan.chunks_per_round,
        seqs_per_round=plan.groups_per_round * plan.seqs_per_group,
        rounds_per_step=plan.rounds,
        seqs_per_step=plan.gbs,
        global_batch_tokens=plan.step_tokens,
        param_blocks=plan.resident_params + plan.param_blocks,
        grad_blocks=plan.resident_grads + plan.grad_blocks,
        activation_slots=full - full_at_home,
        light_slots=attention - light_at_home,
        host_activations=full_at_home + light_at_home + least,
        host_fully_saved=full_at_home,
        host_inp_context_attn=light_at_home,
        host_inp_context=least,
    )


def _places(config: RunConfig, plan: Plan, expected: Prediction) -> tuple[Place, ...]:
    sizes, homes = piece_bytes(config.model, plan), homes_of(config.model, plan, expected.home_slots)
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
        Place(kind=kind, resident=stay, passing=passing, at_home=homes[kind], piece_bytes=sizes[kind])
        for kind, stay, passing in kinds
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _bound(expected: Prediction, recomputed: float) -> str | None:
    """What a faster part would have to be for the step to be faster."""
    computing = _share(expected.compute_s, expected.step_s)
    inbound, outbound = _share(expected.inbound_s, expected.step_s), _share(expected.outbound_s, expected.step_s)
    if computing is None or inbound is None or outbound is None:
        return None
    again = f", {_percent(recomputed)} of it on what was not kept" if recomputed >= 0.005 else ""
    link = f"the link carries something {_percent(inbound)} of it inward and {_percent(outbound)} outward"
    if computing >= BUSY:
        return f"computation bounds it: the device computes {_percent(computing)} of the time{again}; {link}"
    waits = f"the device waits {_percent(1 - computing)} of the time"
    if max(inbound, outbound) >= BUSY:
        way, share = ("to", inbound) if inbound >= outbound else ("from", outbound)
        return f"the link bounds it: {waits}, while copies {way} the device take {_percent(share)} of it"
    return f"order bounds it: {waits} for copies that cannot begin sooner, though {link}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def as_data(figures: PlanFigures) -> dict[str, Any]:
    """For JSON: flat where the published names are."""
    plain = asdict(figures)
    return {**plain.pop("cut"), **plain}
