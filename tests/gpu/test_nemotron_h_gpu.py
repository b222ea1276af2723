"""Nemotron-H on a GPU: kernels against the recurrence, the model against the CPU, layers of 8B train."""

import copy
import gc
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import nemotron_h_model
from torch import Tensor

from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, MambaConfig, Parallel, Precision, RunConfig, Training
from llmb.events import RunEnded, StepDone, read
from llmb.models.architectures import build_model
from llmb.ops.mamba.causal_conv1d import causal_conv1d
from llmb.ops.mamba.ssd import ssd, ssd_sequential
from llmb.ops.norm.gated_norm import gated_norm
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.train.__main__ import run
from llmb.train.precision import compute_in_bf16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NAMES = ("y", "x", "dt", "a", "b", "c", "d")
SMALL = nemotron_h_model(
    name="small",
    hidden=256,
    ffn=512,
    vocab=1000,
    pattern="M-M*-M",
    mamba=MambaConfig(heads=8, head_dim=64, groups=2, state=64, chunk=64),
)
LAYERS_OF_8B = replace(
    SMALL,
    name="8b of 4 layers",
    layers=4,
    hidden=4096,
    ffn=21504,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=131072,
    pattern="M-M*",
    mamba=MambaConfig(heads=128, head_dim=64, groups=8, state=128, chunk=128),
)
CONFIG = RunConfig(
    name="gpu",
    target="pretrain_nemotronh",
    size="8b",
    proxy="4 of 52 layers",
    machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
    model=LAYERS_OF_8B,
    parallel=Parallel(),
    precision=Precision(dtype="bf16"),
    workload=Training(seqlen=8192, mbs=1, gbs=2, ga=2, steps=4, window=(3, 4)),
)


