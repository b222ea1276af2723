"""Fused MoE: the reference against a loop over tokens, the Triton kernels against the reference."""

import pytest
import torch
import torch.nn.functional as F
from nightly_cases import by_turns
from op_cases import randn
from op_cases.moe import expert_weights, routed_tokens, uneven_topk_ids
from seeded_tensors import relative_error
from torch import Tensor

from llmb.ops.activation.activation import gated_activation
from llmb.ops.moe.expert_weights import ExpertFormat, ExpertWeights, dequantize_expert
from llmb.ops.moe.fused_moe import Routing, fused_moe
from llmb.ops.quant.activation_quant import Activation, QuantFormat, dequantize, quantize_activation

pytest.importorskip("triton")
from llmb.ops.device_capabilities import DeviceCapabilities
from llmb.ops.moe import fused_moe_fp4_triton
from llmb.ops.moe.align_triton import choose_block_size, max_blocks, moe_align_block_size
from llmb.ops.moe.fused_moe_fp4_triton import widen, widens_first
from llmb.ops.moe.fused_moe_fp8_triton import CONFIGS as CONFIGS_FP8
from llmb.ops.moe.fused_moe_fp8_triton import fits_large_m
from llmb.ops.moe.fused_moe_triton import CONFIGS, fused_moe_triton, moe_gated_act, moe_gemm

CPU, FP32 = torch.device("cpu"), torch.float32
QUANT_FORMATS: tuple[QuantFormat, ...] = ("plain", "per_token", "1x128")
EXPERT_FORMATS: tuple[ExpertFormat, ...] = (*QUANT_FORMATS, "nvfp4", "mxfp4")


def random_weights(
    device: torch.device, shape: tuple[int, int, int], expert_format: ExpertFormat, seed: int = 0
) -> ExpertWeights:
    return expert_weights(torch.Generator().manual_seed(seed), device, shape, expert_format)


def routing_of(device: torch.device, tokens: int, top_k: int, experts: int) -> Routing:
    generator = torch.Generator().manual_seed(tokens)
    weights_NK = torch.rand(tokens, top_k, generator=generator).to(device)
    return Routing(weights_NK, uneven_topk_ids(generator, device, tokens, top_k, experts), experts)


def random_tokens(device: torch.device, tokens: int, width: int, quant_format: QuantFormat) -> Activation:
    return quantize_activation(randn(torch.Generator().manual_seed(11), device, tokens, width), quant_format)


@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_reference_matches_a_loop_over_tokens(expert_format: ExpertFormat, activation: str) -> None:
    gate_up, down = (random_weights(CPU, (4, rows, 128), expert_format, rows) for rows in (256, 128))
    x, routing = random_tokens(CPU, 5, 128, down.quant_format), routing_of(CPU, 5, 2, 4)
    actual = fused_moe.reference(x, routing, gate_up, down, activation, FP32)
    for token, x_C in enumerate(dequantize(x, FP32)):
        expected_C = torch.zeros(128)
        for weight, expert in zip(routing.topk_weights_NK[token], routing.topk_ids_NK[token].tolist(), strict=True):
            gate, up = (dequantize_expert(gate_up, expert) @ x_C).chunk(2)
            gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
            hidden_F = dequantize(quantize_activation((gate * up)[None], down.quant_format), FP32)[0]
            expected_C += weight * (dequantize_expert(down, expert) @ hidden_F)
        assert relative_error(actual[token], expected_C) < 1e-5


NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="slow in the interpreter"))
FULL_SIZE = [pytest.param(*p, marks=NEEDS_GPU) for p in ((64, 8, 256, 16), (8192, 8, 256, 128), (8192, 7, 8, 128))]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block_size"), [(1, 2, 5, 16), (17, 3, 5, 16), (40, 4, 9, 32), *FULL_SIZE]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_align_block_size_assigns_every_pair_once(
    tokens: int, top_k: int, experts: int, block_size: int, ranks: int, device: torch.device
) -> None:
    topk_ids_M = routing_of(CPU, tokens, top_k, experts).topk_ids_NK.flatten()
    first, local_experts = 0 if ranks == 1 else 2, experts if ranks == 1 else 2
    blocks = moe_align_block_size(topk_ids_M.view(tokens, top_k).to(device), first, local_experts, block_size)
    expert_T = blocks.expert_ids_T.cpu()
    pairs_TB = blocks.sorted_token_ids_P.cpu().view(-1, block_size)[expert_T >= 0].long()
    expert_T = expert_T[expert_T >= 0]
    valid_TB = pairs_TB < len(topk_ids_M)
    assert valid_TB.any(dim=1).all(), "a block of padding only"
    assert (pairs_TB[~valid_TB] == len(topk_ids_M)).all()
    assert (valid_TB.int().diff(dim=1) <= 0).all(), "padding at the end of a block"
    actual = pairs_TB[valid_TB]
    assert torch.equal(topk_ids_M[actual], (first + expert_T)[:, None].expand_as(pairs_TB)[valid_TB])
    local_M = ((topk_ids_M >= first) & (topk_ids_M < first + local_experts)).nonzero().flatten()
    assert torch.equal(actual, local_M[topk_ids_M[local_M].argsort(stable=True)])


