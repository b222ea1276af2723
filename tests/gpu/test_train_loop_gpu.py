"""Training on a GPU: the numbers of the CPU, fused attention, memory, out of memory, synchronization."""

import copy
import gc
import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import llama_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, Model, Parallel, Precision, RunConfig, Training
from llmb.events import RunEnded, StepDone, read
from llmb.models.architectures import build_model
from llmb.models.blocks import attention_backends, causal_attention
from llmb.models.chunked_loss import chunked_cross_entropy
from llmb.ops.activation.activation import ACTIVATIONS
from llmb.ops.activation.activation_autograd import fused_activation, gated_mlp
from llmb.ops.gemm.linear_autograd import linear
from llmb.ops.norm.rms_norm_autograd import rms_norm_with_residual
from llmb.ops.rope.rope import apply_rope
from llmb.ops.rope.rope_autograd import fused_rope
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.train.__main__ import run
from llmb.train.loop import TrainJob, train_step
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallelize import build_model_parts, build_optimizer
from llmb.train.precision import compute_in_bf16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = llama_model(name="small", hidden=256, ffn=512, vocab=1000)
TWO_LAYERS_OF_8B = llama_model(name="8b of 2 layers", hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
CONFIG = RunConfig(
    name="gpu",
    target="pretrain_llama3.1",
    size="8b",
    proxy="2 of 32 layers",
    machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
    model=TWO_LAYERS_OF_8B,
    parallel=Parallel(),
    precision=Precision(dtype="bf16"),
    workload=Training(seqlen=8192, mbs=1, gbs=2, ga=2, steps=4, window=(3, 4), lr=3e-5),
)


def steps_and_end(config: RunConfig, folder: Path) -> tuple[list[StepDone], RunEnded]:
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    gc.collect()  # the previous run
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(folder / "config.json", EventRecorder(folder, 0))
    events = list(read(folder / "events.rank0.jsonl"))
    assert isinstance(events[-1], RunEnded)
    return [e for e in events if isinstance(e, StepDone)], events[-1]


def test_llama_in_bf16_matches_fp32_on_the_cpu() -> None:
    exact = build_model(SMALL)
    exact.init_weights(4)
    rounded = copy.deepcopy(exact).to(GPU)
    compute_in_bf16(rounded)
    tokens = synthetic_tokens(1, 0, (2, 257), SMALL.vocab, CPU)
    losses = []
    for network, device in ((exact, CPU), (rounded, GPU)):
        batch = tokens.to(device)
        loss = network(batch[:, :-1], batch[:, 1:])
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    expected = dict(exact.named_parameters())
    for name, parameter in rounded.named_parameters():
        error = (parameter.grad.cpu() - expected[name].grad).norm() / expected[name].grad.norm()
        assert error < 0.03, f"{name}: {error:.3f}"


def test_llama_in_fp32_matches_the_cpu() -> None:
    on_cpu = build_model(SMALL)
    on_cpu.init_weights(4)
    on_gpu = copy.deepcopy(on_cpu).to(GPU)
    tokens = synthetic_tokens(1, 0, (2, 257), SMALL.vocab, CPU)
    cpu_loss = on_cpu(tokens[:, :-1], tokens[:, 1:])
    tokens = tokens.to(GPU)
    assert on_gpu(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(cpu_loss.item(), rel=1e-5)


def test_synthetic_tokens_are_the_same_on_cpu_and_gpu() -> None:
    on_cpu, on_gpu = (synthetic_tokens(1234, 99, (4, 8193), 128256, device) for device in (CPU, GPU))
    assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="older than Hopper"
)
def test_gqa_uses_cudnn_forward_and_backward() -> None:
    assert attention_backends(GPU)[0] is SDPBackend.CUDNN_ATTENTION
    generator = torch.Generator(GPU).manual_seed(5)
    q, k, v = (
        torch.randn(1, 512, heads, 128, device=GPU, generator=generator).transpose(1, 2).requires_grad_()
        for heads in (32, 8, 8)
    )
    with sdpa_kernel(SDPBackend.MATH):
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(exact.square().sum(), (q, k, v))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fast = causal_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
        grads = torch.autograd.grad(fast.float().square().sum(), (q, k, v))
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_cudnn_attention" in names
    for a, b in zip((fast, *grads), (exact, *expected), strict=True):
        assert (a.float() - b).norm() / b.norm() < 0.02


def with_gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the output, and the gradient of each input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, dy)]