def scan_inputs(batch: int, tokens: int, heads: int, width: int, groups: int, state: int) -> list[Tensor]:
    """Inputs of the scan as at the start of training, on the GPU in fp32."""
    generator = torch.Generator(GPU).manual_seed(5)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=GPU)

    dt = F.softplus(randn(batch, tokens, heads) - 4)
    rates = 1 + 15 * torch.rand(heads, generator=generator, device=GPU)
    return [
        randn(batch, tokens, heads, width),
        dt,
        -rates,
        randn(batch, tokens, groups, state) / 4,
        randn(batch, tokens, groups, state) / 4,
        randn(heads),
    ]


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], *arguments: object) -> list[Tensor]:
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors, *arguments)
    weights = torch.randn(out.shape, generator=torch.Generator(GPU).manual_seed(1), device=GPU).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def errors(actual: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative error of each tensor; one that should be all zero must be."""
    return [
        ((x.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        for x, expected in zip(actual, exact, strict=True)
    ]


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((2, 300, 8, 64, 2, 128), 128),
        ((1, 515, 4, 64, 4, 256), 256),
    ],
)  # small and odd sizes: tests/ops/test_ssd.py
def test_ssd_kernels_match_the_recurrence(shape: tuple[int, ...], chunk: int) -> None:
    tensors = scan_inputs(*shape)
    exact = with_gradients(ssd_sequential, [x.double() for x in tensors])
    for name, error in zip(NAMES, errors(with_gradients(ssd, tensors, chunk), exact), strict=True):
        assert error < 5e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("heads", "state", "chunk"), [(128, 128, 128), (32, 256, 256)])
def test_ssd_in_bf16_at_full_size(heads: int, state: int, chunk: int) -> None:
    x, dt, a, b, c, d = scan_inputs(1, 2048 + 100, heads, 64, 8, state)
    tensors = [x.bfloat16(), dt, a, b.bfloat16(), c.bfloat16(), d]
    exact = with_gradients(ssd.reference, [x.double() for x in tensors], 64)
    for name, error in zip(NAMES, errors(with_gradients(ssd, tensors, chunk), exact), strict=True):
        assert error < 1e-2, f"{name}: {error:.1e}"


def test_causal_conv1d_and_gated_norm_in_bf16_at_full_size() -> None:
    generator = torch.Generator(GPU).manual_seed(5)
    sections = (1024, 128, 128)
    wide = torch.randn(2, 1000, 8, 2320, generator=generator, device=GPU).bfloat16()
    weight, bias = (torch.randn(*size, generator=generator, device=GPU) for size in ((10240, 1, 4), (10240,)))
    tensors = [wide[..., 1024:2304], weight, bias]
    exact = with_gradients(causal_conv1d.reference, [x.double() for x in tensors], sections)
    assert max(errors(with_gradients(causal_conv1d, tensors, sections), exact)) < 4e-3
    scale = torch.rand(8192, generator=generator, device=GPU)
    tensors = [wide[..., 1024:2048].flatten(2), wide[..., :1024], scale]
    exact = with_gradients(gated_norm.reference, [x.double() for x in tensors], 1e-5)
    assert max(errors(with_gradients(gated_norm, tensors, 1e-5), exact)) < 4e-3


def losses_and_gradients(exact: torch.nn.Module, on_gpu: torch.nn.Module) -> tuple[list[float], dict[str, float]]:
    tokens = synthetic_tokens(1, 0, (2, 258), SMALL.vocab, CPU)
    losses = []
    for network, device in ((exact, CPU), (on_gpu, GPU)):
        batch = tokens.to(device)
        loss = network(batch[:, :-1], batch[:, 1:])
        loss.backward()
        losses.append(loss.item())
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    errors_by_name = {
        name: ((parameter.grad.cpu() - expected[name]).norm() / expected[name].norm()).item()
        for name, parameter in on_gpu.named_parameters()
    }
    return losses, errors_by_name


def test_nemotron_h_in_fp32_matches_the_cpu() -> None:
    on_cpu = build_model(SMALL)
    on_cpu.init_weights(4)
    losses, errors_by_name = losses_and_gradients(on_cpu, copy.deepcopy(on_cpu).to(GPU))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, error in errors_by_name.items():
        assert error < 1e-3, f"{name}: {error:.1e}"


def test_nemotron_h_in_bf16_matches_fp32_on_the_cpu() -> None:
    exact = build_model(SMALL)
    exact.init_weights(4)
    rounded = copy.deepcopy(exact).to(GPU)
    compute_in_bf16(rounded)
    losses, errors_by_name = losses_and_gradients(exact, rounded)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, error in errors_by_name.items():
        assert error < 0.05, f"{name}: {error:.3f}"


def steps_and_end(config: RunConfig, folder: Path) -> tuple[list[StepDone], RunEnded]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    gc.collect()  # the previous run
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(folder / "config.json", EventRecorder(folder, 0))
    events = list(read(folder / "events.rank0.jsonl"))
    assert isinstance(events[-1], RunEnded)
    return [e for e in events if isinstance(e, StepDone)], events[-1]


def test_layers_of_8b_train_and_recompute_keeps_the_loss(tmp_path: Path) -> None:
    peaks, losses = [], []
    for layers in (0, 4):
        work = replace(CONFIG.workload, recompute_layers=layers)
        steps, ended = steps_and_end(replace(CONFIG, workload=work), tmp_path / str(layers))
        assert (ended.status, ended.reason) == ("ok", None)
        peaks.append(steps[-1].memory_bytes)
        losses.append([step.loss for step in steps])
    # Initial logits are random with variance 4096 * 0.02^2, which adds half of that to the loss of chance.
    assert losses[0][0] == pytest.approx(math.log(131072) + 4096 * 0.02**2 / 2, rel=0.01)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] < peaks[0] - 2**30


def test_nemotron_h_never_synchronizes() -> None:
    network = build_model(SMALL)
    network.init_weights(4)
    network.to(GPU)
    compute_in_bf16(network)
    tokens = synthetic_tokens(1, 0, (2, 258), SMALL.vocab, GPU)
    network(tokens[:, :-1], tokens[:, 1:]).backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            network(tokens[:, :-1], tokens[:, 1:]).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [str(w.message) for w in caught if "synchronizing" in str(w.message)]


@pytest.mark.exclusive  # measures time
def test_ssd_is_faster_than_plain_torch() -> None:
    """One Mamba layer of 8B with 8,192 tokens, forward and backward."""
    x, dt, a, b, c, d = scan_inputs(1, 8192, 128, 64, 8, 128)
    tensors = [x.bfloat16(), dt, a, b.bfloat16(), c.bfloat16(), d]
    seconds = []
    for function in (ssd, ssd.reference):
        for _ in range(2):
            with_gradients(function, tensors, 128)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            with_gradients(function, tensors, 128)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 3e3)
    print(f"SSD scan, forward and backward: kernels {seconds[0]:.4f} s, plain torch {seconds[1]:.4f} s")
    assert seconds[0] < seconds[1] / 4
