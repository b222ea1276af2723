"""Candidate plan within given budgets, before it is simulated: whether it fits, and a lower bound of its time.

    costs = shape_costs(model, constraints, shape, rates)
    candidate = PlanCandidate(model, constraints, rates, shape, costs, (32, 32, 0), full_fraction=1.0)
    candidate.fits, candidate.lower_bound_s, candidate.plan, candidate.simulate_plan()

A candidate says how the tokens are divided, how many buckets of weights, gradients and state are resident, and which
fraction of the activations that fit is saved fully. Its plan follows: what memory is left on the device becomes slots
for activations, what is left on the host decides their save levels. Where the host has too little and a disk is given,
optimizer state and then weights live there: as few buckets as make the candidate fit.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.offload_plan import ATTENTION, FULL, INPUT, Plan, PlanConstraints
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import BUCKET_KINDS, bytes_on_disk
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.plan_memory import device_bytes, disk_buckets, disk_bytes, host_bytes, staging_bytes
from llmb.perfmodel.offload.shape_costs import (
    LOSS_TOKENS,
    MIN_STATE_BUFFERS,
    ShapeCosts,
    StepShape,
    plan_without_slots,
    shape_costs,
)
from llmb.perfmodel.offload.simulator import SimulationResult, simulate


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan that fits, its predicted memory and time."""

    plan: Plan
    simulation: SimulationResult
    host_bytes: dict[str, int]
    device_bytes: dict[str, int]
    disk_bytes: dict[str, int]


class SaveCounts(NamedTuple):
    """Number of (layer, chunk)s by what they save and where: on the device fully or with attention, and on the host."""

    whole: int
    light: int
    full_on_host: int
    attention_on_host: int


