"""Division of a step's tokens, and the bytes and seconds that all candidate plans with this division have in common.

shape_costs(model, constraints, StepShape(gbs=16, chunk_tokens=8192, seqs_per_group=1, groups_per_round=2), rates)
"""

from dataclasses import dataclass

from llmb.config.model import Model
from llmb.config.offload_plan import ATTENTION, INPUT, Plan, PlanConstraints
from llmb.perfmodel.offload.buffers import ParamBuckets, buffer_bytes
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.plan_memory import device_bytes
from llmb.perfmodel.offload.step_tasks import round_chunks
from llmb.perfmodel.offload.task_durations import TaskDurations

MIN_STATE_BUFFERS = 2  # one in use, one being filled or copied out
FIXED_KINDS = ("dstream", "dkv", "workspace", "inputs", "context", "adapters")
LOSS_TOKENS = (2048, 4096, 8192)  # tokens per loss chunk: larger ones accumulate into the head's gradient less often


@dataclass(frozen=True)
class StepShape:
    """Division of a step's tokens."""

    gbs: int
    chunk_tokens: int
    seqs_per_group: int
    groups_per_round: int


@dataclass(frozen=True)
class ShapeCosts:
    """Bytes and seconds that all candidates of a shape have in common."""

    buckets: ParamBuckets
    sizes: dict[str, int]  # of a buffer, by kind
    fixed_bytes: int  # bytes on the device besides buckets and slots
    update_s: float  # of all buckets, or adapters
    round_s: float  # forward and backward without recomputation
    recompute_attention_s: float  # mean recomputation of a (layer, chunk) that saves its attention
    recompute_input_s: float  # and of one that does not


def shape_costs(
    model: Model, constraints: PlanConstraints, shape: StepShape, rates: Rates, loss_tokens: int = LOSS_TOKENS[0]
) -> ShapeCosts:
    """Return the costs of a shape."""
    buckets = ParamBuckets(model)
    plan = plan_without_slots(buckets, constraints, shape, (0, 0, 0), loss_tokens)
    durations, chunks = TaskDurations(model, plan, rates), round_chunks(plan, 0)

    def mean(level: str) -> float:
        return sum(durations.seconds_of(durations.recompute(chunk, level)) for chunk in chunks) / len(chunks)

    forward_backward_s = sum(
        durations.seconds_of(durations.forward(chunk) + durations.backward(chunk)) for chunk in chunks
    )
    head_s = sum(durations.seconds_of(durations.head(chunk)) for chunk in chunks)
    usage = device_bytes(model, plan, rates.gpu)
    return ShapeCosts(
        buckets=buckets,
        sizes=buffer_bytes(model, plan),
        fixed_bytes=sum(usage.get(kind, 0) for kind in FIXED_KINDS),
        update_s=durations.seconds_of(durations.update) * (buckets.count if plan.lora is None else 1),
        round_s=model.layers * forward_backward_s + head_s,
        recompute_attention_s=mean(ATTENTION),
        recompute_input_s=mean(INPUT),
    )


def plan_without_slots(
    buckets: ParamBuckets,
    constraints: PlanConstraints,
    shape: StepShape,
    resident: tuple[int, int, int],
    loss_tokens: int,
    state_buffers: int = MIN_STATE_BUFFERS,
) -> Plan:
    """Return the plan without slots and levels."""
    params, grads, states = resident
    has_updates = constraints.lora is None  # of buckets
    return Plan(
        dtype=constraints.dtype,
        fp8_recipe=constraints.fp8_recipe,
        seqlen=constraints.seqlen,
        gbs=shape.gbs,
        chunk_tokens=shape.chunk_tokens,
        seqs_per_group=shape.seqs_per_group,
        groups_per_round=shape.groups_per_round,
        loss_tokens=min(shape.chunk_tokens, loss_tokens),
        update=constraints.update,
        update_at="backward" if constraints.clip is None or not has_updates else "forward",
        resident_params=params,
        resident_grads=grads,
        resident_states=states,
        param_blocks=min(buckets.count - params, buckets.vocab_shards + 2),
        grad_blocks=min(buckets.count - grads, buckets.vocab_shards + 2) if has_updates else 0,
        state_blocks=min(buckets.count - states, state_buffers) if has_updates else 0,
        inp_slots=0,
        kv_slots=0,
        attn_slots=0,
        rest_slots=0,
        levels="",
        lora=constraints.lora,
    )
