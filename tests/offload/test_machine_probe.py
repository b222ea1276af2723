"""The rates of attention that follow from two forms of it: of a machine whose speeds are known, and of this CPU."""

from dataclasses import replace

import pytest
import torch

from llmb.offload import machine_probe

CPU = torch.device("cpu")
SIZES = replace(machine_probe.ON_CPU, seconds=0.06)


def test_of_a_machine_whose_speeds_are_known(monkeypatch):
    """Some FLOPs a second of all that is seen, and so much for the diagonal of each query."""
    pair = 4.0 * SIZES.heads * SIZES.head_dim
    there, back, diagonal = 2e9, 1e9, 1e-6

    def seconds(spans, device, sizes):
        seen = sum((s.end - s.first) * (s.here - s.past + (s.end - s.first) / 2) for s in spans)
        edge = diagonal * sum(s.end - s.first for s in spans)
        return seen * pair / there + edge, 2.5 * seen * pair / back + edge

    monkeypatch.setattr(machine_probe, "_attention_seconds", seconds)
    flops = pair * SIZES.tokens * SIZES.square_tokens / 2
    assert machine_probe.attention_rates(CPU, SIZES) == pytest.approx(
        {
            "attention_forward_tflops": flops / (flops / there + diagonal * SIZES.tokens),
            "past_attention_forward_tflops": there,
            "attention_backward_tflops": 2.5 * flops / (2.5 * flops / back + diagonal * SIZES.tokens),
            "past_attention_backward_tflops": back,
        }
    )


def test_times_that_cannot_be_are_no_rates(monkeypatch):
    monkeypatch.setattr(machine_probe, "_attention_seconds", lambda spans, device, sizes: (1.0, 1.0))
    with pytest.raises(RuntimeError, match="other work disturbs the probe"):
        machine_probe.attention_rates(CPU, SIZES)


@torch.no_grad()
def test_of_this_cpu():
    found = machine_probe.attention_rates(CPU, SIZES)
    assert list(found) == [
        "attention_forward_tflops", "past_attention_forward_tflops",
        "attention_backward_tflops", "past_attention_backward_tflops",
    ]  # fmt: skip
    assert all(rate > 0 for rate in found.values())
