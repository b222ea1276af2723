"""Training on the CPU: results do not depend on how the work is split."""

import gc
import re
import weakref

import pytest
import torch
from fake_nvml import FakeNvml
from small_models import SMALL_MODELS

from llmb.events import GpuSample, StepDone
from llmb.results.readers import megatron_bridge_log
from llmb.runtime.nvml_gpu import NvmlGpu
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.train import loop
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallelize import build_model_parts

ITERATION = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(\d+)/ +4 \| consumed samples: +(\d+) "
    r"\| elapsed time per iteration \(ms\): ([\d.]+) \| learning rate: (\d\.\d{6}E[+-]\d\d) "
    r"\| global batch size: +(\d+) \| lm loss: (\d\.\d{6}E[+-]\d\d) \| loss scale: 1\.0 \| grad norm: ([\d.]+) "
    r"\| number of skipped iterations: +0 \| number of nan iterations: +0 \|$"
)
RATE = re.compile(r"^Step Time : (\d+\.\d\d)s GPU utilization: (\d+\.\d)MODEL_TFLOP/s/GPU$")
RATES = re.compile(
    r"^ \(after \d+ iterations\) tokens/s: \d+\.\d \| TFLOP/s of a GPU: 0\.\d{3} \| MFU: n/a "
    r"\| mem-max-allocated-gigabytes: \d\.\d{3} \|$"
)


def test_run_records_start_steps_and_end(trained) -> None:
    done = trained()
    assert done.code == 0
    started, steps, ended = done.started(), done.steps(), done.ended()
    assert started.gpu_name
    assert started.world_size == 1
    assert started.versions["torch"] == torch.__version__
    assert [s.step for s in steps] == [1, 2, 3, 4]
    assert [s.warmup for s in steps] == [True, True, False, False]
    assert {s.tokens for s in steps} == {4 * 32}
    assert all(s.seconds > 0 and s.grad_norm > 0 and s.memory_bytes > 2**20 and s.steps == 4 for s in steps)
    assert (ended.status, ended.reason) == ("ok", None)


def test_state_of_the_gpu_is_sampled(trained, monkeypatch) -> None:
    monkeypatch.setattr("llmb.runtime.gpu_sampler.open_gpu", lambda device: NvmlGpu(FakeNvml(), "GPU-1234"))
    done = trained()
    samples = [event for event in done.events() if isinstance(event, GpuSample)]
    assert samples
    assert {(sample.power_w, sample.measured) for sample in samples} == {(200.0, None)}


def test_log_format_is_megatron_bridge(trained, capsys) -> None:
    done = trained(lr=1e-2, lr_warmup_steps=2, lr_decay_steps=4)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    for step, rate, iteration, rates in zip(done.steps(), lines[::3], lines[1::3], lines[2::3], strict=True):
        assert RATE.match(rate)
        assert RATES.match(rates), rates
        match = ITERATION.match(iteration)
        assert match, iteration
        number, samples, milliseconds, lr, batch, loss, norm = match.groups()
        assert (int(number), int(samples), int(batch)) == (step.step, 4 * step.step, 4)
        assert float(milliseconds) == pytest.approx(step.seconds * 1e3, abs=0.051)
        assert float(lr) == (5e-3, 1e-2, 5.5e-3, 1e-3)[step.step - 1]
        assert float(loss) == pytest.approx(step.loss, rel=1e-6)
        assert float(norm) == pytest.approx(step.grad_norm, abs=5.1e-4)
    for event, step in zip(
        (e for e in megatron_bridge_log.read(lines) if isinstance(e, StepDone)), done.steps(), strict=True
    ):
        assert (event.step, event.loss) == (step.step, pytest.approx(step.loss, rel=1e-6))
        assert event.memory_bytes == pytest.approx(step.memory_bytes, rel=1e-2)
        assert event.reported_tflops_per_gpu is None or event.reported_tflops_per_gpu < 1


def test_training_is_deterministic_per_seed(trained) -> None:
    first = trained().losses()
    assert trained().losses() == first
    assert trained(seed=5).losses() != first


@pytest.mark.parametrize("name", ["llama", "nemotron_h"])
def test_gradient_accumulation_is_equivalent(trained, name: str) -> None:
    at_once, accumulated = (trained(model=SMALL_MODELS[name], mbs=mbs, ga=4 // mbs) for mbs in (4, 1))
    assert accumulated.losses() == pytest.approx(at_once.losses(), rel=1e-5)
    assert [s.grad_norm for s in accumulated.steps()] == pytest.approx([s.grad_norm for s in at_once.steps()], rel=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])  # other architectures: test_activation_offload.py
def test_recomputation_is_bit_exact(trained, dtype: str) -> None:
    plain = trained(dtype=dtype).losses()
    assert trained(dtype=dtype, recompute_layers=1).losses() == plain
    assert trained(dtype=dtype, recompute_layers=2).losses() == plain


@pytest.mark.nightly  # test_faults.py starts ranks anew, test_layout_training.py compares them with one process
def test_two_ranks_equal_one_process(trained, start) -> None:
    alone = trained(mbs=2, ga=2)
    outcome = start(ranks=2, gpus=2, dp=2, mbs=1, ga=2, recompute_layers=1)
    out, err = outcome.process.communicate(timeout=120)
    assert outcome.process.returncode == 0, err
    assert out.count("Step Time") == 4  # only rank 0 prints
    for rank in (0, 1):
        assert outcome.started(rank).world_size == 2
        assert outcome.ended(rank).status == "ok"
        assert outcome.losses(rank) == pytest.approx(alone.losses(), rel=1e-5)
        norms = [s.grad_norm for s in outcome.steps(rank)]
        assert norms == pytest.approx([s.grad_norm for s in alone.steps()], rel=1e-4)
        assert {s.tokens for s in outcome.steps(rank)} == {4 * 32}


def test_tokens_depend_only_on_their_index() -> None:
    cpu = torch.device("cpu")
    tokens = synthetic_tokens(1234, 10, (6, 33), 1000, cpu)
    assert torch.equal(tokens[2:5], synthetic_tokens(1234, 12, (3, 33), 1000, cpu))
    assert not torch.equal(tokens, synthetic_tokens(1235, 10, (6, 33), 1000, cpu))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", {"offload_layers": 1}), ("grok1", {"recompute_layers": 2, "offload_layers": 1}), ("nemotron_h", {})],
)
def test_model_is_freed_when_a_run_ends(trained, monkeypatch, name: str, changes: dict) -> None:
    """By its reference count: memory of a run is not left to the garbage collector."""
    built: list[weakref.ref] = []

    def build(*arguments):
        parts = build_model_parts(*arguments)
        buckets = (bucket for part in parts for bucket in sharded_parameters(part).buckets)
        built.extend(map(weakref.ref, (*parts, *(layer for part in parts for layer in part.layers), *buckets)))
        return parts

    monkeypatch.setattr(loop, "build_model_parts", build)
    gc.disable()
    try:
        assert trained(model=SMALL_MODELS[name], dtype="fp8", **changes).ended().status == "ok"
        assert [reference() for reference in built if reference() is not None] == []
    finally:
        gc.enable()
