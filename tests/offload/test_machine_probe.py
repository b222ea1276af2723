"""Attention rates derived from two shapes: of a machine whose speeds are known, and of this CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmb.offload import machine_probe

CPU = torch.device("cpu")
SIZES = replace(machine_probe.ON_CPU, seconds=0.06)


def test_attention_rates_of_a_machine_with_known_speeds(monkeypatch):
    """Constant FLOP/s over all visible pairs, and a constant time per query for the diagonal."""
    pair = 4.0 * SIZES.heads * SIZES.head_dim
    forward, backward, diagonal = 2e9, 1e9, 1e-6

    def seconds(segments, device, sizes):
        visible = sum((s.end - s.start) * (s.causal_start - s.context_start + (s.end - s.start) / 2) for s in segments)
        edge = diagonal * sum(s.end - s.start for s in segments)
        times = visible * pair / forward + edge, 2.5 * visible * pair / backward + edge
        return tuple((0.9 * mean, 1.1 * mean) for mean in times)  # no two calls take the same

    monkeypatch.setattr(machine_probe, "_attention_seconds", seconds)
    flops = pair * SIZES.tokens * SIZES.square_tokens / 2
    measured = machine_probe.attention_rates(CPU, SIZES)
    assert {name: each.rate for name, each in measured.items()} == pytest.approx(
        {
            "attention_forward_tflops": flops / (flops / forward + diagonal * SIZES.tokens),
            "past_attention_forward_tflops": forward,
            "attention_backward_tflops": 2.5 * flops / (2.5 * flops / backward + diagonal * SIZES.tokens),
            "past_attention_backward_tflops": backward,
        }
    )


def test_copies_are_no_copies_within_the_caches_of_a_cpu():
    caches = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    largest = max((int(size.removesuffix("K")) << 10 for size in caches), default=0)
    assert machine_probe.ON_CPU.copied > max(2 * largest, 1 << 27)


def test_impossible_times_are_refused(monkeypatch):
    monkeypatch.setattr(machine_probe, "_attention_seconds", lambda segments, device, sizes: ((1.0,), (1.0,)))
    with pytest.raises(RuntimeError, match="other work disturbs the probe"):
        machine_probe.attention_rates(CPU, SIZES)


@torch.no_grad()
def test_attention_rates_of_this_cpu():
    rates = machine_probe.attention_rates(CPU, SIZES)
    assert list(rates) == [
        "attention_forward_tflops", "past_attention_forward_tflops",
        "attention_backward_tflops", "past_attention_backward_tflops",
    ]  # fmt: skip
    assert all(each.rate > 0 for each in rates.values())


@torch.no_grad()
def test_gemms_of_a_model_in_a_dtype():
    before = torch.get_float32_matmul_precision()
    measured = machine_probe.dtype_gemm_rate("tf32", CPU, [(16, 32, 64), (16, 64, 32)], 0.03)
    assert measured.amount == 2 * 6.0 * 16 * 32 * 64
    spread = measured.rates(machine_probe.TERA)
    assert 0 < spread.p5 <= spread.median <= spread.p95
    assert spread.n == len(measured.seconds)
    assert torch.get_float32_matmul_precision() == before