@dataclass(frozen=True)
class PlanCandidate:
    """One way to train; whether it fits, and a lower bound of its time, follow without simulation."""

    model: Model
    constraints: PlanConstraints
    rates: Rates
    shape: StepShape
    costs: ShapeCosts
    resident: tuple[int, int, int]
    full_fraction: float  # of the full saves that fit
    state_buffers: int = MIN_STATE_BUFFERS  # through which the state of other buckets passes
    loss_tokens: int = LOSS_TOKENS[0]
    spilled: int = 0  # buckets on disk: of state, then of weights

    @property
    def signature(self) -> tuple[object, ...]:
        """Candidates with the same signature have the same plan."""
        return self.shape, self.resident, self.saves, self.state_buffers, self.loss_tokens, self.spilled

    @property
    def fits(self) -> bool:
        return self.saves is not None

    @cached_property
    def plan(self) -> Plan:
        """The plan, with the slots and save levels that fit the budgets."""
        assert self.saves is not None
        return self._with_slots(self.saves)

    @cached_property
    def lower_bound_s(self) -> tuple[float, float]:
        """Lower bound of a step: the busiest stream if nothing ever waited; and that of the link alone."""
        assert self.saves is not None
        plan, sizes, saves, costs = self._plan_without_slots, self._sizes, self.saves, self.costs
        buckets = costs.buckets
        host_count = self._all - saves.whole - saves.light  # (layer, chunk)s whose activations are on the host
        recomputed = host_count - saves.full_on_host - saves.attention_on_host
        compute = costs.update_s + plan.rounds * (
            costs.round_s
            + (saves.light + saves.attention_on_host) * costs.recompute_attention_s
            + recomputed * costs.recompute_input_s
        )
        on_host = (
            host_count * (sizes["inp"] + sizes["kv"] / plan.chunks_per_group)
            + (host_count - recomputed) * sizes["attn"]
            + saves.full_on_host * sizes["rest"]
        )
        params, grads, states = (buckets.count - count for count in self.resident)
        layer_params = max(0, self.model.layers - plan.resident_params)
        per_round = (params + layer_params) * sizes["param"] + on_host  # layers' weights are copied twice
        passing = (plan.rounds - 1) * grads * sizes["grad"] + states * sizes["state"]
        inbound = plan.rounds * per_round + passing
        outbound = plan.rounds * on_host + passing + (params * sizes["param"] if plan.lora is None else 0)
        link = max(inbound, outbound) / self.rates.link_both_gbs / 1e9
        return max(compute, link, self._disk_s), link

    @property
    def _disk_s(self) -> float:
        """Lower bound of reading from disk: state once a step, weights in each round, those of layers twice."""
        plan, sizes = self._plan_without_slots, self._sizes
        twice = min(plan.disk_params, self.model.layers)
        weights = plan.rounds * (plan.disk_params + twice) * bytes_on_disk(sizes["param"])
        return (weights + plan.disk_states * bytes_on_disk(sizes["state"])) / max(self.rates.disk_gbs) / 1e9

    def with_least_on_disk(self) -> "PlanCandidate":
        """Return the candidate with as few buckets on disk as make it fit; itself if it fits, or none would."""
        if self.fits or not self.constraints.disk_gib:
            return self
        counts = range(1, self._most_spilled + 1)
        least = bisect_left(counts, True, key=lambda count: replace(self, spilled=count).fits)
        return replace(self, spilled=counts[least]) if least < len(counts) else self

    @property
    def _most_spilled(self) -> int:
        """Buckets that the disk has capacity for."""
        free, buckets = self.constraints.disk_gib * GIB, self.costs.buckets.count
        states = min(self._moving_states, int(free / max(1, bytes_on_disk(self._sizes["state"]))))
        if states < self._moving_states:
            return states
        free -= states * bytes_on_disk(self._sizes["state"])
        return states + min(buckets - self.resident[0], int(free / bytes_on_disk(self._sizes["param"])))

    @property
    def _moving_states(self) -> int:
        """Buckets with optimizer state that is not resident."""
        return 0 if self.constraints.lora is not None else self.costs.buckets.count - self.resident[2]

    def simulate_plan(self) -> PlanResult | None:
        """Simulate the plan; with fewer full saves, or more on disk, where the host turns out too small."""
        saves, over = self.saves, 0.0
        for _ in range(4):
            if saves is None:
                spilled = min(
                    self._most_spilled,
                    self.spilled + max(1, _ceil(over / (self._sizes["state"] or self._sizes["param"]))),
                )
                return replace(self, spilled=spilled).simulate_plan() if 0 < self.spilled < spilled else None
            plan = self._with_slots(saves)
            simulation = simulate(self.model, plan, self.rates)
            usage = host_bytes(self.model, plan, simulation.host_slots)
            over = sum(usage.values()) - self.constraints.host_gib * GIB
            if over <= 0:
                device = device_bytes(self.model, plan, self.rates.gpu)
                return PlanResult(
                    plan=plan,
                    simulation=simulation,
                    host_bytes=usage,
                    device_bytes=device,
                    disk_bytes=disk_bytes(self.model, plan),
                )
            saves = self._fewer_saves(saves, over)
        return None

    def neighbours(self) -> Iterator["PlanCandidate"]:
        """Yield candidates that differ from this one a little, in one respect."""
        if not self.spilled:
            yield from self._neighbours()
            return
        for neighbour in self._neighbours():
            yield replace(neighbour, spilled=0).with_least_on_disk()
        for count in (self.spilled + 1, self.spilled + 4):  # more activations are saved instead
            if count <= self._most_spilled:
                yield replace(self, spilled=count)

    def _neighbours(self) -> Iterator["PlanCandidate"]:
        buckets = self.costs.buckets.count
        usage = sum(device_bytes(self.model, self.plan, self.rates.gpu).values())
        for kind, name in enumerate(BUCKET_KINDS if self.constraints.lora is None else BUCKET_KINDS[:1]):
            override = getattr(self.constraints, f"resident_{name}s")
            as_many_as_fit = int((self.constraints.device_gib * GIB - usage) / self._sizes[name])
            for change in (as_many_as_fit, -4, -2, 2, 4) if override is None else ():
                count = min(buckets, max(0, self.resident[kind] + change))
                changed = [*self.resident]
                changed[kind] = count
                yield replace(self, resident=(changed[0], changed[1], changed[2]))
        if self.constraints.full_saves is None:
            for factor in (0.8, 0.9, 1.1):
                yield replace(self, full_fraction=min(1.0, self.full_fraction * factor))
        if self._moving_states:
            for count in (self.state_buffers - 1, self.state_buffers + 1):
                if MIN_STATE_BUFFERS <= count <= self.costs.buckets.vocab_shards + 2:
                    yield replace(self, state_buffers=count)
        for tokens in LOSS_TOKENS:
            if tokens <= self.shape.chunk_tokens and tokens != self.loss_tokens:
                costs = shape_costs(self.model, self.constraints, self.shape, self.rates, tokens)
                yield replace(self, loss_tokens=tokens, costs=costs)

    def _fewer_saves(self, saves: SaveCounts, over: float) -> SaveCounts | None:
        """Return counts that take so many bytes less on the host."""
        fewer = min(saves.full_on_host, _ceil(over / self._sizes["rest"]))
        over = max(0.0, over - fewer * self._sizes["rest"])
        attention = saves.attention_on_host + fewer
        less = _ceil(over / self._sizes["attn"])
        if less > attention:
            return None
        return saves._replace(full_on_host=saves.full_on_host - fewer, attention_on_host=attention - less)

    @cached_property
    def _plan_without_slots(self) -> Plan:
        plan = plan_without_slots(
            self.costs.buckets, self.constraints, self.shape, self.resident, self.loss_tokens, self.state_buffers
        )
        states = min(self.spilled, self._moving_states)
        return replace(plan, disk_states=states, disk_params=self.spilled - states) if self.spilled else plan

    @property
    def _sizes(self) -> dict[str, int]:
        return self.costs.sizes

    @property
    def _all(self) -> int:
        """(layer, chunk)s of a round."""
        return self.model.layers * self._plan_without_slots.chunks_per_round

    def _with_slots(self, saves: SaveCounts) -> Plan:
        """Add slots for those that stay, and some through which the others pass."""
        plan, on_device = self._plan_without_slots, saves.whole + saves.light
        chunks, groups, layers = plan.chunks_per_round, plan.groups_per_round, self.model.layers
        passing = 0 if on_device == self._all else 2
        counts = saves.whole, saves.light, saves.full_on_host, saves.attention_on_host
        return replace(
            plan,
            inp_slots=min(on_device + chunks + 1 + passing, (layers + 1) * chunks),
            kv_slots=min(-(-on_device // plan.chunks_per_group) + 1 + passing, layers * groups),
            attn_slots=min(on_device + passing, self._all),
            rest_slots=saves.whole + (2 if saves.full_on_host else 0),
            levels=save_levels(layers, chunks, plan.chunks_per_group, *counts),
        )

    @cached_property
    def saves(self) -> SaveCounts | None:
        """The most that both sides have capacity for; none: not even the minimum fits.

        Attention before the other activations: it avoids more recomputation per byte. Every byte that stays on the
        device does not cross the link, whatever its kind; full saves stay there first.
        """
        plan, sizes, constraints = self._plan_without_slots, self._sizes, self.constraints
        device, host = self._free
        minimum = sizes["inp"] + sizes["kv"] / plan.chunks_per_group
        light = minimum + sizes["attn"]
        capacity = device + host - self._all * minimum
        if device < 0 or host < 0 or capacity < 0:
            return None
        with_attention = min(self._all, int(capacity / sizes["attn"]))
        full = 0
        if with_attention == self._all and has_llama_layers(self.model):  # others recompute under autograd
            full = int(min(self._all, (capacity - self._all * sizes["attn"]) / sizes["rest"]) * self.full_fraction)
        if constraints.activation_slots is not None:
            whole, on_device = constraints.activation_slots, constraints.activation_slots
        else:
            whole = min(full, int(device / (light + sizes["rest"])))
            on_device = min(self._all, whole + int((device - whole * (light + sizes["rest"])) / light))
        if whole > self._all or whole * (light + sizes["rest"]) > device:
            return None
        on_host = self._all - on_device
        full_on_host = min(on_host, max(0, full - whole)) if constraints.full_saves is None else constraints.full_saves
        if full_on_host and device - on_device * light - whole * sizes["rest"] < 2 * sizes["rest"]:
            capacity = device - 2 * sizes["rest"]  # those on the host need two slots to pass through
            if capacity < 0:
                if constraints.full_saves is not None:
                    return None
                full_on_host = 0
            elif constraints.activation_slots is not None:
                return None
            else:
                whole = min(whole, int(capacity / (light + sizes["rest"])))
                on_device = min(on_device, whole + int((capacity - whole * (light + sizes["rest"])) / light))
            on_host = self._all - on_device
        host_free = host - on_host * minimum - full_on_host * sizes["attn"] - max(0, full_on_host - 2) * sizes["rest"]
        most = min(on_host - full_on_host, int(host_free / sizes["attn"]))
        attention = most if constraints.attention_saves is None else constraints.attention_saves
        if host_free < 0 or full_on_host > on_host or attention > most:
            return None
        return SaveCounts(whole, on_device - whole, full_on_host, attention)

    @property
    def _free(self) -> tuple[float, float]:
        """Bytes that buckets, and slots to pass through, leave on both sides."""
        plan, sizes, buckets = self._plan_without_slots, self._sizes, self.costs.buckets.count
        passing = (plan.param_blocks, plan.grad_blocks, plan.state_blocks)
        device, host = self.constraints.device_gib * GIB - self.costs.fixed_bytes, self.constraints.host_gib * GIB
        for kind, resident, blocks in zip(BUCKET_KINDS, self.resident, passing, strict=True):
            device -= (resident + blocks) * sizes[kind]
            if kind != "grad" or plan.keeps_gradients:
                host -= (buckets - resident) * sizes[kind]
        for kind, count in disk_buckets(plan).items():
            host += count * sizes[kind] - (staging_bytes(sizes[kind]) if count else 0)
        device -= (plan.chunks_per_round + 3) * sizes["inp"] + 4 * sizes["kv"] + 2 * sizes["attn"]
        # When backward begins, what was made last is still in the slots that all others passed through.
        host += (plan.chunks_per_round + 2) * sizes["inp"] + 2 * sizes["kv"] + 2 * sizes["attn"]
        return device, host


def _ceil(value: float) -> int:
    return -int(-value // 1)


def save_levels(
    layers: int, chunks: int, chunks_per_group: int, whole: int, light: int, full: int, attention: int
) -> str:
    """Return a letter for each chunk of a round, layer by layer.

    The last `whole` are fully saved on the device, where also the `light` ones before them are, with attention: they
    stay there longest. Of the others, which are on the host, `full` and `attention` save so much. Those that save
    everything are spread evenly, to keep the load of the link constant; those that save least are the ones whose
    attention is cheapest to recompute, the first chunks of a sequence.
    """
    on_host = layers * chunks - whole - light
    full = min(full, on_host)
    fully_saved = {i for i in range(on_host) if (i + 1) * full // on_host > i * full // on_host} if on_host else set()
    partly_saved = [i for i in range(on_host) if i not in fully_saved]
    costliest = sorted(partly_saved, key=lambda i: (-(i % chunks % chunks_per_group), _scattered(i // chunks)))
    attention_saved = set(costliest[: min(attention, len(partly_saved))])
    letters = [FULL if i in fully_saved else ATTENTION if i in attention_saved else INPUT for i in range(on_host)]
    return "".join(letters) + ATTENTION * light + FULL * whole


def _scattered(layer: int) -> int:
    """Order of layers in which any first few lie far apart: their numbers with the bits reversed."""
    return int(f"{layer:016b}"[::-1], 2)
