"""TTFT and TPOT of `concurrency` clients in a closed loop, from the times of decode and prefill steps.

Every client has one request in the engine and sends the next when it is finished. A decode step emits one token of
every running request. While a request decodes, the other clients each send about one prompt, whose prefill lengthens
its steps: TPOT = decode step + (clients - 1) x prefill / output tokens. The first requests of all clients arrive
together and wait for each other's prefill; later ones arrive one by one and seldom wait. Requests beyond the capacity
of the KV cache wait for one to finish.

All arithmetic works on floats and on arrays of rows alike.
"""

from dataclasses import dataclass

from llmb.perfmodel.serving_time.cache_slots import cache_slots
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import Number, ServingRates, longer, step_seconds
from llmb.perfmodel.serving_time.serving_work import ServingWork

ROUNDS = 3  # of the fixed point between TPOT and the number of requests in decode
DRAFT_LAYERS = 2  # a multi-token-prediction layer and the LM head, in layers
# Engines that prefill in steps of their own; the others mix chunks of prompts into decode steps.
SEPARATE_PREFILL = ("sglang",)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests as the engine sees them."""

    concurrency: Number
    slots: Number  # requests that run at once
    isl: Number  # mean tokens
    osl: Number
    chunk: Number  # prompt tokens of a step of one request
    chunks: Number  # steps of its prefill
    together: Number  # prompts prefilled in one step when many wait
    arriving: Number  # prompts prefilled in one step later: as many requests as finish in one, at least one
    waves: Number  # requests per slot
    replicas: Number
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


def load_of(setup: ServingSetup, work: ServingWork) -> Load:
    """Return the load of a setup."""
    slots = min(setup.concurrency, cache_slots(setup, work), setup.max_batch_size * setup.attention_dp)
    isl, osl = setup.isl * setup.length_ratio, max(2.0, setup.osl * setup.length_ratio)
    mixed = setup.engine not in SEPARATE_PREFILL and setup.osl > 1
    decodes = slots / setup.attention_dp / setup.pp  # of one step: each pipeline stage works on its own part
    budget = max(setup.max_num_tokens - (decodes if mixed else 0), setup.max_num_tokens / 8)
    chunks = -(-isl // budget)
    together = max(1.0, min(decodes, budget // isl))
    return Load(
        concurrency=float(setup.concurrency),
        slots=float(slots),
        isl=isl,
        osl=osl,
        chunk=isl / chunks,
        chunks=float(chunks),
        together=together,
        arriving=max(1.0, min(together, decodes * setup.receive_interval / osl)),
        waves=setup.waves * setup.concurrency / slots,
        replicas=float(setup.attention_dp),
        stages=float(setup.pp),
        drafts=float(setup.draft_tokens),
        draft_cost=DRAFT_LAYERS / setup.shape.model.layers,
        emitted=setup.emitted,
        interval=float(setup.receive_interval),
        mixed=float(mixed),
        window=float(work.window),
    )


def loop_times(work: ServingWork, load: Load, r: ServingRates, queue: Number) -> LoopTimes:
    """Return TTFT and TPOT; `queue` scales waiting for other prefills."""
    tokens, context = load.osl - 1, load.isl + load.osl / 2
    batch = load.slots / load.replicas
    steady = 1 - 0.5 / load.waves  # nobody follows the last requests: they wait for half as many others
    decode = prefill = {}
    tpot = ttft = waiting = 0.0
    for _ in range(ROUNDS):
        decode = _decode_step(work, load, r, batch, context)
        step = total(decode)
        prefill = _prefill(work, load, r, batch, context, together=load.arriving)
        alone = total(prefill)
        crowd = total(_prefill(work, load, r, batch, context, together=load.together))
        hidden = load.mixed * load.chunks * step  # these steps emit tokens too
        added = (crowd - hidden) / load.together + (load.waves - 1) * (alone - hidden) / load.arriving
        added = added / (load.waves * load.replicas * load.stages)  # by the prefill of one request
        tpot = step / load.emitted + (load.slots - 1) * steady * added / tokens
        busy = load.slots * added / (alone + tokens * tpot)
        first = (load.slots / load.replicas / load.together + 1) / 2 * crowd / load.stages
        first = first + alone * (1 - 1 / load.stages)
        later = alone * (1 + queue * busy) + load.interval * step / 2
        ttft = (first + (load.waves - 1) * later) / load.waves + r.first_token
        stay = ttft + tokens * tpot
        waiting = (load.concurrency - load.slots) / load.slots * steady * stay
        # Some requests are in prefill or wait for it; of one wave, only before the others decode.
        idle = (1 - tokens * tpot / stay) * (1 - 1 / load.waves)
        batch = load.slots / load.replicas * (1 - idle)
    return LoopTimes(ttft=ttft + waiting, tpot=tpot, queue=waiting, decode=decode, prefill=prefill)


def prefill_times(work: ServingWork, load: Load, r: ServingRates) -> LoopTimes:
    """Return the times of requests of one output token, which the prefill computes: a queue of prefills only.

    A client waits for the prompts of all others, or for its own prefill where there are too few others.
    """
    prefill = _prefill(work, load, r, batch=0.0, context=load.isl, together=1.0)
    crowd = total(_prefill(work, load, r, batch=0.0, context=load.isl, together=load.together))
    per_prompt = crowd / load.together / (load.replicas * load.stages)
    ttft = _at_least(load.slots * per_prompt, total(prefill) + r.first_token)
    waiting = (load.concurrency - load.slots) / load.slots * ttft
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


def _add_stages(terms: dict[str, Number], load: Load, r: ServingRates) -> None:
    """Add what a pipeline costs: sends between its stages, and the host of every further one, which prepares inputs."""
    terms["communication"] = terms["communication"] + (load.stages - 1) * r.ring
    terms["host"] = terms["host"] + (load.stages - 1) * r.host_step


def _prefill(
    work: ServingWork, load: Load, r: ServingRates, batch: Number, context: Number, together: Number
) -> dict[str, Number]:
    """Return the steps that prefill `together` prompts on every replica, with the decodes mixed into them."""
    decodes = load.mixed * batch / load.stages
    tokens = load.chunk * together + decodes * (1 + load.drafts)
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
        pairs=together * load.isl**2 / 2 / load.chunks,
        window_pairs=together * window_pairs / load.chunks,
    )
    _add_stages(terms, load, r)
    # Without CUDA graphs the host launches every kernel, and the GPU waits where that takes longer than its work.
    launched = total(terms) - terms["host"]
    terms["launch"] = terms["launch"] + longer(launched, work.kernels * r.eager) - launched
    return {name: seconds * load.chunks for name, seconds in terms.items()}
