"""How much memory a plan takes on both sides, by kind of piece: exactly what the device side will allocate."""

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import KINDS, Units, at_own_homes, piece_bytes
from llmb.perfmodel.offload.workspace import workspace_bytes

CONTEXT_BYTES = 896 << 20  # of the driver and the libraries, on a GPU: seen on an H200 at the end of a run
BATCH_BYTES = 48  # of a token of a step: itself, its label and its position, of this step and the next
WORKSPACE_ROOM = 1.1  # an allocator cannot use every gap


def buffers_of(plan: Plan) -> dict[str, int]:
    """Buffers of each kind on the device."""
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
    }


def device_bytes(model: Model, plan: Plan, gpu: str) -> dict[str, int]:
    """On the device; `inputs` are a table of rotations and the tokens of two steps, `context` is the driver's own."""
    sizes, buffers = piece_bytes(model, plan), buffers_of(plan)
    taken = {kind: buffers[kind] * sizes[kind] for kind in KINDS}
    taken["workspace"] = int(WORKSPACE_ROOM * workspace_bytes(model, plan))
    taken["inputs"] = plan.group_tokens * model.head_dim * 4 + BATCH_BYTES * plan.step_tokens
    return taken | {"context": 0 if gpu == "cpu" else CONTEXT_BYTES}


def homes_of(model: Model, plan: Plan, home_slots: dict[str, int]) -> dict[str, int]:
    """Places of each kind on the host: for all units that are not resident, else as many as wait there at once."""
    units, own = Units(model).count, at_own_homes(plan)
    resident = {"param": plan.resident_params, "grad": plan.resident_grads, "state": plan.resident_states}
    return {kind: units - resident[kind] if kind in own else home_slots.get(kind, 0) for kind in KINDS}


def host_bytes(model: Model, plan: Plan, home_slots: dict[str, int]) -> dict[str, int]:
    """On the host, of kinds that have a place there."""
    sizes = piece_bytes(model, plan)
    return {kind: places * sizes[kind] for kind, places in homes_of(model, plan, home_slots).items() if places}
