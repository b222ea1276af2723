"""One way to train within given budgets, before it is gone through: does it fit, and how fast can it be at best?

    draft = Draft(model, wishes, rates, shape, facts_of(model, wishes, shape, rates), (32, 32, 0), full_share=1.0)
    draft.fits, draft.bound_s, draft.plan, draft.planned()

A draft says how the tokens are cut, how many units of weights, gradients and state stay on the device, and which share
of the activations that there is room for is kept whole. Its plan follows: what memory is left on the device becomes
slots for activations, what is left on the host decides their levels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from llmb.config.offload_plan import ATTENTION, INPUT, Plan, Update
from llmb.config.spec import Model
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import OF_UNITS, Units, piece_bytes
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.plan_memory import device_bytes, host_bytes
from llmb.perfmodel.offload.save_levels import levels
from llmb.perfmodel.offload.simulator import Simulated, simulate
from llmb.perfmodel.offload.step_tasks import chunks_of
from llmb.perfmodel.offload.task_durations import Durations

PASSING_STATES = 2  # at least: one is used, one is filled or sent home
LOSS_TOKENS = (2048, 4096, 8192)  # whose logits exist at once: more of them add to the head's gradient less often


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is given. Null: the plan chooses."""

    dtype: Literal["fp32", "bf16", "fp8"]
    seqlen: int
    host_gib: float
    device_gib: float
    update: Update = "stochastic"
    clip: float | None = None
    gbs: int | None = None
    chunk_tokens: int | None = None
    seqs_per_round: int | None = None
    resident_params: int | None = None
    resident_grads: int | None = None
    resident_states: int | None = None
    activation_slots: int | None = None  # whole (layer, chunk)s that stay on the device
    full_saves: int | None = None  # of those that wait on the host
    attention_saves: int | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan that fits, what it will take, and how long."""

    plan: Plan
    simulated: Simulated
    host_bytes: dict[str, int]
    device_bytes: dict[str, int]


@dataclass(frozen=True)
class Shape:
    """How a step's tokens are cut."""

    gbs: int
    chunk_tokens: int
    seqs_per_group: int
    groups_per_round: int


@dataclass(frozen=True)
class Facts:
    """What all drafts of a shape have in common: bytes, and seconds of computation."""

    units: Units
    sizes: dict[str, int]  # of pieces
    besides: int  # bytes on the device beside units and slots
    update_s: float  # of a unit
    round_s: float  # forward and back, nothing computed again
    again_attention_s: float  # what a (layer, chunk) computes again that keeps its attention, on average
    again_input_s: float  # and one that does not


def facts_of(model: Model, wishes: Wishes, shape: Shape, rates: Rates, loss_tokens: int = LOSS_TOKENS[0]) -> Facts:
    units = Units(model)
    plan = _bare(units, wishes, shape, (0, 0, 0), loss_tokens)
    durations, chunks = Durations(model, plan, rates), chunks_of(plan, 0)

    def mean(level: str) -> float:
        return sum(durations.seconds_of(durations.recompute(chunk, level)) for chunk in chunks) / len(chunks)

    once = sum(durations.seconds_of(durations.forward(chunk) + durations.backward(chunk)) for chunk in chunks)
    heads = sum(durations.seconds_of(durations.head(chunk)) for chunk in chunks)
    taken = device_bytes(model, plan, rates.gpu)
    return Facts(
        units=units,
        sizes=piece_bytes(model, plan),
        besides=sum(taken[part] for part in ("dstream", "dkv", "workspace", "inputs", "context")),
        update_s=durations.seconds_of(durations.update),
        round_s=model.layers * once + heads,
        again_attention_s=mean(ATTENTION),
        again_input_s=mean(INPUT),
    )


class Kept(NamedTuple):
    """How many (layer, chunk)s keep what, and where: on the device whole ones and others, and at home."""

    whole: int
    light: int
    full_at_home: int
    attention_at_home: int