def test_max_blocks_covers_the_worst_case() -> None:
    for pairs, experts, block_size in ((8, 256, 16), (35, 3, 16), (100, 4, 32), (1, 1, 16)):
        alone = min(experts, pairs)
        sizes = [1] * (alone - 1) + [pairs - alone + 1]
        assert sum(-(-size // block_size) for size in sizes) <= max_blocks(pairs, experts, block_size) <= pairs
    assert [choose_block_size(v, 8) for v in (1, 128, 129, 512, 513, 100_000)] == [16, 16, 32, 64, 128, 128]


# Formats, experts and outputs, tokens, rows of a block: the last two take the persistent kernel.
SIZES = ((5, 384, 1, 16), (5, 384, 3, 32), (5, 384, 17, 16), (5, 384, 40, 64))
GEMMS = [
    *by_turns(EXPERT_FORMATS, SIZES, (1, 2)),
    ("1x128", (3, 512, 40, 64), 2),
    pytest.param("1x128", (3, 512, 140, 128), 1, marks=pytest.mark.slow),
    pytest.param("1x128", (3, 512, 140, 128), 2, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("expert_format", "size", "top_k"), GEMMS, ids=str)
def test_moe_gemm_matches_torch(
    expert_format: ExpertFormat, size: tuple[int, int, int, int], top_k: int, device: torch.device
) -> None:
    experts, outputs, tokens, block_size = size
    weight = random_weights(device, (experts, outputs, 256), expert_format)
    routing = routing_of(device, tokens, 2, experts)
    x = random_tokens(device, tokens * 2 // top_k, 256, weight.quant_format)
    topk_weights_M = routing.topk_weights_NK.flatten()
    expected_MO = torch.stack([
        dequantize_expert(weight, expert) @ dequantize(x, FP32)[pair // top_k] * topk_weights_M[pair]
        for pair, expert in enumerate(routing.topk_ids_NK.flatten().tolist())
    ])  # fmt: skip
    blocks = moe_align_block_size(routing.topk_ids_NK, 0, experts, block_size)
    assert fits_large_m(weight, blocks) == (expert_format == "1x128" and block_size >= 64)
    actual = moe_gemm(x, weight, blocks, tokens * 2, top_k, FP32, topk_weights_M)
    # Tensor cores accumulate FP8 products with fewer bits than fp32.
    assert relative_error(actual, expected_MO) < (
        1e-3 if device.type == "cuda" and weight.quant_format != "plain" else 1e-5
    )


@pytest.mark.parametrize("programs", [1, 3, 100])
def test_persistent_programs_share_the_tiles(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of several experts and columns, by fewer programs than tiles, or more; one rank has no pair at all."""
    weight, routing = random_weights(device, (4, 512, 128), "1x128"), routing_of(device, 60, 2, 5)
    x = random_tokens(device, 60, 128, "1x128")
    pairs = routing.topk_ids_NK.numel()
    monkeypatch.setattr(
        "llmb.ops.moe.fused_moe_fp8_triton.capabilities", lambda _: DeviceCapabilities(compute=None, sms=programs)
    )
    blocks = moe_align_block_size(routing.topk_ids_NK, 0, 4, 64)
    actual = moe_gemm(x, weight, blocks, pairs, 2, FP32)
    local = {pair: expert for pair, expert in enumerate(routing.topk_ids_NK.flatten().tolist()) if expert < 4}
    expected_MO = torch.stack([dequantize_expert(weight, local[p]) @ dequantize(x, FP32)[p // 2] for p in local])
    assert relative_error(actual[[*local]], expected_MO) < (1e-3 if device.type == "cuda" else 1e-5)
    without_pairs = moe_align_block_size(routing.topk_ids_NK, 5, 4, 64)
    assert without_pairs.used_blocks_1.item() == 0
    moe_gemm(x, weight, without_pairs, pairs, 2, FP32)


def test_persistent_tiles_fit_shared_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with 99 KiB for a program, as Ada, the other kernel computes them."""
    weight, topk_ids_NK = random_weights(device, (2, 256, 128), "1x128"), routing_of(device, 1, 1, 2).topk_ids_NK
    for kib, fits in ((227, True), (99, False)):
        gpu = DeviceCapabilities(compute=(9, 0), shared_memory_bytes=kib << 10)
        monkeypatch.setattr("llmb.ops.moe.fused_moe_fp8_triton.capabilities", lambda _, gpu=gpu: gpu)
        for block_size in CONFIGS_FP8:
            assert fits_large_m(weight, moe_align_block_size(topk_ids_NK, 0, 2, block_size)) == fits


@pytest.mark.parametrize("quant_format", QUANT_FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("width", [128, 1152])
def test_gated_activation_matches_torch(
    quant_format: QuantFormat, activation: str, width: int, device: torch.device
) -> None:
    gate_up_M2F = randn(torch.Generator().manual_seed(11), device, 6, 2 * width, scale=3)
    local_pairs = [0, 2, 3, 4]  # pairs of experts 1 and 2
    topk_ids_NK = torch.tensor([[1, 0], [2, 1], [2, 3]], device=device)
    actual = moe_gated_act(gate_up_M2F, topk_ids_NK, 1, 2, activation, quant_format)
    expected = gated_activation.reference(gate_up_M2F, activation, quant_format)
    if not isinstance(actual, Tensor):
        torch.testing.assert_close(actual.scales[local_pairs], expected.scales[local_pairs])
    # A tie may be rounded either way.
    assert relative_error(dequantize(actual, FP32)[local_pairs], dequantize(expected, FP32)[local_pairs]) < (
        1e-6 if quant_format == "plain" else 2e-3
    )


def test_kernels_skip_experts_of_other_ranks(device: torch.device) -> None:
    gate_up, down = (random_weights(device, (6, rows, 32), "plain", rows) for rows in (64, 32))
    x_NC, routing = random_tokens(device, 9, 32, "plain"), routing_of(device, 9, 3, 6)
    expected = fused_moe.reference(x_NC, routing, gate_up, down, "silu", FP32)
    partial_sums = [
        fused_moe_triton(
            x_NC, routing._replace(first_expert=first), ExpertWeights("plain", gate_up.values[first:][:2].contiguous()),
            ExpertWeights("plain", down.values[first:][:2].contiguous()), "silu", FP32,
        )
        for first in (0, 2, 4)
    ]  # fmt: skip
    assert relative_error(sum(partial_sums), expected) < 1e-5
    no_local_expert = routing._replace(topk_ids_NK=torch.full_like(routing.topk_ids_NK, 5))
    first_two = ExpertWeights("plain", gate_up.values[:2]), ExpertWeights("plain", down.values[:2])
    assert (fused_moe_triton(x_NC, no_local_expert, *first_two, "silu", FP32) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
def test_many_tokens_are_computed_in_several_passes(
    expert_format: ExpertFormat, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = (random_weights(device, (3, rows, 128), expert_format, rows) for rows in (256, 128))
    x = random_tokens(device, 7, 128, down.quant_format)
    inputs = (x, routing_of(device, 7, 2, 3), gate_up, down)
    at_once = fused_moe_triton(*inputs, "silu", FP32)
    monkeypatch.setattr("llmb.ops.moe.fused_moe_triton.MAX_TOKENS", 3)
    in_passes = fused_moe_triton(*inputs, "silu", FP32)
    if device.type == "cuda":
        assert torch.equal(in_passes, at_once)
    else:  # numpy, with which the interpreter multiplies, adds up the rows of a tile in different orders on some CPUs
        torch.testing.assert_close(in_passes, at_once, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inputs", [64, 96, 1184])
def test_widened_weights_are_the_dequantized_ones(device: torch.device, inputs: int) -> None:
    weights = random_weights(device, (3, 10, inputs), "mxfp4")
    actual = widen(weights, torch.bfloat16)
    assert actual.format == "plain"
    for expert in range(3):
        assert torch.equal(actual.values[expert].float(), dequantize_expert(weights, expert))


def test_many_pairs_of_an_expert_widen_its_weights_first(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = (random_weights(device, (4, rows, 64), "mxfp4", rows) for rows in (128, 64))
    gate_up = gate_up._replace(bias=randn(torch.Generator().manual_seed(1), device, 4, 128))
    x, routing = random_tokens(device, 30, 64, "plain"), routing_of(device, 30, 2, 4)
    outs = []
    for pairs in (16, 15):
        monkeypatch.setattr(fused_moe_fp4_triton, "WIDEN_PAIRS", pairs)
        outs.append(fused_moe_triton(x, routing, gate_up, down, "swigluoai", FP32))
        assert widens_first(gate_up, 60, 4) == (pairs == 15)
        expected = fused_moe.reference(x, routing, gate_up, down, "swigluoai", FP32)
        assert relative_error(outs[-1], expected) < 1e-5


@pytest.mark.parametrize(
    ("shared_kib", "columns", "stages"),
    [(227, 256, 4), (163, 128, 4), (99, 128, 3), (64, 128, 2), (None, 256, 4)],  # Hopper, Ampere, Ada, Turing, a CPU
)
def test_tiles_of_a_gpu_with_less_shared_memory(shared_kib: int | None, columns: int, stages: int) -> None:
    config = CONFIGS[128]
    fitted = config.fitted(128, 2, None if shared_kib is None else shared_kib << 10)
    assert fitted == config._replace(block_n=columns, num_stages=stages)


def test_nvfp4_scales_on_a_gpu_without_fp8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has no e4m3 there: the kernel takes the bits, and gives the same numbers."""
    args, _ = routed_tokens(torch.Generator().manual_seed(0), device, 17, "nvfp4")
    expected = fused_moe_triton(*args)
    monkeypatch.setattr(fused_moe_fp4_triton, "capabilities", lambda _device: DeviceCapabilities(compute=(8, 0)))
    assert torch.equal(fused_moe_triton(*args), expected)
