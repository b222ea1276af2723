"""Memory that a plan takes on device, host and disk, by kind of buffer: exactly what the engine allocates."""

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.perfmodel.offload.buffers import (
    KINDS,
    STAGING_BUFFERS,
    ParamBuckets,
    buffer_bytes,
    bytes_on_disk,
    kinds_with_own_host_slots,
)
from llmb.perfmodel.offload.workspace import workspace_bytes

CONTEXT_BYTES = 896 << 20  # CUDA context and libraries, as seen on an H200 at the end of a run
BATCH_BYTES = 48  # per token of a step: token, label and position, of this step and the next
# Spare part of the workspace, since an allocator cannot use every gap: at least cuBLAS's own workspace (32 MiB on
# Hopper) and the pages of torch's expandable segments (20 MiB each).
SPARE_FRACTION = 0.1
MIN_SPARE_BYTES = 64 << 20


def buffer_counts(plan: Plan) -> dict[str, int]:
    """Return the number of device buffers of each kind."""
    adapters = {} if plan.lora is None else {"adapters": 1}
    return {
        "param": plan.resident_params + plan.param_blocks,
        "grad": plan.resident_grads + plan.grad_blocks,
        "state": plan.resident_states + plan.state_blocks,
        "inp": plan.inp_slots,
        "kv": plan.kv_slots,
        "attn": plan.attn_slots,
        "rest": plan.rest_slots,
        "dstream": plan.chunks_per_round,
        "dkv": 1,
    } | adapters


def device_bytes(model: Model, plan: Plan, gpu: str) -> dict[str, int]:
    """Return bytes on the device; `inputs` are RoPE tables and the tokens of two steps, `context` is the driver's.

    `adapters` are those of LoRA, with their gradients and optimizer state.
    """
    sizes, counts = buffer_bytes(model, plan), buffer_counts(plan)
    usage = {kind: count * sizes[kind] for kind, count in counts.items()}
    workspace = workspace_bytes(model, plan)
    spare = SPARE_FRACTION * workspace
    usage["workspace"] = int(workspace + (spare if gpu == "cpu" else max(spare, MIN_SPARE_BYTES)))
    rope_tables = 1 if model.local_rope is None else 2
    usage["inputs"] = rope_tables * plan.group_tokens * model.head_dim * 4 + BATCH_BYTES * plan.step_tokens
    return usage | {"context": 0 if gpu == "cpu" else CONTEXT_BYTES}


def host_slot_counts(model: Model, plan: Plan, host_slots: dict[str, int]) -> dict[str, int]:
    """Return the host slots of each kind: one per bucket that is neither resident nor on disk, else the peak in use."""
    buckets, own_slots = ParamBuckets(model).count, kinds_with_own_host_slots(plan)
    elsewhere = {
        "param": plan.resident_params + plan.disk_params,
        "grad": plan.resident_grads,
        "state": plan.resident_states + plan.disk_states,
    }
    return {kind: buckets - elsewhere[kind] if kind in own_slots else host_slots.get(kind, 0) for kind in KINDS}


def host_bytes(model: Model, plan: Plan, host_slots: dict[str, int]) -> dict[str, int]:
    """Return bytes on the host, of kinds that have slots there; `staging` is what passes between disk and device."""
    sizes = buffer_bytes(model, plan)
    usage = {kind: count * sizes[kind] for kind, count in host_slot_counts(model, plan, host_slots).items() if count}
    staging = sum(staging_bytes(sizes[kind]) for kind, count in disk_buckets(plan).items() if count)
    return usage | ({"staging": staging} if staging else {})


def staging_bytes(size: int) -> int:
    """Return bytes of the staging buffers of a kind with buffers of this size: read ahead and written behind."""
    return 2 * STAGING_BUFFERS * bytes_on_disk(size)


def disk_buckets(plan: Plan) -> dict[str, int]:
    """Return the number of buckets on disk by kind."""
    return {"param": plan.disk_params, "state": plan.disk_states}


def disk_bytes(model: Model, plan: Plan) -> dict[str, int]:
    """Return bytes on disk, of kinds that live there."""
    sizes = buffer_bytes(model, plan)
    return {kind: count * bytes_on_disk(sizes[kind]) for kind, count in disk_buckets(plan).items() if count}
