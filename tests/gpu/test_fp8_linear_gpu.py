"""fp8 linear layers on a GPU: the cast has the bits of the CPU, the GEMMs the error of fp8 operands."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import llama_model
from torch import Tensor

from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.events import RunEnded, StepDone, read
from llmb.ops.gemm.fp8_linear import OperandNames, fp8_linear, fp8_linear_reference
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import CurrentScaling, DelayedScaling, Scaling
from llmb.ops.quant.fp8_quant import E5M2, cast_to_fp8, tensor_scale
from llmb.runtime.recorder import EventRecorder
from llmb.train.__main__ import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no GPU with fp8 GEMM",
    ),
]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TOKENS = 2048
NAMES = OperandNames("x", "weight", "dy")
LAYERS_OF_8B = [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)]  # inputs, outputs: q and o, k and v, up, down
SMALL = llama_model(name="small", layers=4, hidden=256, ffn=768, vocab=1024)
CONFIG = RunConfig(
    name="gpu",
    target="pretrain_llama3.1",
    size="8b",
    proxy="small",
    machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
    model=SMALL,
    parallel=Parallel(),
    precision=Precision(dtype="fp8"),
    workload=Training(seqlen=512, mbs=4, gbs=8, ga=2, steps=50, window=(30, 50), lr=1e-3),
)


def operands(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(GPU).manual_seed(1)
    x = torch.randn(tokens, inputs, device=GPU, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(outputs, inputs, device=GPU, generator=generator) * 0.02).requires_grad_()
    grad = (torch.randn(tokens, outputs, device=GPU, generator=generator) * 1e-6).bfloat16()
    return x, weight, grad


def results(x: Tensor, weight: Tensor, grad: Tensor, scaling: Scaling | None = None) -> tuple[Tensor, ...]:
    scaling = scaling or CurrentScaling(NAMES.dtypes, GPU)
    out = fp8_linear(x, weight, scaling, NAMES)
    return out, *torch.autograd.grad(out, (x, weight), grad)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (1000, 4096), (4096, 1040)], ids=str)
def test_cast_has_the_bits_of_the_cpu(dtype: torch.dtype, source: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp() ** 4).to(source)
    on_cpu = cast_to_fp8(x, tensor_scale(x, dtype), dtype, rows=True, columns=True)
    moved = x.to(GPU)
    on_gpu = cast_to_fp8(moved, tensor_scale(moved, dtype), dtype, rows=True, columns=True)
    assert on_cpu.scale == on_gpu.scale.cpu()
    assert torch.equal(on_cpu.rows.view(torch.uint8), on_gpu.rows.view(torch.uint8).cpu())
    assert torch.equal(on_cpu.columns.view(torch.uint8), on_gpu.columns.view(torch.uint8).cpu())
    for layout in ("rows", "columns"):
        single = cast_to_fp8(moved, on_gpu.scale, dtype, **{layout: True})
        assert torch.equal(getattr(single, layout).view(torch.uint8), getattr(on_gpu, layout).view(torch.uint8))


@pytest.mark.parametrize(("inputs", "outputs"), LAYERS_OF_8B, ids=str)
def test_gemms_of_8b(inputs: int, outputs: int) -> None:
    x, weight, grad = operands(TOKENS, inputs, outputs)
    actual = results(x, weight, grad)
    exact = (x.float() @ weight.T, grad.float() @ weight, grad.float().T @ x.float())
    same = fp8_linear_reference(x.detach(), weight.detach(), grad)
    forward, backward = (math.hypot(2.0**-bits, 2.0**-4) / math.sqrt(3) for bits in (4, 3))
    # Fast accumulation in the forward pass shows against the reference, much less against exact numbers.
    for name, a, truth, reference, bound, near in zip(
        ("out", "grad of x", "grad of weight"), actual, exact, same,
        (forward, backward, backward), (0.02, 0.005, 0.005), strict=True,
    ):  # fmt: skip
        assert relative_error(a, reference) < near, name
        assert 0.005 < relative_error(a, truth) < bound, name


def test_delayed_scaling_takes_the_scales_of_the_previous_step() -> None:
    """The second step takes the scales of the first; gradients accumulate in place."""
    scaling = DelayedScaling(NAMES.dtypes, GPU)
    x, weight, grad = operands(TOKENS, 4096, 1024)
    first = results(x, weight, grad, scaling)
    scaling.update()
    scales = tuple(scaling.state_dict()[name][0] for name in NAMES)
    expected = fp8_linear_reference(x.detach(), weight.detach(), grad, scales)
    for a, b, second, near in zip(
        first, expected, results(x, weight, grad, scaling), (0.02, 0.005, 0.005), strict=True
    ):
        assert torch.equal(a, second)
        assert relative_error(a, b) < near
    weight.main_grad = torch.full_like(weight, math.nan)
    for _micro_batch in range(2):
        fp8_linear(x, weight, scaling, NAMES).backward(grad)
    assert weight.grad.data_ptr() == weight.main_grad.data_ptr()
    assert relative_error(weight.grad, 2 * first[2]) < 1e-5


def test_all_three_gemms_use_fp8_kernels() -> None:
    x, weight, grad = operands(2048, 2048, 3072)
    results(x, weight, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results(x, weight, grad)
    calls = Counter({event.key: event.count for event in profile.key_averages()})
    assert calls["llmb::matmul"] == 3
    assert calls["aten::mm"] == calls["aten::linear"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
def test_nonfinite_values_become_nan(value: float, where: str) -> None:
    named = dict(zip(("x", "weight", "grad"), operands(64, 128, 64), strict=True))
    named[where].data[3, 5] = value
    out, grad_x, grad_weight = results(**named)
    touched = {"x": (out, grad_weight), "weight": (out, grad_x), "grad": (grad_x, grad_weight)}[where]
    assert all(t.isnan().all() for t in touched)


def steps_of(config: RunConfig, folder: Path) -> list[StepDone]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    run(folder / "config.json", EventRecorder(folder, 0))
    events = list(read(folder / "events.rank0.jsonl"))
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].status, events[-1].reason) == ("ok", None)
    return [event for event in events if isinstance(event, StepDone)]


def test_a_small_llama_trains_in_fp8_as_in_bf16(tmp_path: Path) -> None:
    losses = {}
    for dtype in ("bf16", "fp8"):
        steps = steps_of(replace(CONFIG, precision=Precision(dtype=dtype)), tmp_path / dtype)
        losses[dtype] = [step.loss for step in steps]
    assert losses["fp8"][0] == pytest.approx(losses["bf16"][0], rel=2e-3)
    last = {dtype: sum(values[-10:]) / 10 for dtype, values in losses.items()}
    assert last["bf16"] < losses["bf16"][0] - 0.3, "there is something to learn"
    assert last["fp8"] == pytest.approx(last["bf16"], rel=0.01)
