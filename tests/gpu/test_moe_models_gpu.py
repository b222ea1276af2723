"""MoE models, MLA and softcap attention on a GPU: numbers of the CPU, fused kernels, no synchronization."""

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import deepseek_model, grok1_model
from torch.utils.checkpoint import checkpoint

from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, MlaConfig, Model, MoEConfig, Parallel, Precision, RopeConfig, RunConfig, Training
from llmb.events import RunEnded, StepDone, read
from llmb.models.architectures import build_model
from llmb.models.blocks import causal_attention
from llmb.models.moe import MoE, Router
from llmb.ops.attention.softcap_attention import softcap_attention
from llmb.ops.moe.grouped_gemm import grouped_gemm, grouped_gemm_reference
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.train.__main__ import run
from llmb.train.precision import compute_in_bf16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GROK = grok1_model(
    name="small grok",
    hidden=256,
    ffn=512,
    vocab=1000,
    rope=RopeConfig(theta=10_000.0),
    embedding_scale=16.0,
    logit_scale=0.5773502691896257,
    experts=MoEConfig(count=8, top_k=2, ffn=512, renormalise=False),
)
DEEPSEEK = deepseek_model(
    name="small deepseek",
    layers=3,
    hidden=256,
    ffn=640,
    vocab=1000,
    rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=4096, mscale_all_dim=1.0),
    experts=MoEConfig(
        count=16, top_k=4, ffn=128, shared=1, dense_layers=1, groups=4, top_groups=2, score="sigmoid", scale=2.5
    ),
    mla=MlaConfig(q_rank=96, kv_rank=64, nope_dim=64, rope_dim=32, value_dim=64),
)
GROK_LAYER = replace(
    GROK,
    name="a layer of grok",
    layers=1,
    hidden=6144,
    ffn=32768,
    heads=48,
    kv_heads=8,
    head_dim=128,
    vocab=32064,
    embedding_scale=78.38367176906169,
    experts=replace(GROK.experts, count=4, ffn=32768),
)
DEEPSEEK_LAYERS = replace(
    DEEPSEEK,
    name="layers of deepseek",
    layers=2,
    hidden=7168,
    ffn=18432,
    heads=128,
    kv_heads=128,
    vocab=32064,
    experts=replace(DEEPSEEK.experts, count=32, top_k=8, ffn=2048, groups=8, top_groups=4),
    mla=MlaConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)
GROUPS = {
    "uneven": [300, 1, 77, 2048, 513],
    "empty groups": [0, 130, 0, 0, 71, 0],
    "256 small groups": [n % 7 for n in range(256)],
}


def group_ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, device=GPU).cumsum(0).int()


