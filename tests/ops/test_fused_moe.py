"""Fused MoE: the reference against a loop over tokens, the Triton kernels against the reference."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.activation import gated_activation
from llmb.ops.moe.expert_weights import (
    ExpertFormat,
    ExpertWeights,
    dequantize_expert,
    empty_expert_weights,
    fill_expert_rows,
)
from llmb.ops.moe.fused_moe import Routing, fused_moe
from llmb.ops.quant.activation_quant import E4M3, QuantFormat, dequantize, quantize_activation

pytest.importorskip("triton")
import triton.language as language
from triton.runtime import interpreter

from llmb.ops.moe.align_triton import choose_block_size, max_blocks, moe_align_block_size
from llmb.ops.moe.fused_moe_fp8_triton import fits_large_m
from llmb.ops.moe.fused_moe_triton import fused_moe_triton, moe_gated_act, moe_gemm

FP32 = torch.float32
QUANT_FORMATS: tuple[QuantFormat, ...] = ("plain", "per_token", "1x128")
ACTIVATION_FORMATS: dict[ExpertFormat, QuantFormat] = {
    "plain": "plain",
    "per_token": "per_token",
    "1x128": "1x128",
    "nvfp4": "plain",
}
EXPERT_FORMATS = tuple(ACTIVATION_FORMATS)


@pytest.fixture(autouse=True)
def fp8_rounding_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch convert to FP8: Triton's interpreter loses the carry."""
    convert = interpreter._convert_float

    def rounded(x, x_type, to_type, mode):
        if (x_type, to_type) == (language.float32, language.float8e4nv):
            return torch.from_numpy(x).to(E4M3).view(torch.uint8).numpy()
        return convert(x, x_type, to_type, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(11)


def random_weights(shape: tuple[int, int, int], expert_format: ExpertFormat, seed: int = 0) -> ExpertWeights:
    weights = empty_expert_weights(shape, expert_format, FP32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for expert in range(shape[0]):
        fill_expert_rows(weights, expert, 0, torch.randn(shape[1:], generator=generator) * 0.1 * (expert + 1))
    return weights


def routing_of(tokens: int, top_k: int, experts: int, seed: int = 0) -> Routing:
    """Return uneven routing: low experts are selected more often, the last one never."""
    generator = torch.Generator().manual_seed(seed)
    preference = torch.rand(tokens, experts - 1, generator=generator) - 0.15 * torch.arange(experts - 1)
    return Routing(torch.rand(tokens, top_k, generator=generator), preference.topk(top_k).indices, experts)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def to_device(value, device: torch.device):
    """Move a tensor, or the tensors of a tuple, to the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(*(to_device(value, device) for value in value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_reference_matches_a_loop_over_tokens(expert_format: ExpertFormat, activation: str) -> None:
    gate_up, down = random_weights((4, 256, 128), expert_format, 1), random_weights((4, 128, 128), expert_format, 2)
    x_NC, routing = torch.randn(5, 128), routing_of(5, 2, 4)
    x = quantize_activation(x_NC, ACTIVATION_FORMATS[expert_format])
    actual = fused_moe.reference(x, routing, gate_up, down, activation, FP32)
    for token, x_C in enumerate(dequantize(x, FP32)):
        expected_C = torch.zeros(128)
        for weight, expert in zip(routing.topk_weights_NK[token], routing.topk_ids_NK[token].tolist(), strict=True):
            gate, up = (dequantize_expert(gate_up, expert) @ x_C).chunk(2)
            gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
            hidden_F = dequantize(quantize_activation((gate * up)[None], ACTIVATION_FORMATS[expert_format]), FP32)[0]
            expected_C += weight * (dequantize_expert(down, expert) @ hidden_F)
        assert relative_error(actual[token], expected_C) < 1e-5


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block_size"), [(1, 2, 5, 16), (17, 3, 5, 16), (40, 4, 9, 32)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_align_block_size_assigns_every_pair_once(
    tokens: int, top_k: int, experts: int, block_size: int, ranks: int, device: torch.device
) -> None:
    topk_ids_M = routing_of(tokens, top_k, experts).topk_ids_NK.flatten()
    first, local_experts = 0 if ranks == 1 else 2, experts if ranks == 1 else 2
    blocks = moe_align_block_size(topk_ids_M.view(tokens, top_k).to(device), first, local_experts, block_size)
    actual = []
    for expert, block in zip(
        blocks.expert_ids_T.tolist(), blocks.sorted_token_ids_P.view(-1, block_size).tolist(), strict=True
    ):
        if expert >= 0:
            valid = [pair for pair in block if pair < len(topk_ids_M)]
            assert valid, "a block of padding only"
            assert (topk_ids_M[valid] == first + expert).all()
            assert block[len(valid) :] == [len(topk_ids_M)] * (block_size - len(valid))
            actual += valid
    expected = ((topk_ids_M >= first) & (topk_ids_M < first + local_experts)).nonzero().flatten().tolist()
    assert sorted(actual) == expected
    assert actual == sorted(actual, key=lambda pair: (topk_ids_M[pair].item(), pair))


def test_max_blocks_covers_the_worst_case() -> None:
    for pairs, experts, block_size in ((8, 256, 16), (35, 3, 16), (100, 4, 32), (1, 1, 16)):
        alone = min(experts, pairs)
        sizes = [1] * (alone - 1) + [pairs - alone + 1]
        assert sum(-(-size // block_size) for size in sizes) <= max_blocks(pairs, experts, block_size) <= pairs
    assert [choose_block_size(v, 8) for v in (1, 128, 129, 512, 513, 100_000)] == [16, 16, 32, 64, 128, 128]


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 2])
def test_large_m_gemm_matches_torch(top_k: int, device: torch.device) -> None:
    weight, routing = random_weights((3, 512, 256), "1x128", 3), routing_of(140, 2, 3)
    x = quantize_activation(torch.randn(140 * 2 // top_k, 256), "1x128")
    blocks = moe_align_block_size(routing.topk_ids_NK.to(device), 0, 3, 128)
    assert fits_large_m(weight, blocks)
    inputs = (to_device(x, device), to_device(weight, device), blocks, 280, top_k, FP32)
    actual = moe_gemm(*inputs, to_device(routing.topk_weights_NK, device)).cpu()
    rows = dequantize(x, FP32).repeat_interleave(top_k, 0)
    for pair, expert in enumerate(routing.topk_ids_NK.flatten().tolist()):
        expected = routing.topk_weights_NK.flatten()[pair] * (dequantize_expert(weight, expert) @ rows[pair])
        # Tensor cores accumulate FP8 products with fewer bits than fp32: 1.2e-4 here.
        assert relative_error(actual[pair], expected) < (1e-3 if device.type == "cuda" else 1e-4)


@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
@pytest.mark.parametrize(("tokens", "block_size"), [(1, 16), (3, 32), (17, 16), (40, 64)])
@pytest.mark.parametrize("top_k", [1, 2])
def test_moe_gemm_matches_torch(
    expert_format: ExpertFormat, tokens: int, block_size: int, top_k: int, device: torch.device
) -> None:
    weight, routing = random_weights((5, 384, 256), expert_format, 3), routing_of(tokens, 2, 5)
    x, topk_weights_M = (
        quantize_activation(torch.randn(tokens * 2 // top_k, 256), ACTIVATION_FORMATS[expert_format]),
        routing.topk_weights_NK.flatten(),
    )
    expected_MO = torch.stack([
        dequantize_expert(weight, expert) @ dequantize(x, FP32)[pair // top_k] * topk_weights_M[pair]
        for pair, expert in enumerate(routing.topk_ids_NK.flatten().tolist())
    ])  # fmt: skip
    blocks = moe_align_block_size(routing.topk_ids_NK.to(device), 0, 5, block_size)
    actual = moe_gemm(
        to_device(x, device), to_device(weight, device), blocks, tokens * 2, top_k, FP32, topk_weights_M.to(device)
    )
    # Tensor cores accumulate FP8 products with fewer bits than fp32.
    assert relative_error(actual.cpu(), expected_MO) < (
        1e-3 if device.type == "cuda" and ACTIVATION_FORMATS[expert_format] != "plain" else 1e-5
    )


@pytest.mark.parametrize("quant_format", QUANT_FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("width", [128, 1152])
def test_gated_activation_matches_torch(
    quant_format: QuantFormat, activation: str, width: int, device: torch.device
) -> None:
    gate_up_M2F, topk_ids_NK = 3 * torch.randn(6, 2 * width), torch.tensor([[1, 0], [2, 1], [2, 3]])
    local_pairs = [0, 2, 3, 4]  # pairs of experts 1 and 2
    actual = to_device(
        moe_gated_act(gate_up_M2F.to(device), topk_ids_NK.to(device), 1, 2, activation, quant_format),
        torch.device("cpu"),
    )
    expected = gated_activation.reference(gate_up_M2F, activation, quant_format)
    if not isinstance(actual, Tensor):
        torch.testing.assert_close(actual.scales[local_pairs], expected.scales[local_pairs])
    # A tie may be rounded either way.
    assert relative_error(dequantize(actual, FP32)[local_pairs], dequantize(expected, FP32)[local_pairs]) < (
        1e-6 if quant_format == "plain" else 2e-3
    )


@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
@pytest.mark.parametrize(("tokens", "block_size"), [(1, 16), (3, 32), (17, None)])
def test_kernels_match_the_reference_at_any_block_size(
    expert_format: ExpertFormat, tokens: int, block_size: int | None, device: torch.device
) -> None:
    gate_up, down = random_weights((5, 256, 256), expert_format, 3), random_weights((5, 256, 128), expert_format, 4)
    routing, x = (
        routing_of(tokens, 2, 5),
        quantize_activation(torch.randn(tokens, 256), ACTIVATION_FORMATS[expert_format]),
    )
    expected = fused_moe.reference(x, routing, gate_up, down, "silu", FP32)
    inputs = (to_device(value, device) for value in (x, routing, gate_up, down))
    actual = fused_moe_triton(*inputs, "silu", FP32, block_size).cpu()
    assert relative_error(actual, expected) < (1e-5 if ACTIVATION_FORMATS[expert_format] == "plain" else 2e-3)


@pytest.mark.parametrize("expert_format", ["plain", "nvfp4"])
def test_kernels_mask_partial_blocks(expert_format: ExpertFormat, device: torch.device) -> None:
    gate_up, down = random_weights((3, 2 * 80, 48), expert_format, 5), random_weights((3, 48, 80), expert_format, 6)
    routing, x_NC = routing_of(7, 2, 3), torch.randn(7, 48)
    expected = fused_moe.reference(x_NC, routing, gate_up, down, "gelu", FP32)
    inputs = (to_device(value, device) for value in (x_NC, routing, gate_up, down))
    assert relative_error(fused_moe_triton(*inputs, "gelu", FP32).cpu(), expected) < 1e-5


def test_kernels_skip_experts_of_other_ranks(device: torch.device) -> None:
    gate_up, down = random_weights((6, 64, 32), "plain", 7), random_weights((6, 32, 32), "plain", 8)
    x_NC, routing = torch.randn(9, 32).to(device), routing_of(9, 3, 6)
    expected = fused_moe.reference(x_NC.cpu(), routing, gate_up, down, "silu", FP32)
    gate_up, down, routing = (to_device(value, device) for value in (gate_up, down, routing))
    partial_sums = [
        fused_moe_triton(
            x_NC, routing._replace(first_expert=first), ExpertWeights("plain", gate_up.values[first:][:2].contiguous()),
            ExpertWeights("plain", down.values[first:][:2].contiguous()), "silu", FP32,
        )
        for first in (0, 2, 4)
    ]  # fmt: skip
    assert relative_error(sum(partial_sums).cpu(), expected) < 1e-5
    no_local_expert = routing._replace(topk_ids_NK=torch.full_like(routing.topk_ids_NK, 5))
    first_two = ExpertWeights("plain", gate_up.values[:2]), ExpertWeights("plain", down.values[:2])
    assert (fused_moe_triton(x_NC, no_local_expert, *first_two, "silu", FP32) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
def test_many_tokens_are_computed_in_several_passes(
    expert_format: ExpertFormat, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = random_weights((3, 256, 128), expert_format, 9), random_weights((3, 128, 128), expert_format, 10)
    inputs = [
        to_device(value, device)
        for value in (
            quantize_activation(torch.randn(7, 128), ACTIVATION_FORMATS[expert_format]),
            routing_of(7, 2, 3),
            gate_up,
            down,
        )
    ]
    at_once = fused_moe_triton(*inputs, "silu", FP32)
    monkeypatch.setattr("llmb.ops.moe.fused_moe_triton.MAX_TOKENS", 3)
    assert torch.equal(fused_moe_triton(*inputs, "silu", FP32), at_once)


def test_a_token_routed_twice_to_one_expert(device: torch.device) -> None:
    """No router selects this, but a row of padding may hold anything."""
    gate_up, down = random_weights((1, 64, 32), "plain", 11), random_weights((1, 32, 32), "plain", 12)
    x_NC, routing = torch.randn(20, 32), Routing(torch.rand(20, 2), torch.zeros(20, 2, dtype=torch.int64), 8)
    expected = fused_moe.reference(x_NC, routing, gate_up, down, "silu", FP32)
    inputs = (to_device(value, device) for value in (x_NC, routing, gate_up, down))
    assert relative_error(fused_moe_triton(*inputs, "silu", FP32).cpu(), expected) < 1e-5


def test_no_tokens(device: torch.device) -> None:
    routing = Routing(torch.ones(0, 2), torch.zeros(0, 2, dtype=torch.int64), 2)
    inputs = (torch.ones(0, 32), routing, random_weights((2, 64, 32), "plain"), random_weights((2, 32, 32), "plain"))
    assert fused_moe_triton(*(to_device(value, device) for value in inputs), "silu", FP32).shape == (0, 32)
