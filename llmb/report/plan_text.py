"""Text of an out-of-core plan: division of a step, placement of buffers, memory, prediction."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from llmb.perfmodel import hardware
from llmb.report.plan_figures import PlanFigures
from llmb.report.setting_text import lora_text
from llmb.report.table import number, render

MIB = 2**20
LAYOUT = {
    "chunk_size": ("chunk size", "tokens computed at once"),
    "chunks_per_round": ("chunks per round", ""),
    "seqs_per_round": ("seqs per round", "sequences that go through all layers together"),
    "rounds_per_step": ("rounds per step", ""),
    "seqs_per_step": ("seqs per step", "the global batch, in sequences"),
    "global_batch_tokens": ("global batch", "in tokens"),
    "param_blocks": ("device: param blocks", "weights on the device at once, in parameter buckets"),
    "grad_blocks": ("device: grad blocks", "gradients, likewise"),
    "activation_slots": ("device: activation slots", "fully saved (chunk, layer)s"),
    "light_slots": ("device: light slots", "(chunk, layer)s of which only inp+context+attn are saved"),
    "host_activations": ("host activations", "(chunk, layer)s of a round that are on the host"),
    "host_fully_saved": ("host: fully saved", "nothing of them is recomputed"),
    "host_inp_context_attn": ("host: only inp+context+attn", "queries, output and MLP gemms are recomputed"),
    "host_inp_context": ("host: only inp+context", "these and the attention are recomputed"),
}
KINDS = {
    "param": "weights",
    "grad": "gradients",
    "state": "optimizer state",
    "inp": "layer inputs",
    "kv": "keys and values (context)",
    "attn": "attention outputs",
    "rest": "other saved activations",
    "dstream": "residual gradients",
    "dkv": "gradients of keys and values",
    "adapters": "adapters with gradients and optimizer state",
    "workspace": "workspace",
    "inputs": "tokens and RoPE table",
    "context": "CUDA context",
    "staging": "staging buffers of the disk",
}
RATES = {
    "matmul_tflops": ("gemms", "TFLOP/s"),
    "fp8_tflops": ("gemms in fp8", "TFLOP/s"),
    "attention_forward_tflops": ("attention to own keys, forward", "TFLOP/s"),
    "attention_backward_tflops": ("attention to own keys, backward", "TFLOP/s"),
    "square_tokens": ("attention to own keys, sequences of", "tokens"),
    "past_attention_forward_tflops": ("attention to earlier keys, forward", "TFLOP/s"),
    "past_attention_backward_tflops": ("attention to earlier keys, backward", "TFLOP/s"),
    "memory_gbs": ("device memory, read and written", "GB/s"),
    "link_in_gbs": ("link, host to device", "GB/s"),
    "link_out_gbs": ("link, device to host", "GB/s"),
    "link_both_gbs": ("link, per direction when both are busy", "GB/s"),
}
DISK_RATES = {
    "disk_read_gbs": ("disk, read", "GB/s"),
    "disk_write_gbs": ("disk, written", "GB/s"),
    "disk_both_gbs": ("disk, per direction when both are busy", "GB/s"),
}


def describe_plan(figures: PlanFigures) -> str:
    """Return the text that `llmb-run plan` prints."""
    gpu = hardware.gpu(figures.gpu)
    budgets = f"{figures.host_gib:g} GiB of host and {figures.device_gib:g} GiB of device memory"
    budgets += f", and {figures.disk_gib:g} GiB of disk" if figures.disk_gib else ""
    lora = f", {lora_text(figures.lora_rank, figures.frozen_weights)}" if figures.lora_rank else ""
    run = f"{figures.model} in {figures.dtype}{lora}, sequences of {figures.seqlen:,} tokens"
    title = f"{run}, on {gpu.title} with {budgets}"
    parts = [title, _layout(figures), _placements(figures), _memory(figures), _prediction(figures)]
    if figures.bound is not None:
        parts.append(figures.bound[0].upper() + figures.bound[1:] + ".")
    return "\n\n".join([*parts, describe_rates(figures.rates)])


def describe_rates(rates: dict[str, Any]) -> str:
    """Return the table of sustained rates, with their source."""
    labels = RATES | {name: label for name, label in DISK_RATES.items() if rates.get(name) is not None}
    rows = [(labels[name][0], value, labels[name][1]) for name, value in rates.items() if name in labels]
    return render(("rates", "value", "unit"), rows) + f"\n({rates['source']})"


def expectations(figures: PlanFigures) -> list[tuple[str, str]]:
    """Return a few figures of a plan as text with units, for the head of a page."""
    layout = figures.layout
    lines = [
        ("budgets", f"{figures.host_gib:g} GiB of host, {figures.device_gib:g} GiB of device memory"),
        ("global batch", f"{layout.seqs_per_step} sequences, {layout.global_batch_tokens:,} tokens"),
        ("chunks", f"{layout.chunks_per_round} of {layout.chunk_size:,} tokens per round"),
        ("rounds", f"{layout.rounds_per_step} per step"),
        ("recomputed", f"{100 * figures.recompute_share:.1f} % of the FLOPs"),
    ]
    lines += [("predicted", f"{number(figures.step_s)} s per step")] if figures.step_s is not None else []
    return [*lines, ("rates", str(figures.rates["source"]))]


def _layout(figures: PlanFigures) -> str:
    layout, published = asdict(figures.layout), figures.published
    notes = {name: note for name, (_, note) in LAYOUT.items()}
    if figures.last_chunk_tokens != figures.layout.chunk_size:
        notes["chunk_size"] += f"; the last of a sequence has {figures.last_chunk_tokens:,}"
    notes["param_blocks"] += f", of {figures.param_buckets}"
    header = ("plan", "here", *(("published",) if published else ()), "meaning")
    rows = [
        (LAYOUT[name][0], value, *((published.get(name),) if published else ()), notes[name])
        for name, value in layout.items()
    ]
    return render(header, rows)


def _placements(figures: PlanFigures) -> str:
    disk = ("on disk",) if figures.disk_gib else ()
    header = ("buffers", "resident on device", "other device buffers", "host slots", *disk, "MiB each")
    rows = [
        (KINDS[p.kind], p.resident, p.passing, p.host_slots, *(p.on_disk for _ in disk), number(p.buffer_bytes / MIB))
        for p in figures.placements
    ]
    return render(header, rows)


def _memory(figures: PlanFigures) -> str:
    tiers = {"device": (figures.device_bytes, figures.device_gib), "host": (figures.host_bytes, figures.host_gib)}
    if figures.disk_gib:
        tiers["disk"] = figures.disk_bytes, figures.disk_gib
    rows: list[tuple[Any, ...]] = [
        (label, *(_gib(usage.get(kind)) for usage, _ in tiers.values()))
        for kind, label in KINDS.items()
        if any(usage.get(kind) for usage, _ in tiers.values())
    ]
    rows.append(("peak", *(_gib(sum(usage.values())) for usage, _ in tiers.values())))
    rows.append(("budget", *(number(budget) for _, budget in tiers.values())))
    return render(("memory", *(f"{tier} GiB" for tier in tiers)), rows)


def _gib(size: int | None) -> str | None:
    return number(size / hardware.GIB) if size else None


def _prediction(figures: PlanFigures) -> str:
    return render(("prediction of a step", "value", "unit", "meaning"), list(_prediction_rows(figures)))


def _prediction_rows(figures: PlanFigures) -> Iterator[tuple[str, str | None, str, str]]:
    unknown = f"not known: {_remedy(figures)}" if figures.step_s is None else ""
    yield "step time", _number(figures.step_s), "s", unknown or "predicted"
    yield "throughput", _number(figures.tokens_per_s), "tokens/s", ""
    yield "compute", _number(figures.tflops), "TFLOP/s", "model FLOPs, without recomputation"
    yield "MFU", _percent(figures.mfu), "%", "the same relative to the GPU's peak"
    yield "HFU", _percent(figures.hfu), "%", "with recomputation"
    yield "recomputed", _percent(figures.recompute_share), "%", "of the FLOPs executed"
    yield "device busy", _percent(figures.compute_share), "%", "of the time"
    for direction, size, fraction in (
        ("link, host to device", figures.inbound_gb, figures.inbound_share),
        ("link, device to host", figures.outbound_gb, figures.outbound_share),
        ("disk, read", figures.disk_read_gb, figures.disk_read_share),
        ("disk, written", figures.disk_write_gb, figures.disk_write_share),
    ):
        if direction.startswith("disk") and not figures.disk_bytes:
            continue
        busy = "per step" if fraction is None else f"per step; busy {100 * fraction:.1f} % of the time"
        yield direction, number(size), "GB", busy


def _remedy(figures: PlanFigures) -> str:
    if figures.disk_bytes and figures.rates.get("disk_read_gbs") is None:
        return "`llmb-run probe --disk-path FOLDER` measures the disk, --set disk_gbs=7 states its GB/s"
    return "`llmb-run probe` measures this machine"


def _number(value: float | None) -> str | None:
    return None if value is None else number(value)


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{100 * fraction:.2f}"