def assert_close(a: torch.Tensor, b: torch.Tensor, name: str, bound: float) -> None:
    error = ((a.float().cpu() - b.float().cpu()).norm() / b.float().norm().cpu()).item()
    assert error < bound, f"{name}: {error:.4f}"


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_grouped_gemm_in_one_kernel(sizes: list[int]) -> None:
    generator = torch.Generator(GPU).manual_seed(1)
    x = torch.randn(sum(sizes), 512, device=GPU, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(len(sizes), 264, 512, device=GPU, generator=generator).bfloat16().float().requires_grad_()
    dy = torch.randn(sum(sizes), 264, device=GPU, generator=generator).bfloat16()
    ends = group_ends(sizes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = grouped_gemm(x, weight, ends)
        actual = (y, *torch.autograd.grad(y, (x, weight), dy))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_grouped_mm"] == 3
    exact = x.detach().float().requires_grad_()
    exact_y = grouped_gemm_reference(exact, weight, ends)
    expected = (exact_y, *torch.autograd.grad(exact_y, (exact, weight), dy.float()))
    for name, a, b in zip(("y", "grad x", "grad weight"), actual, expected, strict=True):
        assert_close(a, b, name, 0.005)
    empty = [e for e, size in enumerate(sizes) if size == 0]
    assert not empty or actual[2][empty].abs().max() == 0


def test_moe_never_synchronizes() -> None:
    with GPU:
        block = MoE(replace(GROK, experts=replace(GROK.experts, aux_loss=0.01, shared=1)))
    for parameter in block.parameters():
        parameter.data.normal_(0.0, 0.02)
    x = torch.randn(2, 300, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    block.shared.bfloat16()  # routed experts cast their weights
    block(x).sum().backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            block(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [str(w.message) for w in caught if "synchronizing" in str(w.message)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "head_dim"),
    [(2048, 2048, 48, 8, 128), (333, 333, 4, 4, 64), (100, 777, 6, 1, 128), (1, 50, 4, 2, 32)],
)
def test_softcap_attention(
    dtype: torch.dtype, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    generator = torch.Generator(GPU).manual_seed(2)
    qkv = tuple(
        (6 * torch.randn(2, tokens, count, head_dim, device=GPU, generator=generator)).to(dtype).transpose(1, 2)
        for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    exact = tuple(x.float().requires_grad_() for x in qkv)
    for x in qkv:
        x.requires_grad_()
    scale, cap = head_dim**-0.5, 30.0
    fused, plain = softcap_attention(*qkv, scale, cap), softcap_attention.reference(*exact, scale, cap)
    dy = torch.randn(fused.shape, device=GPU, generator=generator).to(dtype)
    actual = (fused, *torch.autograd.grad(fused, qkv, dy))
    expected = (plain, *torch.autograd.grad(plain, exact, dy.float()))
    bound = 0.02 if dtype is torch.bfloat16 else 1e-3
    for name, a, b in zip("yqkv", actual, expected, strict=True):
        assert_close(a, b, name, bound)


def test_softcap_attention_can_be_recomputed() -> None:
    qkv = tuple(
        torch.randn(1, heads, 256, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    recomputed = checkpoint(softcap_attention, *qkv, 0.1, 30.0, use_reentrant=False, preserve_rng_state=False)
    plain = softcap_attention(*qkv, 0.1, 30.0)
    for a, b in zip(*(torch.autograd.grad(y.sum(), qkv) for y in (recomputed, plain)), strict=True):
        assert_close(a, b, "gradient", 1e-3)


def test_mla_uses_a_fused_kernel() -> None:
    generator = torch.Generator(GPU).manual_seed(3)
    q, k, v = (
        torch.randn(1, 512, 16, width, device=GPU, generator=generator).bfloat16().transpose(1, 2).requires_grad_()
        for width in (192, 192, 128)
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = causal_attention(q, k, v, scale=0.1)
        out.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert out.shape == (1, 16, 512, 128)
    assert "aten::_scaled_dot_product_attention_math" not in names, sorted(n for n in names if "dot_product" in n)


@pytest.mark.parametrize("model", [GROK, DEEPSEEK], ids=lambda m: m.architecture)
def test_bf16_on_the_gpu_agrees_with_fp32_on_the_cpu(model: Model) -> None:
    exact = build_model(model)
    exact.init_weights(4)
    for module in exact.modules():
        if isinstance(module, Router):
            module.force_load_balance = True  # a routing decision that flips by rounding is no error
    fp32_copy, bf16_copy = copy.deepcopy(exact).to(GPU), copy.deepcopy(exact).to(GPU)
    compute_in_bf16(bf16_copy)
    tokens = synthetic_tokens(1, 0, (2, 257), model.vocab, CPU)
    losses = []
    for network, device in ((exact, CPU), (fp32_copy, GPU), (bf16_copy, GPU)):
        batch = tokens.to(device)
        loss = network(batch[:, :-1], batch[:, 1:])
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)
    expected = dict(exact.named_parameters())
    for network, bound in ((fp32_copy, 1e-3), (bf16_copy, 0.05)):
        for name, parameter in network.named_parameters():
            assert_close(parameter.grad, expected[name].grad, name, bound)


@pytest.mark.exclusive  # about 35 GiB
@pytest.mark.parametrize(
    ("model", "dtype", "recompute_layers"),
    [
        (GROK_LAYER, "bf16", 1),
        (DEEPSEEK_LAYERS, "fp8", 0),
        pytest.param(GROK_LAYER, "bf16", 0, marks=pytest.mark.nightly),
        pytest.param(GROK_LAYER, "fp8", 0, marks=pytest.mark.nightly),
        pytest.param(DEEPSEEK_LAYERS, "bf16", 0, marks=pytest.mark.nightly),
        pytest.param(DEEPSEEK_LAYERS, "bf16", 1, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value.architecture if isinstance(value, Model) else str(value),
)
def test_layers_of_full_width_train(tmp_path: Path, model: Model, dtype: str, recompute_layers: int) -> None:
    if dtype == "fp8" and torch.cuda.get_device_capability(GPU) != (9, 0):
        pytest.skip("torch's grouped fp8 GEMM needs Hopper")
    config = RunConfig(
        name="gpu",
        target="pretrain",
        size="layers",
        proxy="few layers",
        machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
        model=model,
        parallel=Parallel(),
        precision=Precision(dtype=dtype),
        # With few tokens per step, DeepSeek's width is unstable at 3e-4.
        workload=Training(
            seqlen=4096, mbs=1, gbs=1, ga=1, steps=8, window=(5, 8), lr=3e-5, recompute_layers=recompute_layers
        ),
    )
    (tmp_path / "config.json").write_text(json.dumps(to_plain(config)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(tmp_path / "config.json", EventRecorder(tmp_path, 0))
    *events, ended = read(tmp_path / "events.rank0.jsonl")
    assert isinstance(ended, RunEnded)
    assert (ended.status, ended.reason) == ("ok", None)
    losses = [event.loss for event in events if isinstance(event, StepDone)]
    assert losses[-1] < losses[0]
