"""Text of a predicted serving benchmark: figures with intervals, where steps go, and a curve over concurrency."""

from collections.abc import Sequence

from llmb.perfmodel.hardware import GIB, gpu
from llmb.perfmodel.serving_time.serving_predictor import ServingPrediction, unproven_note
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.step_time.measured_device import ceilings_source
from llmb.report.predictions.energy_lines import with_costs
from llmb.report.table import render

TITLES = {
    "gemm": "GEMM", "experts": "experts", "attention": "attention, KV cache", "memory_bound": "memory-bound kernels",
    "communication": "collectives", "launch": "kernel launches", "host": "scheduler, sampler, streaming",
}  # fmt: skip
METRICS = (
    ("ttft_ms", "TTFT", "ms"), ("tpot_ms", "TPOT", "ms"), ("e2e_ms", "E2E", "ms"),
    ("output_tokens_per_s", "output", "tokens/s"), ("output_tokens_per_s_per_gpu", "output per GPU", "tokens/s"),
)  # fmt: skip


def describe_serving(setup: ServingSetup, p: ServingPrediction, base: ServingPrediction | None = None) -> str:
    """Return the figures and terms of one prediction; `base` is that without what-if changes."""
    figures = [(title, _figure(getattr(p, name)), *_range(p, name), unit) for name, title, unit in METRICS]
    decode, prefill = p.terms["decode_step"], p.terms["prefill"]
    terms = [
        (title, f"{1e3 * decode[name]:.3f}", f"{1e3 * prefill[name]:.1f}")
        for name, title in TITLES.items()
        if decode[name] + prefill[name] > 0
    ]
    terms.append(("step, prefill", f"{1e3 * sum(decode.values()):.3f}", f"{1e3 * sum(prefill.values()):.1f}"))
    waiting = p.terms["scheduler"]
    lines = [
        _title(setup),
        "",
        render(("metric", "predicted", "80 % from", "to", "unit"), figures),
        "",
        render(("term", "decode step ms", "prefill of a request ms"), terms),
        "",
        _tpot_line(p),
        f"TTFT: the prefill, {1e3 * waiting['ttft_besides_own_prefill']:.0f} ms of waiting for others and of HTTP"
        + (
            f", {1e3 * waiting['kv_cache_queue']:,.0f} ms for space in the KV cache"
            if waiting["kv_cache_queue"]
            else ""
        ),
        f"batch {p.batch:.0f} of {setup.concurrency} clients, {p.memory_gib:.0f} of {_capacity(setup)} GiB a GPU",
        f"ceilings: {ceilings_source(setup.gpu, setup.rates)}",
        *_unproven(setup),
    ]
    if base is not None:
        change = 100 * (p.e2e_ms / base.e2e_ms - 1)
        lines.append(f"without the what-if changes: E2E {base.e2e_ms:,.1f} ms ({change:+.1f} % with them)")
    return "\n".join(lines)


def _tpot_line(p: ServingPrediction) -> str:
    if p.tpot_ms is None:
        return "TPOT: none of one output token, which the prefill computes"
    others = 1e3 * p.terms["scheduler"]["prefill_of_others_per_token"]
    return f"TPOT: a decode step and {others:.2f} ms for prefills of other requests"


def _unproven(setup: ServingSetup) -> list[str]:
    note = unproven_note(setup)
    return [] if note is None else [note]


def _range(p: ServingPrediction, name: str) -> tuple[str, str]:
    low, high = p.interval_80[name] or (None, None)
    return _figure(low), _figure(high)


def _figure(value: float | None, decimals: int = 1) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"


def _capacity(setup: ServingSetup) -> str:
    memory = gpu(setup.gpu).memory_bytes or setup.gpu_memory_bytes
    return f"{memory / GIB:.0f}" if memory else "?"


def _title(setup: ServingSetup) -> str:
    layout = f"tp {setup.tp} pp {setup.pp} attention_dp {setup.attention_dp} ep {setup.ep}"
    return (
        f"{setup.shape.model.name}, {setup.dtype}, KV {setup.kv_dtype}, {setup.gpus} x {setup.gpu}, {layout}, "
        f"{_lengths(setup)}, concurrency {setup.concurrency}, engine {setup.generation}"
    )


def _lengths(setup: ServingSetup) -> str:
    """Return the lengths of requests, with their range where they vary."""
    sampled = tuple(zip(*setup.lengths, strict=True)) or ((setup.isl,), (setup.osl,))
    ranges = (("isl", setup.isl, sampled[0]), ("osl", setup.osl, sampled[1]))
    return ", ".join(
        f"{name} {nominal}" + (f" ({min(tokens)} to {max(tokens)})" if min(tokens) < max(tokens) else "")
        for name, nominal, tokens in ranges
    )


def describe_serving_curve(
    points: Sequence[tuple[ServingSetup, ServingPrediction]], costs: Sequence[float | None] = ()
) -> str:
    """Return one line per concurrency; `costs`: of a million output tokens at each."""
    header = (
        "concurrency", "batch", "TTFT ms", "TPOT ms", "80 % interval", "E2E s", "output tokens/s", "tokens/s/GPU",
        "tokens/s/user", "GiB",
    )  # fmt: skip
    rows = []
    for setup, p in points:
        low, high = p.interval_80["tpot_ms"] or (None, None)
        rows.append((
            setup.concurrency, f"{p.batch:.0f}", f"{p.ttft_ms:,.0f}", _figure(p.tpot_ms, 2),
            "-" if low is None else f"{low:.2f}-{high:.2f}",
            f"{p.e2e_ms / 1e3:.2f}", f"{p.output_tokens_per_s:,.0f}", f"{p.output_tokens_per_s_per_gpu:,.0f}",
            f"{p.tokens_per_s_per_user:.1f}", f"{p.memory_gib:.0f}",
        ))  # fmt: skip
    return (
        _title(points[0][0]).rpartition(", concurrency")[0]
        + f", engine {points[0][0].generation}\n\n"
        + render(*with_costs(header, rows, costs))
        + "\n\n"
        + "\n".join([f"ceilings: {ceilings_source(points[0][0].gpu, points[0][0].rates)}", *_unproven(points[0][0])])
    )
