"""Nemotron-H on a real GPU: compiled kernels against the recurrence, the network against the CPU, layers of 8B train.

No Triton kernel is imported here at the top: where there is no GPU, tests/kernels chooses the interpreter first.
"""

import copy
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, MambaConfig, Model, Parallel, Precision, RunConfig, Training
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
SMALL = Model(
    name="small",
    architecture="nemotron_h",
    layers=6,
    hidden=256,
    ffn=512,
    gated=False,
    activation="squared_relu",
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab=1000,
    rope=None,
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


def inputs(batch: int, tokens: int, heads: int, width: int, groups: int, state: int) -> list[Tensor]:
    """As a mixer at the start of training gives them to the scan, on the GPU in fp32."""
    generator = torch.Generator(GPU).manual_seed(5)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=GPU)

    dt = F.softplus(normal(batch, tokens, heads) - 4)
    rates = 1 + 15 * torch.rand(heads, generator=generator, device=GPU)
    return [
        normal(batch, tokens, heads, width),
        dt,
        -rates,
        normal(batch, tokens, groups, state) / 4,
        normal(batch, tokens, groups, state) / 4,
        normal(heads),
    ]


def with_gradients(form: Callable[..., Tensor], tensors: list[Tensor], *rest: object) -> list[Tensor]:
    tensors = [one.detach().requires_grad_() for one in tensors]
    out = form(*tensors, *rest)
    weights = torch.randn(out.shape, generator=torch.Generator(GPU).manual_seed(1), device=GPU).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def errors(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Of each tensor, relative to its size; one that should be all zero must be."""
    return [
        ((one.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
        for one, wanted in zip(ours, exact, strict=True)
    ]


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((2, 300, 8, 64, 2, 128), 128),
        ((1, 515, 4, 64, 4, 256), 256),
        ((1, 77, 6, 40, 3, 24), 48),
        ((3, 64, 2, 128, 1, 16), 16),
        ((1, 1, 2, 16, 1, 16), 64),
    ],
)
def test_compiled_kernels_give_what_the_recurrence_gives(shape: tuple[int, ...], chunk: int) -> None:
    tensors = inputs(*shape)
    exact = with_gradients(ssd_sequential, [one.double() for one in tensors])
    for name, error in zip(NAMES, errors(with_gradients(ssd, tensors, chunk), exact), strict=True):
        assert error < 5e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("heads", "state", "chunk"), [(128, 128, 128), (32, 256, 256)])
def test_kernels_in_bf16_at_the_sizes_in_use(heads: int, state: int, chunk: int) -> None:
    x, dt, a, b, c, d = inputs(1, 2048 + 100, heads, 64, 8, state)
    tensors = [x.bfloat16(), dt, a, b.bfloat16(), c.bfloat16(), d]
    exact = with_gradients(ssd.reference, [one.double() for one in tensors], 64)
    for name, error in zip(NAMES, errors(with_gradients(ssd, tensors, chunk), exact), strict=True):
        assert error < 1e-2, f"{name}: {error:.1e}"


def test_convolution_and_norm_in_bf16_at_the_sizes_in_use() -> None:
    generator = torch.Generator(GPU).manual_seed(5)
    sections = (1024, 128, 128)
    wide = torch.randn(2, 1000, 8, 2320, generator=generator, device=GPU).bfloat16()
    weight, bias = (torch.randn(*size, generator=generator, device=GPU) for size in ((10240, 1, 4), (10240,)))
    tensors = [wide[..., 1024:2304], weight, bias]
    exact = with_gradients(causal_conv1d.reference, [one.double() for one in tensors], sections)
    assert max(errors(with_gradients(causal_conv1d, tensors, sections), exact)) < 4e-3
    scale = torch.rand(8192, generator=generator, device=GPU)
    tensors = [wide[..., 1024:2048].flatten(2), wide[..., :1024], scale]
    exact = with_gradients(gated_norm.reference, [one.double() for one in tensors], 1e-5)
    assert max(errors(with_gradients(gated_norm, tensors, 1e-5), exact)) < 4e-3


def losses_and_gradients(exact: torch.nn.Module, there: torch.nn.Module) -> tuple[list[float], dict[str, float]]:
    tokens = synthetic_tokens(1, 0, (2, 258), SMALL.vocab, CPU)
    losses = []
    for network, device in ((exact, CPU), (there, GPU)):
        here = tokens.to(device)
        loss = network(here[:, :-1], here[:, 1:])
        loss.backward()
        losses.append(loss.item())
    wanted = {name: parameter.grad for name, parameter in exact.named_parameters()}
    far = {
        name: ((parameter.grad.cpu() - wanted[name]).norm() / wanted[name].norm()).item()
        for name, parameter in there.named_parameters()
    }
    return losses, far


def test_fp32_on_the_gpu_agrees_with_the_cpu_closely() -> None:
    here = build_model(SMALL)
    here.init_weights(4)
    losses, far = losses_and_gradients(here, copy.deepcopy(here).to(GPU))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, error in far.items():
        assert error < 1e-3, f"{name}: {error:.1e}"


def test_bf16_on_the_gpu_agrees_with_fp32_on_the_cpu() -> None:
    exact = build_model(SMALL)
    exact.init_weights(4)
    rounded = copy.deepcopy(exact).to(GPU)
    compute_in_bf16(rounded)
    losses, far = losses_and_gradients(exact, rounded)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, error in far.items():
        assert error < 0.05, f"{name}: {error:.3f}"


def steps_and_end(config: RunConfig, folder: Path) -> tuple[list[StepDone], RunEnded]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(folder / "config.json", EventRecorder(folder, 0))
    events = list(read(folder / "events.rank0.jsonl"))
    assert isinstance(events[-1], RunEnded)
    return [e for e in events if isinstance(e, StepDone)], events[-1]


def test_layers_of_8b_train_and_recomputation_keeps_the_loss(tmp_path: Path) -> None:
    peaks, losses = [], []
    for layers in (0, 4):
        work = replace(CONFIG.workload, recompute_layers=layers)
        steps, ended = steps_and_end(replace(CONFIG, workload=work), tmp_path / str(layers))
        assert (ended.status, ended.reason) == ("ok", None)
        peaks.append(steps[-1].memory_bytes)
        losses.append([step.loss for step in steps])
    # Logits start as random numbers of variance 4096 * 0.02^2, which costs half of that above chance.
    assert losses[0][0] == pytest.approx(math.log(131072) + 4096 * 0.02**2 / 2, rel=0.01)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] < peaks[0] - 2**30


def test_a_forward_and_backward_pass_never_waits_for_the_device() -> None:
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


def test_the_kernels_are_faster_than_plain_torch() -> None:
    """At the size of one Mamba layer of 8B and 8,192 tokens, forward and backward."""
    x, dt, a, b, c, d = inputs(1, 8192, 128, 64, 8, 128)
    tensors = [x.bfloat16(), dt, a, b.bfloat16(), c.bfloat16(), d]
    seconds = []
    for form in (ssd, ssd.reference):
        for _ in range(2):
            with_gradients(form, tensors, 128)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            with_gradients(form, tensors, 128)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 3e3)
    print(f"state-space scan, forward and backward: kernels {seconds[0]:.4f} s, plain torch {seconds[1]:.4f} s")
    assert seconds[0] < seconds[1] / 4
