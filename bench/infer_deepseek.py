"""Part 4: DeepSeek-R1 with layers of true width, as many as are quickly built; each kind of step against its ceiling."""

from dataclasses import asdict
from typing import Any

from infer_bench import Bench
from infer_ceilings import Rates, Term, ceiling, decode_step, distinct_experts, prompt_step, terms
from infer_kernels import profiled
from infer_profile import say_profile, small_floors
from infer_serving import Row, config_of, decode, for_longer, opened, prefill, submit

from llmb.infer.engine import Engine

AIM = 0.7  # of the ceiling
BATCHES, CONTEXT, PROMPT = (1, 64, 256), 1000, 8192
ANSWER = 128  # tokens; more than are timed


def deepseek(bench: Bench) -> None:
    """Decode at each batch, then a prompt; the profile of the largest batch where it is asked for."""
    model, tiny = bench.deepseek, bench.tiny
    batches, context, prompt = ((1, 2, 4), 40, 64) if tiny else (BATCHES, CONTEXT, PROMPT)
    row = Row(dtype="fp8", isl=context, osl=ANSWER, batch=batches[-1], budget=prompt, requests=batches[-1])
    engine = opened(config_of(model, row, bench.device), bench.device, longest=context + ANSWER)
    fp8, bf16 = bench.rate("fp8", model, 256 if tiny else PROMPT), bench.best("bf16")
    rates = Rates(read=bench.read, products=fp8, head=bf16, bf16=bf16)
    rows, settle, steps = [], 2 if tiny else 10, 4 if tiny else 40
    for batch in batches:
        found = decode(engine, model, batch, context, settle, steps, bench.device)
        needed = terms(model, row.precision, decode_step(batch, found.context, found.experts))
        rows.append((f"decode, batch {batch}", found.seconds, needed, found.experts, batch))
    seconds = prefill(for_longer(engine, prompt + 1), model, prompt, 3, bench.device)
    rows.append((f"prefill, {prompt} tokens", seconds, terms(model, row.precision, prompt_step(prompt)), None, prompt))
    _say(bench, rows, rates)
    if "profile" in bench.parts:
        _profile(bench, engine, row, rates)


def _say(bench: Bench, rows: list[tuple[str, float, list[Term], float | None, int]], rates: Rates) -> None:
    experts, blocks = bench.deepseek.experts, bench.deepseek.blocks
    assert experts is not None
    shown: list[tuple[Any, ...]] = []
    for what, seconds, needed, visited, tokens in rows:
        limit, expected = ceiling(needed, rates), distinct_experts(experts.count, experts.top_k, tokens)
        moved, flops = sum(term.bytes for term in needed), sum(term.flops for term in needed)
        shown.append((what, 1e3 * seconds, 1e3 * limit, limit / seconds, AIM, moved / 1e9, flops / 1e9, visited, expected))
        parts = [asdict(term) | {"seconds": term.seconds(rates)} for term in needed]
        bench.keep("deepseek", {"step": what, "seconds": seconds, "ceiling": limit, "experts": visited, "terms": parts})
    layers = f"{blocks['mlp']} dense and {blocks['experts']} expert layers and the head"
    bench.say(
        f"4. {bench.deepseek.name} at true width, {layers}, fp8 blocks, fp8 cache",
        ("step", "ms", "ceiling ms", "of ceiling", "aim", "GB", "GFLOP", "experts", "expected"),
        shown,
        "experts: distinct ones that a step visits in a layer, counted; expected: if all are equally likely",
    )
    bench.say(
        "   The ceiling of each step: ms, bytes over read bandwidth or FLOPs over measured rate, whichever is longer",
        ("step", *(term.name for term in rows[0][2])),
        [(what, *(1e3 * term.seconds(rates) for term in needed)) for what, _, needed, _, _ in rows],
    )


def _profile(bench: Bench, engine: Engine, row: Row, rates: Rates) -> None:
    model = bench.deepseek
    prompt = row.isl - 16
    submit(engine, model, [(prompt, row.osl)] * row.batch)
    while engine.scheduler.waiting or any(one.computed < prompt for one in engine.scheduler.running.values()):
        engine.step()
    found = profiled(engine, 4 if bench.tiny else 10, bench.device)
    title = f"5. Where a step goes: {model.name} as above, decode, batch {row.batch}"
    floors = small_floors(model, row.precision, found.step, bench.read)
    say_profile(bench, title, found, terms(model, row.precision, found.step), rates, floors)
