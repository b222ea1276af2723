"""Part 4: DeepSeek-R1 with a few layers of true width; each kind of step against its own ceiling."""

from dataclasses import asdict, replace
from typing import Any

from infer_bench import Bench
from infer_ceilings import (
    Rates,
    Term,
    ceiling,
    decode_step,
    distinct_experts,
    exchange_seconds,
    on_one_of,
    prompt_step,
    steady_step,
    terms,
)
from infer_kernels import profiled
from infer_profile import say_profile, small_floors
from infer_serving import Row, config_of, decode, for_longer, opened, prefill, submit

from llmb.serve.engine import Engine

AIM = 0.7  # of the ceiling
BATCHES, CONTEXT, PROMPT = (1, 64, 256), 1000, 8192
ANSWER = 128  # tokens; more than are timed

# The whole model, as docs/inference.md derives it.
WHOLE_LAYERS = (3, 58)  # dense, experts
WHOLE_LENGTHS = (1000, 1000)
WHOLE = ((8, 64), (8, 128), (8, 256))  # GPUs, requests on each
LINK = 450e9  # bytes/s each way between H200s of a node


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
    _say_whole(bench, row, rates, {batch: ceiling(needed, rates) / seconds for _, seconds, needed, _, batch in rows})
    if "profile" in bench.parts:
        _profile(bench, engine, row, rates, rows[-2][3])


def _say(bench: Bench, rows: list[tuple[str, float, list[Term], float | None, int]], rates: Rates) -> None:
    experts, blocks = bench.deepseek.experts, bench.deepseek.blocks
    assert experts is not None
    shown: list[tuple[Any, ...]] = []
    for what, seconds, needed, visited, tokens in rows:
        limit, expected = ceiling(needed, rates), distinct_experts(experts.count, experts.top_k, tokens)
        work = (sum(term.bytes for term in needed) / 1e9, sum(term.flops for term in needed) / 1e9)
        shown.append((what, 1e3 * seconds, 1e3 * limit, limit / seconds, AIM, *work, visited, expected))
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


def _say_whole(bench: Bench, row: Row, rates: Rates, reached: dict[int, float]) -> None:
    """All 61 layers on several GPUs, at the lowest share of the ceiling that the steps above reached."""
    assert bench.deepseek.experts is not None
    dense = WHOLE_LAYERS[0]
    experts = replace(bench.deepseek.experts, dense_layers=dense)
    model = replace(bench.deepseek, layers=sum(WHOLE_LAYERS), experts=experts)
    shown = []
    for gpus, requests in WHOLE:
        step = on_one_of(gpus, model, steady_step(*WHOLE_LENGTHS, requests))
        limit, ratio = ceiling(terms(model, row.precision, step), rates), min(list(reached.values())[1:])
        travel = exchange_seconds(gpus, model, step.tokens, LINK)
        seconds = limit / ratio + travel
        found = (1e3 * limit, ratio, 1e3 * travel, 1e3 * seconds, requests / seconds, gpus * requests / seconds)
        shown.append((gpus, requests, step.experts, *found))
        bench.keep(
            "whole", {"gpus": gpus, "requests": requests, "seconds": seconds, "ceiling": limit, "travel": travel}
        )
    bench.say(
        f"   Extrapolated, not measured: the whole model, {WHOLE_LENGTHS[0]}/{WHOLE_LENGTHS[1]}, attention DP and EP",
        ("GPUs", "requests each", "experts each", "ceiling ms", "of ceiling", "exchange ms", "step ms",
         "tokens/s a GPU", "in all"),
        shown,
        "of ceiling: the lowest of the steps above without batch 1; exchange: nothing hides it, 450 GB/s each way",
    )  # fmt: skip


def _profile(bench: Bench, engine: Engine, row: Row, rates: Rates, visited: float | None) -> None:
    """The largest batch, with the experts that were counted for it."""
    model, prompt = bench.deepseek, row.isl - 16
    submit(engine, model, [(prompt, row.osl)] * row.batch)
    while engine.scheduler.waiting or any(
        sequence.num_computed_tokens < prompt for sequence in engine.scheduler.running.values()
    ):
        engine.step()
    found = profiled(engine, 4 if bench.tiny else 10, bench.device)
    title = f"5. Where a step goes: {model.name} as above, decode, batch {row.batch}"
    floors = small_floors(model, row.precision, found.step, bench.read)
    needed = terms(model, row.precision, replace(found.step, experts=visited))
    say_profile(bench, title, found, needed, rates, floors)
