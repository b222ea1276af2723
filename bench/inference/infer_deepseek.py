"""Part 4: DeepSeek-R1 with a few layers of full width; each kind of step against its own ceiling."""

from dataclasses import asdict, replace
from typing import Any

from inference.infer_bench import Bench
from inference.infer_ceilings import (
    Rates,
    Term,
    ceiling,
    collective_seconds,
    decode_step,
    distinct_experts,
    prompt_step,
    steady_step,
    step_of_one_gpu,
    terms,
)
from inference.infer_kernels import profiled
from inference.infer_profile import print_profile, small_kernel_bounds
from inference.infer_serving import Row, config_of, decode, open_engine, prefill, submit, with_longer_sequences
from llmb.serve.engine import Engine

AIM = 0.7  # of the ceiling
BATCHES, CONTEXT, PROMPT = (1, 64, 256), 1000, 8192
OUTPUT_TOKENS = 128  # more than are timed

# The whole model, as docs/inference.md derives it.
WHOLE_LAYERS = (3, 58)  # dense, experts
WHOLE_LENGTHS = (1000, 1000)
WHOLE = ((8, 64), (8, 128), (8, 256))  # GPUs, requests on each
LINK = 450e9  # bytes/s each way between H200s of a node


def deepseek(bench: Bench) -> None:
    """Decode at each batch, then a prompt; the profile of the largest batch if requested."""
    model, tiny = bench.deepseek, bench.tiny
    batches, context, prompt = ((1, 2, 4), 40, 64) if tiny else (BATCHES, CONTEXT, PROMPT)
    row = Row(dtype="fp8", isl=context, osl=OUTPUT_TOKENS, batch=batches[-1], budget=prompt, requests=batches[-1])
    engine = open_engine(config_of(model, row, bench.device), bench.device, longest=context + OUTPUT_TOKENS)
    fp8, bf16 = bench.rate("fp8", model, 256 if tiny else PROMPT), bench.best("bf16")
    rates = Rates(read=bench.read, products=fp8, head=bf16, bf16=bf16)
    rows, settle, steps = [], 2 if tiny else 10, 4 if tiny else 40
    for batch in batches:
        decoded = decode(engine, model, batch, context, settle, steps, bench.device)
        needed = terms(model, row.precision, decode_step(batch, decoded.context, decoded.experts))
        rows.append((f"decode, batch {batch}", decoded.seconds, needed, decoded.experts, batch))
    seconds = prefill(with_longer_sequences(engine, prompt + 1), model, prompt, 3, bench.device)
    rows.append((f"prefill, {prompt} tokens", seconds, terms(model, row.precision, prompt_step(prompt)), None, prompt))
    _print_table(bench, rows, rates)
    _say_whole(bench, row, rates, {batch: ceiling(needed, rates) / seconds for _, seconds, needed, _, batch in rows})
    if "profile" in bench.parts:
        _profile(bench, engine, row, rates, rows[-2][3])


def _print_table(bench: Bench, rows: list[tuple[str, float, list[Term], float | None, int]], rates: Rates) -> None:
    experts, blocks = bench.deepseek.experts, bench.deepseek.blocks
    assert experts is not None
    lines: list[tuple[Any, ...]] = []
    for name, seconds, needed, active, tokens in rows:
        limit, expected = ceiling(needed, rates), distinct_experts(experts.count, experts.top_k, tokens)
        work = (sum(term.bytes for term in needed) / 1e9, sum(term.flops for term in needed) / 1e9)
        lines.append((name, 1e3 * seconds, 1e3 * limit, limit / seconds, AIM, *work, active, expected))
        parts = [asdict(term) | {"seconds": term.seconds(rates)} for term in needed]
        bench.record(
            "deepseek", {"step": name, "seconds": seconds, "ceiling": limit, "experts": active, "terms": parts}
        )
    layers = f"{blocks['mlp']} dense and {blocks['experts']} expert layers and the head"
    bench.print_table(
        f"4. {bench.deepseek.name} at full width, {layers}, fp8 blocks, fp8 cache",
        ("step", "ms", "ceiling ms", "of ceiling", "aim", "GB", "GFLOP", "experts", "expected"),
        lines,
        "experts: active ones in a layer, counted; expected: under uniform routing",
    )
    bench.print_table(
        "   The ceiling of each step: ms, bytes over read bandwidth or FLOPs over measured rate, whichever is longer",
        ("step", *(term.name for term in rows[0][2])),
        [(name, *(1e3 * term.seconds(rates) for term in needed)) for name, _, needed, _, _ in rows],
    )


def _say_whole(bench: Bench, row: Row, rates: Rates, reached: dict[int, float]) -> None:
    """Extrapolate to all 61 layers on several GPUs, at the lowest fraction of the ceiling reached above."""
    assert bench.deepseek.experts is not None
    dense = WHOLE_LAYERS[0]
    experts = replace(bench.deepseek.experts, dense_layers=dense)
    model = replace(bench.deepseek, layers=sum(WHOLE_LAYERS), experts=experts)
    lines = []
    for gpus, requests in WHOLE:
        step = step_of_one_gpu(gpus, model, steady_step(*WHOLE_LENGTHS, requests))
        limit, ratio = ceiling(terms(model, row.precision, step), rates), min(list(reached.values())[1:])
        link_s = collective_seconds(gpus, model, step.tokens, LINK)
        seconds = limit / ratio + link_s
        figures = (
            1e3 * limit,
            ratio,
            1e3 * link_s,
            1e3 * seconds,
            requests / seconds,
            gpus * requests / seconds,
        )
        lines.append((gpus, requests, step.experts, *figures))
        bench.record(
            "whole", {"gpus": gpus, "requests": requests, "seconds": seconds, "ceiling": limit, "travel": link_s}
        )
    bench.print_table(
        f"   Extrapolated, not measured: the whole model, {WHOLE_LENGTHS[0]}/{WHOLE_LENGTHS[1]}, attention DP and EP",
        ("GPUs", "requests each", "experts each", "ceiling ms", "of ceiling", "collectives ms", "step ms",
         "tokens/s/GPU", "total"),
        lines,
        "of ceiling: the lowest of the steps above without batch 1; collectives: not overlapped, 450 GB/s each way",
    )  # fmt: skip


def _profile(bench: Bench, engine: Engine, row: Row, rates: Rates, active: float | None) -> None:
    """Profile the largest batch, with the experts counted for it."""
    model, prompt = bench.deepseek, row.isl - 16
    submit(engine, model, [(prompt, row.osl)] * row.batch)
    while engine.scheduler.waiting or any(
        sequence.num_computed_tokens < prompt for sequence in engine.scheduler.running.values()
    ):
        engine.step()
    profile = profiled(engine, 4 if bench.tiny else 10, bench.device)
    title = f"5. Time of a step: {model.name} as above, decode, batch {row.batch}"
    floors = small_kernel_bounds(model, row.precision, profile.step, bench.read)
    needed = terms(model, row.precision, replace(profile.step, experts=active))
    print_profile(bench, title, profile, needed, rates, floors)
