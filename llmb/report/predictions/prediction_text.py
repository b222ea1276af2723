"""Text of a predicted training step: the waterfall of its terms, and a scaling curve."""

from collections.abc import Sequence

from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.metrics import days_to_train
from llmb.perfmodel.step_time.measured_device import ceilings_source
from llmb.perfmodel.step_time.predictor import StepPrediction
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.report.predictions.energy_lines import with_costs
from llmb.report.table import render

TITLES = {
    "gemm": "GEMM", "attention": "attention", "scan": "Mamba, DeltaNet scan", "memory_bound": "memory-bound kernels",
    "quantization": "quantization", "recompute": "recompute", "tp": "exposed TP collectives",
    "cp": "exposed CP ring", "ep": "expert all-to-all", "pp": "exposed pipeline sends", "dp": "exposed DP collectives",
    "fsdp": "exposed FSDP collectives", "offload": "exposed offload copies", "bubble": "pipeline bubble and imbalance",
    "optimizer": "optimizer",
    "launch": "kernel launch gaps", "host": "waiting for the host", "overhead": "per step", "jitter": "slowest rank",
    "engine": "engine generation",
}  # fmt: skip
BAR = 30  # characters of the whole step
TERA_TOKENS = 1e12


def describe_prediction(setup: StepSetup, prediction: StepPrediction, base: StepPrediction | None = None) -> str:
    """Return the waterfall and figures of one prediction; `base` is that without what-if changes."""
    seconds = prediction.step_time_s
    rows = []
    if prediction.mfu is not None:
        rows.append(("model FLOPs at peak", f"{prediction.mfu * seconds:.3f}", f"{100 * prediction.mfu:.1f}", ""))
    for name, value in prediction.terms.items():
        if abs(value) >= 5e-4 * seconds:
            bar = "#" * max(0, round(BAR * value / seconds))
            rows.append((TITLES[name], f"{value:.3f}", f"{100 * value / seconds:.1f}", bar))
    rows.append(("step", f"{seconds:.3f}", "100.0", ""))
    return "\n".join([_title(setup), "", render(("term", "s", "%", ""), rows), "", *_figures(setup, prediction, base)])


def _title(setup: StepSetup) -> str:
    return (
        f"{setup.shape.model.name}, {setup.dtype}, {setup.gpus} x {setup.gpu}, {_layout(setup)} dp {setup.dp}"
        f"{' fsdp' if setup.parallel.fsdp else ''}, seqlen {setup.seqlen}, mbs {setup.mbs}, gbs {setup.gbs} "
        f"(ga {setup.ga}), engine {setup.engine}"
    )


def _layout(setup: StepSetup) -> str:
    split = setup.parallel
    etp = f" etp {split.etp}" if split.etp > 1 else ""
    return f"tp {split.tp} pp {split.pp} cp {split.cp} vp {split.vp or 1} ep {split.ep}{etp}"


def _figures(setup: StepSetup, p: StepPrediction, base: StepPrediction | None) -> list[str]:
    tokens_per_s = p.tokens_per_s_per_gpu * setup.gpus
    low, high = p.interval_80
    capacity = setup.gpu_memory_bytes
    limit = f" of {capacity / GIB:.0f} GiB" if capacity else " GiB"
    if not setup.fits(p.memory_gib):
        limit += ": does not fit; `llmb-run tune` finds layouts that do, or the GPUs they take"
    mfu = "" if p.mfu is None else f" MFU {100 * p.mfu:.1f} %,"
    lines = [
        f"step time {p.step_time_s:.3f} s, 80 % interval {low:.3f} to {high:.3f} s",
        f"{p.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {tokens_per_s:,.0f} tokens/s, "
        f"{days_to_train(TERA_TOKENS, tokens_per_s):,.1f} days per 1T tokens",
        f"{p.tflops_per_gpu:,.0f} TFLOP/s/GPU,{mfu} memory estimate {p.memory_gib:.0f}{limit}",
        f"ceilings: {ceilings_source(setup.gpu, setup.rates)}",
    ]
    if base is not None:
        change = 100 * (p.step_time_s / base.step_time_s - 1)
        lines.append(f"without the what-if changes: {base.step_time_s:.3f} s ({change:+.1f} % with them)")
    return lines


def describe_curve(points: Sequence[tuple[StepSetup, StepPrediction]], costs: Sequence[float | None] = ()) -> str:
    """Return one line per number of GPUs; `costs`: of a million tokens at each."""
    header = (
        "GPUs",
        "gbs",
        "step s",
        "80 % interval",
        "tokens/s/GPU",
        "tokens/s",
        "MFU %",
        "GiB",
        "largest exposed term",
    )
    first = points[0][0]
    crowded = [f"{setup.gpus}" for setup, p in points if not setup.fits(p.memory_gib)]
    note = f"does not fit in the memory of a GPU at {', '.join(crowded)} GPUs" if crowded else ""
    return "\n".join([
        f"{first.shape.model.name}, {first.dtype}, {first.gpu}, {_layout(first)}, seqlen {first.seqlen}, "
        f"mbs {first.mbs}, engine {first.engine}",
        "",
        render(*with_costs(header, [_curve_row(setup, p) for setup, p in points], costs)),
        *(["", note] if note else []),
    ])  # fmt: skip


def _curve_row(setup: StepSetup, p: StepPrediction) -> tuple[str, ...]:
    exposed = {name: p.terms[name] for name in ("tp", "cp", "ep", "pp", "dp", "fsdp", "bubble", "host", "jitter")}
    name = max(exposed, key=lambda term: exposed[term])
    low, high = p.interval_80
    return (
        f"{setup.gpus}", f"{setup.gbs}", f"{p.step_time_s:.3f}", f"{low:.3f}-{high:.3f}",
        f"{p.tokens_per_s_per_gpu:,.0f}", f"{p.tokens_per_s_per_gpu * setup.gpus:,.0f}",
        "" if p.mfu is None else f"{100 * p.mfu:.1f}", f"{p.memory_gib:.0f}",
        f"{TITLES[name]} {100 * exposed[name] / p.step_time_s:.1f} %" if exposed[name] > 0 else "",
    )  # fmt: skip
