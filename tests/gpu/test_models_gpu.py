"""Models of every architecture on a GPU: numbers of the CPU, fused attention, grouped GEMM, no synchronization."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cuda_checks import GPU, HOPPER, NEEDS_GPU, no_synchronization, peak_allocated, randn, relative_error
from small_models import deepseek_model, grok1_model, llama_model, nemotron_h_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmb.config.model import MambaConfig, MlaConfig, Model, MoEConfig, RopeConfig
from llmb.models.architectures import build_model
from llmb.models.blocks import attention_backends, causal_attention
from llmb.models.moe import MoE, Router
from llmb.ops.moe.permute import permute_tokens_with_input, sort_by_expert, unpermute_tokens
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.train.precision import compute_in_bf16

pytestmark = NEEDS_GPU

CPU = torch.device("cpu")
LLAMA = llama_model(hidden=256, ffn=512, vocab=1000)
GROK = grok1_model(
    hidden=256,
    ffn=512,
    vocab=1000,
    rope=RopeConfig(theta=10_000.0),
    embedding_scale=16.0,
    logit_scale=0.5773502691896257,
    experts=MoEConfig(count=8, top_k=2, ffn=512, renormalise=False),
)
DEEPSEEK = deepseek_model(
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
NEMOTRON_H = nemotron_h_model(
    hidden=256,
    ffn=512,
    vocab=1000,
    pattern="M-M*-M",
    mamba=MambaConfig(heads=8, head_dim=64, groups=2, state=64, chunk=64),
)


def calls_of(profile: torch.profiler.profile) -> dict[str, int]:
    return {event.key: event.count for event in profile.key_averages()}


def profiled() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@pytest.mark.parametrize("model", [LLAMA, GROK, DEEPSEEK, NEMOTRON_H], ids=lambda m: m.architecture)
def test_fp32_and_bf16_agree_with_fp32_on_the_cpu(model: Model) -> None:
    exact = build_model(model)
    exact.init_weights(4)
    for module in exact.modules():
        if isinstance(module, Router):
            module.force_load_balance = True  # a routing decision that flips by rounding is no error
    fp32_copy, bf16_copy = copy.deepcopy(exact).to(GPU), copy.deepcopy(exact).to(GPU)
    compute_in_bf16(bf16_copy)
    tokens = synthetic_tokens(1, 0, (2, 258 if model is NEMOTRON_H else 257), model.vocab, CPU)
    losses = []
    for network, device in ((exact, CPU), (fp32_copy, GPU), (bf16_copy, GPU)):
        batch = tokens.to(device)
        loss = network(batch[:, :-1], batch[:, 1:])
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)
    expected = dict(exact.named_parameters())
    for network, bound in ((fp32_copy, 1e-3), (bf16_copy, 0.03 if model is LLAMA else 0.05)):
        for name, parameter in network.named_parameters():
            error = relative_error(parameter.grad, expected[name].grad)
            assert error < bound, f"{name}: {error:.4f}"


def test_synthetic_tokens_are_the_same_on_cpu_and_gpu() -> None:
    on_cpu, on_gpu = (synthetic_tokens(1234, 99, (4, 8193), 128256, device) for device in (CPU, GPU))
    assert torch.equal(on_cpu, on_gpu.cpu())


@HOPPER
def test_gqa_uses_cudnn_forward_and_backward() -> None:
    assert attention_backends(GPU)[0] is SDPBackend.CUDNN_ATTENTION
    q, k, v = (
        randn(1, 512, heads, 128, seed=seed, dtype=torch.float32).transpose(1, 2).requires_grad_()
        for seed, heads in enumerate((32, 8, 8))
    )
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(exact.square().sum(), (q, k, v))
    with profiled() as profile:
        fast = causal_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
        grads = torch.autograd.grad(fast.float().square().sum(), (q, k, v))
    assert "aten::_scaled_dot_product_cudnn_attention" in calls_of(profile)
    for a, b in zip((fast, *grads), (exact, *expected), strict=True):
        assert relative_error(a, b) < 0.02


def test_mla_uses_a_fused_kernel() -> None:
    widths = enumerate((192, 192, 128))
    q, k, v = (randn(1, 512, 16, width, seed=seed).transpose(1, 2).requires_grad_() for seed, width in widths)
    with profiled() as profile:
        out = causal_attention(q, k, v, scale=0.1)
        out.sum().backward()
    names = calls_of(profile)
    assert out.shape == (1, 16, 512, 128)
    assert "aten::_scaled_dot_product_attention_math" not in names, sorted(n for n in names if "dot_product" in n)


def test_unpermute_backward_allocates_the_gradient_of_rows_only() -> None:
    tokens, top_k, channels = 1025, 8, 7168
    row_map, _ = sort_by_expert(torch.randint(256, (tokens, top_k), device=GPU), 256)
    x, dout = randn(tokens, channels).requires_grad_(), randn(tokens, channels, seed=1)
    weights = randn(tokens, top_k, dtype=torch.float32).requires_grad_()
    rows, _ = permute_tokens_with_input(x, row_map)
    peak_bytes = peak_allocated(lambda: unpermute_tokens(rows, row_map, weights).backward(dout))
    assert peak_bytes < (tokens * top_k + 4 * tokens) * channels * x.element_size()


def test_moe_never_synchronizes() -> None:
    with GPU:
        block = MoE(replace(GROK, experts=replace(GROK.experts, aux_loss=0.01, shared=1)))
    for parameter in block.parameters():
        parameter.data.normal_(0.0, 0.02)
    x = randn(2, 300, 256).requires_grad_()
    block.shared.bfloat16()  # routed experts cast their weights
    block(x).sum().backward()
    with no_synchronization():
        block(x).sum().backward()
