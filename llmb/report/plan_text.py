"""A plan of an out-of-core run for a person: how a step is cut, where everything rests, what is expected of it."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from llmb.perfmodel import hardware
from llmb.report.plan_figures import PlanFigures
from llmb.report.table import number, render

MIB = 2**20
CUT = {
    "chunk_size": ("chunk size", "tokens computed at once"),
    "chunks_per_round": ("chunks per round", ""),
    "seqs_per_round": ("seqs per round", "sequences that go through all layers together"),
    "rounds_per_step": ("rounds per step", ""),
    "seqs_per_step": ("seqs per step", "the global batch, in sequences"),
    "global_batch_tokens": ("global batch", "in tokens"),
    "param_blocks": ("device: param blocks", "weights on the device at once, in units"),
    "grad_blocks": ("device: grad blocks", "gradients, the same way"),
    "activation_slots": ("device: activation slots", "whole (chunk, layer)s"),
    "light_slots": ("device: light slots", "(chunk, layer)s of which only inp+context+attn are kept"),
    "host_activations": ("host activations", "(chunk, layer)s of a round that wait on the host"),
    "host_fully_saved": ("host: fully saved", "nothing of them is computed again"),
    "host_inp_context_attn": ("host: only inp+context+attn", "queries, output and MLP products are computed again"),
    "host_inp_context": ("host: only inp+context", "these and the attention are computed again"),
}
KINDS = {
    "param": "weights",
    "grad": "gradients",
    "state": "optimizer state",
    "inp": "block inputs",
    "kv": "keys and values (context)",
    "attn": "attention outputs",
    "rest": "rest of a whole activation",
    "dstream": "gradient stream",
    "dkv": "gradients of keys and values",
    "workspace": "workspace",
    "inputs": "tokens and rotations",
    "context": "the driver's own",
}
RATES = {
    "matmul_tflops": ("matrix products", "TFLOP/s"),
    "fp8_tflops": ("matrix products in fp8", "TFLOP/s"),
    "attention_forward_tflops": ("attention to own keys, forward", "TFLOP/s"),
    "attention_backward_tflops": ("attention to own keys, backward", "TFLOP/s"),
    "square_tokens": ("attention to own keys, sequences of", "tokens"),
    "past_attention_forward_tflops": ("attention to earlier keys, forward", "TFLOP/s"),
    "past_attention_backward_tflops": ("attention to earlier keys, backward", "TFLOP/s"),
    "memory_gbs": ("device memory, read and written", "GB/s"),
    "link_in_gbs": ("link, host to device", "GB/s"),
    "link_out_gbs": ("link, device to host", "GB/s"),
    "link_both_gbs": ("link, each way when both are busy", "GB/s"),
}


def describe_plan(figures: PlanFigures) -> str:
    """The page `llmb-run plan` prints."""
    gpu = hardware.gpu(figures.gpu)
    budgets = f"{figures.host_gib:g} GiB of host and {figures.device_gib:g} GiB of device memory"
    title = f"{figures.model} in {figures.dtype}, sequences of {figures.seqlen:,} tokens, on {gpu.title} with {budgets}"
    parts = [title, _cut(figures), _places(figures), _memory(figures), _expected(figures)]
    if figures.bound is not None:
        parts.append(figures.bound[0].upper() + figures.bound[1:] + ".")
    return "\n\n".join([*parts, describe_rates(figures.rates)])


def describe_rates(rates: dict[str, Any]) -> str:
    """What the machine sustains, and who says so."""
    rows = [(RATES[name][0], value, RATES[name][1]) for name, value in rates.items() if name in RATES]
    return render(("rates", "value", "unit"), rows) + f"\n({rates['source']})"


def expectations(figures: PlanFigures) -> list[tuple[str, str]]:
    """A few figures of a plan with their units in one text each, for the head of a page."""
    cut = figures.cut
    found = [
        ("budgets", f"{figures.host_gib:g} GiB of host, {figures.device_gib:g} GiB of device memory"),
        ("global batch", f"{cut.seqs_per_step} sequences, {cut.global_batch_tokens:,} tokens"),
        ("chunks", f"{cut.chunks_per_round} of {cut.chunk_size:,} tokens a round, {cut.rounds_per_step} rounds a step"),
        ("recomputed", f"{100 * figures.recompute_share:.1f} % of the FLOPs"),
    ]
    found += [("predicted", f"{number(figures.step_s)} s a step")] if figures.step_s is not None else []
    return [*found, ("rates", str(figures.rates["source"]))]


def _cut(figures: PlanFigures) -> str:
    ours, theirs = asdict(figures.cut), figures.published
    notes = {name: said for name, (_, said) in CUT.items()}
    if figures.last_chunk_tokens != figures.cut.chunk_size:
        notes["chunk_size"] += f"; the last of a sequence has {figures.last_chunk_tokens:,}"
    notes["param_blocks"] += f", of {figures.units}"
    header = ("plan", "here", *(("published",) if theirs else ()), "what it says")
    rows = [
        (CUT[name][0], value, *((theirs.get(name),) if theirs else ()), notes[name]) for name, value in ours.items()
    ]
    return render(header, rows)


def _places(figures: PlanFigures) -> str:
    header = ("where it rests", "always on device", "passing buffers", "places at home", "MiB each")
    rows = [(KINDS[p.kind], p.resident, p.passing, p.at_home, number(p.piece_bytes / MIB)) for p in figures.places]
    return render(header, rows)


def _memory(figures: PlanFigures) -> str:
    device, host = figures.device_bytes, figures.host_bytes
    rows: list[tuple[str, Any, Any]] = [
        (said, _gib(device.get(kind)), _gib(host.get(kind)))
        for kind, said in KINDS.items()
        if device.get(kind) or host.get(kind)
    ]
    rows.append(("peak", _gib(sum(device.values())), _gib(sum(host.values()))))
    rows.append(("budget", number(figures.device_gib), number(figures.host_gib)))
    return render(("memory", "device GiB", "host GiB"), rows)


def _gib(size: int | None) -> str | None:
    return number(size / hardware.GIB) if size else None


def _expected(figures: PlanFigures) -> str:
    return render(("expected of a step", "value", "unit", "what it says"), list(_expected_rows(figures)))


def _expected_rows(figures: PlanFigures) -> Iterator[tuple[str, str | None, str, str]]:
    unknown = "not known: `llmb-run probe` measures this machine" if figures.step_s is None else ""
    yield "step time", _number(figures.step_s), "s", unknown or "predicted"
    yield "throughput", _number(figures.tokens_per_s), "tokens/s", ""
    yield "compute", _number(figures.tflops), "TFLOP/s", "model FLOPs, each counted once"
    yield "MFU", _percent(figures.mfu), "%", "the same against the GPU's peak"
    yield "HFU", _percent(figures.hfu), "%", "with what is computed again"
    yield "recomputed", _percent(figures.recompute_share), "%", "of the FLOPs executed"
    yield "device computes", _percent(figures.compute_share), "%", "of the time"
    for way, size, share in (
        ("link, host to device", figures.inbound_gb, figures.inbound_share),
        ("link, device to host", figures.outbound_gb, figures.outbound_share),
    ):
        busy = "a step" if share is None else f"a step; busy {100 * share:.1f} % of the time"
        yield way, number(size), "GB", busy


def _number(value: float | None) -> str | None:
    return None if value is None else number(value)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f}"
