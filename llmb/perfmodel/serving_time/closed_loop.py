"""TTFT and TPOT of `concurrency` clients in a closed loop, from the times of decode and prefill steps.

Every client has one request in the engine and sends the next when it is finished. A decode step emits one token of
every running request. While a request is in the engine, the other clients each send about one prompt. Those that are
not computed before its first token lengthen its steps: TPOT = decode step + such prompts x prefill / output tokens. The
first requests of all clients arrive together and wait for each other's prefill; later ones arrive one by one and seldom
wait, unless there are more prompts than decode steps to hold them: then every step is full of prompts, TPOT is one of
them, and the others are computed before the first token. Requests beyond the capacity of the KV cache wait for one to
finish.

All arithmetic works on floats and on arrays of rows alike.
"""

from dataclasses import dataclass
from typing import NamedTuple

from llmb.perfmodel.serving_time.cache_slots import cache_slots
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import Number, ServingRates, longer, step_seconds
from llmb.perfmodel.serving_time.serving_work import ServingWork

ROUNDS = 3  # of the fixed point between TPOT and the number of requests in decode
DRAFT_LAYERS = 2  # a multi-token-prediction layer and the LM head, in layers
# Engines that prefill in steps of their own; the others mix chunks of prompts into decode steps.
SEPARATE_PREFILL = ("sglang",)
WHOLE_PROMPTS = ("trtllm",)  # chunked prefill is off by default


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests as the engine sees them."""

    concurrency: Number
    slots: Number  # requests that run at once
    isl: Number  # mean tokens
    osl: Number
    budget: Number  # tokens of a step
    decoding: Number  # requests of a replica in decode, at most: those whose prompts fit into the steps of one
    whole: Number  # 1: a prompt that does not fit whole waits for the next step; 0: its first chunk is computed
    chunks: Number  # steps of the prefill of one request alone
    finishing: Number  # requests that finish in a step, at least one, whose clients send again
    waves: Number  # requests per client, the first of which waits for the prompts of all others
    slot_waves: Number  # requests per slot
    replicas: Number  # of attention, that have a request
    stages: Number
    drafts: Number  # tokens of speculative decoding, per request and step
    draft_cost: Number  # of a step, for each of them
    emitted: Number  # output tokens of a request in a step
    interval: Number  # steps between two looks at new requests
    mixed: Number  # 1: prefill in decode steps; 0: in steps of its own
    window: Number


@dataclass(frozen=True, kw_only=True)
class LoopTimes:
    """Seconds of a request, and the steps behind them by kind of work."""

    ttft: Number
    tpot: Number
    queue: Number  # of TTFT: waiting for space in the KV cache
    decode: dict[str, Number]
    prefill: dict[str, Number]  # of one request
    seconds: float | None = None  # of a whole run, ramp-up and drain included; none: of steady state only
    mean_osl: float = 0.0  # output tokens of its requests


def load_of(setup: ServingSetup, work: ServingWork) -> Load:
    """Return the load of a setup."""
    slots = min(setup.concurrency, cache_slots(setup, work), setup.max_batch_size * setup.attention_dp)
    isl, osl = setup.isl * setup.length_ratio, max(2.0, setup.osl * setup.length_ratio)
    mixed = setup.engine not in SEPARATE_PREFILL and setup.osl > 1
    replicas = min(setup.attention_dp, slots)  # that have a request
    decodes = slots / replicas / setup.pp  # of one step: each pipeline stage works on its own part
    # With more prompts than decode steps to hold them, requests wait rather than decode: as many decode as have their
    # prompts in what they leave of the budget, n = steps x (budget - n) / isl.
    steps = (osl - 1) / setup.emitted
    decoding = min(decodes, steps * setup.max_num_tokens / (isl + steps)) if mixed else 0.0
    budget = max(setup.max_num_tokens - decoding, setup.max_num_tokens / 8)
    return Load(
        concurrency=float(setup.concurrency),
        slots=float(slots),
        isl=isl,
        osl=osl,
        budget=float(setup.max_num_tokens),
        decoding=decoding * setup.pp if mixed else slots / replicas,
        whole=float(setup.engine in WHOLE_PROMPTS),
        chunks=float(-(-isl // budget)),
        finishing=max(1.0, min(decodes, decodes * setup.receive_interval / osl)),
        waves=float(setup.waves),
        slot_waves=setup.waves * setup.concurrency / slots,
        replicas=float(replicas),
        stages=float(setup.pp),
        drafts=float(setup.draft_tokens),
        draft_cost=DRAFT_LAYERS / setup.shape.model.layers,
        emitted=setup.emitted,
        interval=float(setup.receive_interval),
        mixed=float(mixed),
        window=float(work.window),
    )


class _Prompts(NamedTuple):
    """Prompts that are prefilled together, and the seconds of the steps that do it, decodes beside them."""

    seconds: Number
    together: Number
    chunks: Number  # steps of a prompt


class _Wave(NamedTuple):
    """Times of a request."""

    ttft: Number
    decoding: Number  # from its first token to its last


def loop_times(work: ServingWork, load: Load, r: ServingRates, queue: Number) -> LoopTimes:
    """Return TTFT and TPOT; `queue` scales waiting for other prefills."""
    context = load.isl + load.osl / 2
    requests = load.slots / load.replicas
    batch, later_waves = load.decoding, load.waves - 1
    decode = prefill = {}
    tpot = ttft = waiting = 0.0
    for _ in range(ROUNDS):
        decode = _decode_step(work, load, r, batch, context)
        step = total(decode)
        together, chunks = _packed(load, batch, requests)
        arriving = _at_most(load.finishing, together)
        own_chunks = _at_least(_at_most(load.chunks, load.osl * load.stages / requests), chunks)  # packed under load
        crowd = total(_prefill(work, load, r, batch, context, together, chunks))
        prefill = _prefill(work, load, r, batch, context, arriving, own_chunks)
        # A step with prompts is no shorter than one without, whose drafts of speculative decoding cost more.
        least = load.mixed * step
        crowded = _Prompts(_at_least(crowd, least * chunks), together, chunks)
        alone = _Prompts(_at_least(total(prefill), least * own_chunks), arriving, own_chunks)
        first = _first_wave(load, requests, step, crowded)
        later = _later_wave(load, requests, step, alone, queue)
        decoding = (first.decoding + later_waves * later.decoding) / load.waves
        tpot = decoding / (load.osl - 1)
        ttft = (first.ttft + later_waves * later.ttft) / load.waves + r.first_token
        stay = ttft + decoding
        waiting = (load.concurrency - load.slots) / load.slots * (1 - 0.5 / load.slot_waves) * stay
        # Some requests are in prefill or wait for it; of one wave, only before the others decode.
        idle = (1 - decoding / stay) * (1 - 1 / load.waves)
        batch = _at_most(requests * (1 - idle), load.decoding)
    return LoopTimes(ttft=ttft + waiting, tpot=tpot, queue=waiting, decode=decode, prefill=prefill)


def _first_wave(load: Load, requests: Number, step: Number, prompts: _Prompts) -> _Wave:
    """Return the times of requests that arrive together: half of the others are prefilled before each of them."""
    added = _added(load, requests, step, prompts)
    batches = (requests / prompts.together + 1) / 2 / load.stages + 1 - 1 / load.stages
    decoding, _ = _decoding(load, step, prompts, _at_least(requests - prompts.together, 0.0) / 2 * added)
    return _Wave(batches * prompts.seconds, decoding)


def _later_wave(load: Load, requests: Number, step: Number, prompts: _Prompts, queue: Number) -> _Wave:
    """Return the times of requests that arrive when others finish.

    The prompt of every other client is computed once while a request is in the engine: what it waits for before its
    first token, it does not wait for later.
    """
    added = _added(load, requests, step, prompts)
    others = requests - 1  # an arriving request finds the others only
    busy = others * added / (prompts.seconds + _decodes(load) * step + others * added)
    # Prefilled before it decodes: those with and before it, and in a pipeline those in its other stages.
    before = (load.finishing + prompts.together) / 2 + prompts.together * (load.stages * (1 + queue * busy) - 1)
    decoding, crowded = _decoding(load, step, prompts, _at_least(requests - before, 0.0) * added)
    behind = (load.finishing / prompts.together - 1) / 2 / load.stages  # others that finished in the same step
    running = _at_most(others, 1.0) * load.interval * step / 2  # the step in which it arrives, if there is one
    ttft = prompts.seconds * (1 + queue * busy + behind) + crowded + running
    return _Wave(ttft, decoding)


def _decodes(load: Load) -> Number:
    """Return the decode steps of a request."""
    return (load.osl - 1) / load.emitted


def _decoding(load: Load, step: Number, prompts: _Prompts, added: Number) -> tuple[Number, Number]:
    """Return the time from first to last token, which prompts lengthen, and that of prompts that do not fit into it.

    A request that shares all its steps with prompts takes no longer than these: the others are computed before it.
    """
    decoding = _decodes(load) * step + added
    crowded = load.mixed * _at_least(decoding - _decodes(load) * prompts.seconds / prompts.chunks, 0.0)
    return decoding - crowded, crowded


def _packed(load: Load, batch: Number, requests: Number) -> tuple[Number, Number]:
    """Return the prompts of a step when many wait, and the steps of a prompt that is longer than what decodes leave."""
    budget = _at_least(load.budget - load.mixed * batch / load.stages, load.budget / 8)
    packed = budget / load.isl
    together = _at_most(packed - load.whole * (packed % 1.0), requests / load.stages)
    return _at_least(together, 1.0), _at_least(load.isl / budget, 1.0)


def _added(load: Load, requests: Number, step: Number, prompts: _Prompts) -> Number:
    """Return what the prefill of one prompt adds to the steps of others.

    Its steps emit tokens too, as far as there are decode steps that they replace.
    """
    mixed_steps = requests * prompts.chunks / prompts.together / load.stages
    replaced = _at_most(_decodes(load) / mixed_steps, 1.0)
    return (prompts.seconds - load.mixed * prompts.chunks * step * replaced) / prompts.together / load.stages


def prefill_times(work: ServingWork, load: Load, r: ServingRates) -> LoopTimes:
    """Return the times of requests of one output token, which the prefill computes: a queue of prefills only.

    A client waits for the prompts of all others, or for its own prefill where there are too few others.
    """
    requests = load.slots / load.replicas
    together, chunks = _packed(load, 0.0, requests)
    prefill = _prefill(work, load, r, 0.0, load.isl, 1.0, load.chunks)
    crowd = total(_prefill(work, load, r, 0.0, load.isl, together, chunks))
    waves = ((requests + together) / 2 + (load.waves - 1) * requests) / load.waves  # the first one, and later ones
    ttft = _at_least(waves * crowd / together / load.stages, total(prefill) + r.first_token)
    waiting = (load.concurrency - load.slots) / load.slots * (1 - 0.5 / load.slot_waves) * ttft
    return LoopTimes(
        ttft=ttft + waiting, tpot=0.0, queue=waiting, decode=dict.fromkeys(prefill, 0.0), prefill=prefill
    )  # fmt: skip


def total(terms: dict[str, Number]) -> Number:
    """Return the seconds of all terms."""
    return sum(terms.values())


def _decode_step(work: ServingWork, load: Load, r: ServingRates, batch: Number, context: Number) -> dict[str, Number]:
    """Return a step of decode only; each pipeline stage works on its own part of the batch."""
    requests = _at_least(batch / load.stages, 1.0)  # a step without any is none
    tokens = requests * (1 + load.drafts)
    terms = step_seconds(
        work, r, tokens=tokens, all_tokens=tokens * load.replicas, sampled=tokens, decodes=requests, context=context
    )
    _add_stages(terms, load, r)
    return {name: seconds * (1 + load.drafts * load.draft_cost) for name, seconds in terms.items()}


def _at_least(value: Number, least: Number) -> Number:
    """Return the larger of two, floats or arrays."""
    return least + (value - least + abs(value - least)) / 2


def _at_most(value: Number, most: Number) -> Number:
    """Return the smaller of two, floats or arrays."""
    return most - _at_least(most - value, 0.0)


def _add_stages(terms: dict[str, Number], load: Load, r: ServingRates) -> None:
    """Add what a pipeline costs: sends between its stages, and the host of every further one, which prepares inputs."""
    terms["communication"] = terms["communication"] + (load.stages - 1) * r.ring
    terms["host"] = terms["host"] + (load.stages - 1) * r.host_step


def _prefill(
    work: ServingWork, load: Load, r: ServingRates, batch: Number, context: Number, together: Number, chunks: Number
) -> dict[str, Number]:
    """Return the steps that prefill `together` prompts on every replica, with the decodes mixed into them."""
    decodes = load.mixed * batch / load.stages
    tokens = load.isl / chunks * together + decodes * (1 + load.drafts)
    inside = load.isl - load.window  # prompt positions whose window is full
    inside = (inside + abs(inside)) / 2
    window_pairs = inside * load.window + (load.isl - inside) ** 2 / 2
    terms = step_seconds(
        work,
        r,
        tokens=tokens,
        all_tokens=tokens * load.replicas,
        sampled=decodes + together,
        decodes=decodes,
        context=context,
        pairs=together * load.isl**2 / 2 / chunks,
        window_pairs=together * window_pairs / chunks,
    )
    _add_stages(terms, load, r)
    # Without CUDA graphs the host launches every kernel, and the GPU waits where that takes longer than its work.
    launched = total(terms) - terms["host"]
    terms["launch"] = terms["launch"] + longer(launched, work.kernels * r.eager) - launched
    return {name: seconds * chunks for name, seconds in terms.items()}