@dataclass(frozen=True)
class Draft:
    """One way to do it; whether it fits, and how fast it can be at best, follow without going through the schedule."""

    model: Model
    wishes: Wishes
    rates: Rates
    shape: Shape
    facts: Facts
    resident: tuple[int, int, int]
    full_share: float  # of the whole activations that there is room for
    passing_states: int = PASSING_STATES  # buffers through which the state of other units passes
    loss_tokens: int = LOSS_TOKENS[0]

    @property
    def mark(self) -> tuple[object, ...]:
        """Drafts with the same have the same plan."""
        return self.shape, self.resident, self.kept, self.passing_states, self.loss_tokens

    @property
    def fits(self) -> bool:
        return self.kept is not None

    @cached_property
    def plan(self) -> Plan:
        """With the slots and levels that the budgets leave room for."""
        assert self.kept is not None
        return self._with_slots(self.kept)

    @cached_property
    def bound_s(self) -> tuple[float, float]:
        """Seconds that a step takes at least, the busiest lane if nothing ever waited; and those of the link."""
        assert self.kept is not None
        plan, sizes, kept, facts = self._bare, self._sizes, self.kept, self.facts
        units = facts.units
        away = self._all - kept.whole - kept.light
        again = away - kept.full_at_home - kept.attention_at_home
        compute = units.count * facts.update_s + plan.rounds * (
            facts.round_s
            + (kept.light + kept.attention_at_home) * facts.again_attention_s
            + again * facts.again_input_s
        )
        at_home = (
            away * (sizes["inp"] + sizes["kv"] / plan.chunks_per_group)
            + (away - again) * sizes["attn"]
            + kept.full_at_home * sizes["rest"]
        )
        params, grads, states = (units.count - count for count in self.resident)
        of_layers = max(0, self.model.layers - plan.resident_params)
        per_round = (params + of_layers) * sizes["param"] + at_home  # layers' weights come twice
        passing = (plan.rounds - 1) * grads * sizes["grad"] + states * sizes["state"]
        inbound = plan.rounds * per_round + passing
        outbound = plan.rounds * at_home + passing + params * sizes["param"]
        link = max(inbound, outbound) / self.rates.link_both_gbs / 1e9
        return max(compute, link), link

    def planned(self) -> Planned | None:
        """Gone through; with fewer whole activations where the host turns out too small."""
        kept = self.kept
        for _ in range(4):
            if kept is None:
                return None
            plan = self._with_slots(kept)
            simulated = simulate(self.model, plan, self.rates)
            taken = host_bytes(self.model, plan, simulated.home_slots)
            over = sum(taken.values()) - self.wishes.host_gib * GIB
            if over <= 0:
                device = device_bytes(self.model, plan, self.rates.gpu)
                return Planned(plan=plan, simulated=simulated, host_bytes=taken, device_bytes=device)
            kept = self._lighter(kept, over)
        return None

    def neighbours(self) -> Iterator["Draft"]:
        """Drafts that differ from this one a little, in one respect."""
        units = self.facts.units.count
        taken = sum(device_bytes(self.model, self.plan, self.rates.gpu).values())
        for kind, name in enumerate(OF_UNITS):
            asked = (self.wishes.resident_params, self.wishes.resident_grads, self.wishes.resident_states)[kind]
            as_many_as_fit = int((self.wishes.device_gib * GIB - taken) / self._sizes[name])
            for change in (as_many_as_fit, -4, -2, 2, 4) if asked is None else ():
                count = min(units, max(0, self.resident[kind] + change))
                changed = [*self.resident]
                changed[kind] = count
                yield replace(self, resident=(changed[0], changed[1], changed[2]))
        if self.wishes.full_saves is None:
            for factor in (0.8, 0.9, 1.1):
                yield replace(self, full_share=min(1.0, self.full_share * factor))
        if self.resident[2] < units:
            for passing in (self.passing_states - 1, self.passing_states + 1):
                if PASSING_STATES <= passing <= self.facts.units.parts + 2:
                    yield replace(self, passing_states=passing)
        for tokens in LOSS_TOKENS:
            if tokens <= self.shape.chunk_tokens and tokens != self.loss_tokens:
                facts = facts_of(self.model, self.wishes, self.shape, self.rates, tokens)
                yield replace(self, loss_tokens=tokens, facts=facts)

    def _lighter(self, kept: Kept, over: float) -> Kept | None:
        """The same with less on the host, by so many bytes."""
        fewer = min(kept.full_at_home, _ceil(over / self._sizes["rest"]))
        over = max(0.0, over - fewer * self._sizes["rest"])
        attention = kept.attention_at_home + fewer
        less = _ceil(over / self._sizes["attn"])
        if less > attention:
            return None
        return kept._replace(full_at_home=kept.full_at_home - fewer, attention_at_home=attention - less)

    @cached_property
    def _bare(self) -> Plan:
        return _bare(self.facts.units, self.wishes, self.shape, self.resident, self.loss_tokens, self.passing_states)

    @property
    def _sizes(self) -> dict[str, int]:
        return self.facts.sizes

    @property
    def _all(self) -> int:
        """(layer, chunk)s of a round."""
        return self.model.layers * self._bare.chunks_per_round

    def _with_slots(self, kept: Kept) -> Plan:
        """Slots for those that stay, and some through which the others pass."""
        plan, on_device = self._bare, kept.whole + kept.light
        chunks, groups, layers_ = plan.chunks_per_round, plan.groups_per_round, self.model.layers
        passing = 0 if on_device == self._all else 2
        counts = kept.whole, kept.light, kept.full_at_home, kept.attention_at_home
        return replace(
            plan,
            inp_slots=min(on_device + chunks + 1 + passing, (layers_ + 1) * chunks),
            kv_slots=min(-(-on_device // plan.chunks_per_group) + 1 + passing, layers_ * groups),
            attn_slots=min(on_device + passing, self._all),
            rest_slots=kept.whole + (2 if kept.full_at_home else 0),
            levels=levels(layers_, chunks, plan.chunks_per_group, *counts),
        )

    @cached_property
    def kept(self) -> Kept | None:
        """As much as both sides have room for; none: not even what must be there fits.

        Attention before the rest: it saves more computation a byte. Every byte that is on the device does not cross the
        link, whatever it is of; whole ones stay there first.
        """
        plan, sizes, wishes = self._bare, self._sizes, self.wishes
        device, host = self._free
        least = sizes["inp"] + sizes["kv"] / plan.chunks_per_group
        light = least + sizes["attn"]
        room = device + host - self._all * least
        if device < 0 or host < 0 or room < 0:
            return None
        with_attention = min(self._all, int(room / sizes["attn"]))
        full = 0
        if with_attention == self._all:
            full = int(min(self._all, (room - self._all * sizes["attn"]) / sizes["rest"]) * self.full_share)
        if wishes.activation_slots is not None:
            whole, on_device = wishes.activation_slots, wishes.activation_slots
        else:
            whole = min(full, int(device / (light + sizes["rest"])))
            on_device = min(self._all, whole + int((device - whole * (light + sizes["rest"])) / light))
        if whole > self._all or whole * (light + sizes["rest"]) > device:
            return None
        at_home = self._all - on_device
        full_at_home = min(at_home, max(0, full - whole)) if wishes.full_saves is None else wishes.full_saves
        if full_at_home and device - on_device * light - whole * sizes["rest"] < 2 * sizes["rest"]:
            room_to_pass = device - 2 * sizes["rest"]  # those at home need two slots to pass through
            if room_to_pass < 0:
                if wishes.full_saves is not None:
                    return None
                full_at_home = 0
            elif wishes.activation_slots is not None:
                return None
            else:
                whole = min(whole, int(room_to_pass / (light + sizes["rest"])))
                on_device = min(on_device, whole + int((room_to_pass - whole * (light + sizes["rest"])) / light))
            at_home = self._all - on_device
        room_at_home = host - at_home * least - full_at_home * sizes["attn"] - max(0, full_at_home - 2) * sizes["rest"]
        most = min(at_home - full_at_home, int(room_at_home / sizes["attn"]))
        attention = most if wishes.attention_saves is None else wishes.attention_saves
        if room_at_home < 0 or full_at_home > at_home or attention > most:
            return None
        return Kept(whole, on_device - whole, full_at_home, attention)

    @property
    def _free(self) -> tuple[float, float]:
        """Bytes that units, and slots to pass through, leave on both sides."""
        plan, sizes, units = self._bare, self._sizes, self.facts.units.count
        passing = (plan.param_blocks, plan.grad_blocks, plan.state_blocks)
        device, host = self.wishes.device_gib * GIB - self.facts.besides, self.wishes.host_gib * GIB
        for kind, resident, blocks in zip(OF_UNITS, self.resident, passing, strict=True):
            device -= (resident + blocks) * sizes[kind]
            if kind != "grad" or plan.keeps_gradients:
                host -= (units - resident) * sizes[kind]
        device -= (plan.chunks_per_round + 3) * sizes["inp"] + 4 * sizes["kv"] + 2 * sizes["attn"]
        # Where the way back begins, what was made last is still in the slots that all others passed through.
        host += (plan.chunks_per_round + 2) * sizes["inp"] + 2 * sizes["kv"] + 2 * sizes["attn"]
        return device, host


def _ceil(value: float) -> int:
    return -int(-value // 1)


def _bare(
    units: Units,
    wishes: Wishes,
    shape: Shape,
    resident: tuple[int, int, int],
    loss_tokens: int,
    passing_states: int = PASSING_STATES,
) -> Plan:
    """A plan without slots and levels."""
    params, grads, states = resident
    return Plan(
        dtype=wishes.dtype,
        seqlen=wishes.seqlen,
        gbs=shape.gbs,
        chunk_tokens=shape.chunk_tokens,
        seqs_per_group=shape.seqs_per_group,
        groups_per_round=shape.groups_per_round,
        loss_tokens=min(shape.chunk_tokens, loss_tokens),
        update=wishes.update,
        update_at="backward" if wishes.clip is None else "forward",
        resident_params=params,
        resident_grads=grads,
        resident_states=states,
        param_blocks=min(units.count - params, units.parts + 2),
        grad_blocks=min(units.count - grads, units.parts + 2),
        state_blocks=min(units.count - states, passing_states),
        inp_slots=0,
        kv_slots=0,
        attn_slots=0,
        rest_slots=0,
        levels="",
    )