def assert_near(fused: Callable[..., Tensor], plain: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> None:
    """Compare a fused function with the plain one in double precision."""
    actual = with_gradients(fused, dy, *inputs)
    expected = with_gradients(plain, dy.double(), *(x.double() for x in inputs))
    for a, exact, like in zip(actual, expected, (dy, *inputs), strict=True):
        assert a.dtype == like.dtype
        assert (a.double() - exact).norm() < 0.01 * exact.norm()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(GPU, dtype)


def test_rms_norm_with_residual_on_gpu() -> None:
    def fused(x: Tensor, weight: Tensor) -> Tensor:
        normed, residual = rms_norm_with_residual(x, weight, 1e-5)
        return residual + normed

    x, weight, dy = randn(2, 333, 4096), randn(4096, dtype=torch.float32), randn(2, 333, 4096)
    assert_near(fused, lambda x, weight: x + F.rms_norm(x, (4096,), weight, 1e-5), dy, x, weight)


def test_rope_with_heads_before_tokens() -> None:
    angle = randn(333, 64, dtype=torch.float32) * 100
    x, dy = randn(2, 8, 333, 128).transpose(1, 2), randn(2, 333, 8, 128)
    tables = angle.cos(), angle.sin()
    assert_near(lambda x: fused_rope(x, *tables), lambda x: apply_rope(x, *tables), dy, x)


def test_gated_mlp_on_gpu() -> None:
    x, dy = randn(2, 333, 512), randn(2, 333, 512)
    weights = [randn(*shape, dtype=torch.float32) / 16 for shape in ((1536, 512), (1536, 512), (512, 1536))]

    def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    assert_near(gated_mlp, plain, dy, x, *weights)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_gated_and_not(kind: str) -> None:
    x, up, dy = randn(333, 1000), randn(1, 333, 1000)[0], randn(333, 1000)
    assert_near(lambda x: fused_activation(x, kind), ACTIVATIONS[kind], dy, x)
    assert_near(lambda x, up: fused_activation(x, kind, up), lambda x, up: ACTIVATIONS[kind](x) * up, dy, x, up)


def test_chunked_cross_entropy_on_gpu() -> None:
    hidden, head = randn(5000, 256), randn(20000, 256, dtype=torch.float32) / 16
    labels = torch.arange(5000, device=GPU) * 3
    hidden.requires_grad_()
    head.requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    loss, expected = chunked_cross_entropy(hidden, head, labels), F.cross_entropy(exact[0] @ exact[1].T, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    pairs = zip(torch.autograd.grad(loss, (hidden, head)), torch.autograd.grad(expected, exact), strict=True)
    for a, b in pairs:
        assert (a.double() - b).norm() < 0.02 * b.norm()


def test_gradients_of_micro_batches_accumulate_in_fp32_in_place() -> None:
    weight = nn.Parameter(randn(512, 256, dtype=torch.float32))
    x, dy = randn(1024, 256), randn(1024, 512)
    exact = dy.double().T @ x.double()
    addresses = set()
    for micro in range(1, 5):
        linear(x, weight).backward(dy)
        addresses.add(weight.grad.data_ptr())
        assert (weight.grad.double() - micro * exact).norm() < 1e-5 * micro * exact.norm()
    assert len(addresses) == 1


def test_layers_of_8b_train(tmp_path: Path) -> None:
    steps, ended = steps_and_end(CONFIG, tmp_path)
    assert (ended.status, ended.reason) == ("ok", None)
    assert len(steps) == 4
    # Initial logits are random with variance 4096 * 0.02^2, which adds half of that to the loss of chance.
    assert steps[0].loss == pytest.approx(math.log(128256) + 4096 * 0.02**2 / 2, rel=0.01)
    assert steps[-1].loss < steps[0].loss
    parameters = sum(p.numel() for p in _on_meta(TWO_LAYERS_OF_8B).parameters())
    assert 16 * parameters < steps[-1].memory_bytes < 16 * parameters + 20 * 2**30


def test_recompute_saves_memory_and_keeps_the_loss(tmp_path: Path) -> None:
    peaks, losses = [], []
    for layers in (0, 2):
        folder = tmp_path / str(layers)
        folder.mkdir()
        work = replace(CONFIG.workload, recompute_layers=layers, mbs=2, gbs=2, ga=1, steps=2)
        steps, ended = steps_and_end(replace(CONFIG, workload=work), folder)
        assert ended.status == "ok"
        peaks.append(steps[-1].memory_bytes)
        losses.append([s.loss for s in steps])
    assert peaks[1] < peaks[0] - 2**30
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.exclusive  # fills the memory
def test_out_of_memory_names_a_smaller_batch(tmp_path: Path) -> None:
    work = replace(CONFIG.workload, mbs=256, gbs=256, ga=1)
    steps, ended = steps_and_end(replace(CONFIG, workload=work), tmp_path)
    assert not steps
    assert ended.status == "oom"
    assert re.search(r"GiB of \d+\.\d GiB: lower mbs from 256 to \d+ \(frees about \d+\.\d GiB\)", ended.reason)


def test_step_synchronizes_once() -> None:
    work = replace(CONFIG.workload, seqlen=256)
    config = replace(CONFIG, model=SMALL, workload=work)
    job = TrainJob(config, work, Mesh(0, 1, GPU))
    parts = build_model_parts(config, work, job.mesh)
    optimizer = build_optimizer(parts, work, job.mesh)
    train_step(job, parts, optimizer, 1)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(job, parts, optimizer, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchronizing" in str(w.message)]
    assert len(waits) == 1, waits


def _on_meta(model: Model) -> torch.nn.Module:
    with torch.device("meta"):
        return build_model(model)
