"""Experts, latent and capped attention on a real GPU: the numbers of the CPU, by the fast ways, without waits."""

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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
GROK = Model(
    name="small grok",
    architecture="grok1",
    layers=2,
    hidden=256,
    ffn=512,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab=1000,
    activation="gelu",
    tied_embeddings=True,
    post_norms=True,
    rope=RopeConfig(theta=10_000.0),
    attn_logit_softcap=30.0,
    embedding_scale=16.0,
    logit_scale=0.5773502691896257,
    experts=MoEConfig(count=8, top_k=2, ffn=512, renormalise=False),
)
DEEPSEEK = Model(
    name="small deepseek",
    architecture="deepseek",
    layers=3,
    hidden=256,
    ffn=640,
    heads=4,
    kv_heads=4,
    head_dim=64,
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
    experts=replace(GROK.experts, ffn=32768),
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
    experts=replace(DEEPSEEK.experts, count=64, top_k=8, ffn=2048, groups=8, top_groups=4),
    mla=MlaConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)
GROUPS = {
    "uneven": [300, 1, 77, 2048, 513],
    "empty ones": [0, 130, 0, 0, 71, 0],
    "256 small ones": [n % 7 for n in range(256)],
}


def ends_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, device=GPU).cumsum(0).int()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str, bound: float) -> None:
    error = ((ours.float().cpu() - theirs.float().cpu()).norm() / theirs.float().norm().cpu()).item()
    assert error < bound, f"{what}: {error:.4f}"


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_the_grouped_product_in_one_kernel(sizes: list[int]) -> None:
    generator = torch.Generator(GPU).manual_seed(1)
    x = torch.randn(sum(sizes), 512, device=GPU, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(len(sizes), 264, 512, device=GPU, generator=generator).bfloat16().float().requires_grad_()
    slope = torch.randn(sum(sizes), 264, device=GPU, generator=generator).bfloat16()
    ends = ends_of(sizes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = grouped_gemm(x, weight, ends)
        found = (y, *torch.autograd.grad(y, (x, weight), slope))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_grouped_mm"] == 3
    exact = x.detach().float().requires_grad_()
    wanted = grouped_gemm_reference(exact, weight, ends)
    wanted = (wanted, *torch.autograd.grad(wanted, (exact, weight), slope.float()))
    for what, ours, theirs in zip(("y", "grad x", "grad weight"), found, wanted, strict=True):
        assert_close(ours, theirs, what, 0.005)
    empty = [e for e, size in enumerate(sizes) if size == 0]
    assert not empty or found[2][empty].abs().max() == 0


def test_experts_never_wait_for_the_device() -> None:
    with GPU:
        block = MoE(replace(GROK, experts=replace(GROK.experts, aux_loss=0.01, shared=1)))
    for parameter in block.parameters():
        parameter.data.normal_(0.0, 0.02)
    x = torch.randn(2, 300, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    block.shared.bfloat16()  # routed experts cast by themselves
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
    given = tuple(
        (6 * torch.randn(2, tokens, count, head_dim, device=GPU, generator=generator)).to(dtype).transpose(1, 2)
        for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    exact = tuple(x.float().requires_grad_() for x in given)
    for x in given:
        x.requires_grad_()
    scale, cap = head_dim**-0.5, 30.0
    ours, plain = softcap_attention(*given, scale, cap), softcap_attention.reference(*exact, scale, cap)
    slope = torch.randn(ours.shape, device=GPU, generator=generator).to(dtype)
    found = (ours, *torch.autograd.grad(ours, given, slope))
    wanted = (plain, *torch.autograd.grad(plain, exact, slope.float()))
    bound = 0.02 if dtype is torch.bfloat16 else 1e-3
    for what, one, other in zip("yqkv", found, wanted, strict=True):
        assert_close(one, other, what, bound)


def test_softcap_attention_can_be_recomputed() -> None:
    given = tuple(
        torch.randn(1, heads, 256, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    again = checkpoint(softcap_attention, *given, 0.1, 30.0, use_reentrant=False, preserve_rng_state=False)
    plain = softcap_attention(*given, 0.1, 30.0)
    for ours, theirs in zip(*(torch.autograd.grad(y.sum(), given) for y in (again, plain)), strict=True):
        assert_close(ours, theirs, "gradient", 1e-3)


def test_mla_takes_a_fused_kernel() -> None:
    generator = torch.Generator(GPU).manual_seed(3)
    q, k, v = (
        torch.randn(1, 512, 16, width, device=GPU, generator=generator).bfloat16().transpose(1, 2).requires_grad_()
        for width in (192, 192, 128)
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        mixed = causal_attention(q, k, v, scale=0.1)
        mixed.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert mixed.shape == (1, 16, 512, 128)
    assert "aten::_scaled_dot_product_attention_math" not in names, sorted(n for n in names if "dot_product" in n)


@pytest.mark.parametrize("model", [GROK, DEEPSEEK], ids=lambda m: m.architecture)
def test_bf16_on_the_gpu_agrees_with_fp32_on_the_cpu(model: Model) -> None:
    exact = build_model(model)
    exact.init_weights(4)
    for module in exact.modules():
        if isinstance(module, Router):
            module.force_load_balance = True  # a choice that flips by rounding is no error
    same, rounded = copy.deepcopy(exact).to(GPU), copy.deepcopy(exact).to(GPU)
    compute_in_bf16(rounded)
    tokens = synthetic_tokens(1, 0, (2, 257), model.vocab, CPU)
    losses = []
    for network, device in ((exact, CPU), (same, GPU), (rounded, GPU)):
        here = tokens.to(device)
        loss = network(here[:, :-1], here[:, 1:])
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)
    expected = dict(exact.named_parameters())
    for network, bound in ((same, 1e-3), (rounded, 0.05)):
        for name, parameter in network.named_parameters():
            assert_close(parameter.grad, expected[name].grad, name, bound)


@pytest.mark.parametrize("model", [GROK_LAYER, DEEPSEEK_LAYERS], ids=lambda m: m.architecture)
@pytest.mark.parametrize(("dtype", "recompute_layers"), [("bf16", 0), ("bf16", 1), ("fp8", 0)])
def test_layers_of_true_width_train(tmp_path: Path, model: Model, dtype: str, recompute_layers: int) -> None:
    if dtype == "fp8" and torch.cuda.get_device_capability(GPU) != (9, 0):
        pytest.skip("torch's grouped 8-bit products need Hopper")
    config = RunConfig(
        name="gpu",
        target="pretrain",
        size="layers",
        proxy="few layers",
        machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
        model=model,
        parallel=Parallel(),
        precision=Precision(dtype=dtype),
        # A rate for few tokens a step: at 3e-4 layers as wide as DeepSeek's jump about.
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
