"""Block-scaled 8-bit weights: their rounding, and the Triton product against the plain one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import Blocks8, block_product, block_product_reference, from_blocks, in_blocks
from llmb.ops.gemm.block_scaled_gemm_triton import block_product_triton, parts_of
from llmb.ops.quant.activation_quant import LARGEST, Groups8, in_form

OUTPUTS = st.integers(1, 300)
GROUPS = st.integers(1, 6)


def drawn(*shape: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Random numbers whose magnitude differs from block to block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for dim in (-2, -1):
        sizes = torch.randn(-(-shape[dim] // 128), generator=generator).exp().repeat_interleave(128)[: shape[dim]]
        x = x * (sizes[:, None] if dim == -2 else sizes)
    return x.to(device)


def rounded(weight_OK: Tensor) -> Tensor:
    """Block by block in plain steps."""
    found = torch.empty_like(weight_OK)
    for top in range(0, weight_OK.shape[0], 128):
        for left in range(0, weight_OK.shape[1], 128):
            part = (slice(top, top + 128), slice(left, left + 128))
            scale = weight_OK[part].abs().max() * (1 / LARGEST)
            found[part] = (weight_OK[part] * scale.reciprocal()).to(torch.float8_e4m3fn).float() * scale
    return found


@given(OUTPUTS, GROUPS, st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_each_block_has_its_own_scale(outputs: int, groups: int, seed: int) -> None:
    weight = drawn(outputs, 128 * groups, seed=seed)
    made = in_blocks(weight)
    assert made.values.shape == (-(-outputs // 128) * 128, 128 * groups)
    assert made.scales.shape == (-(-outputs // 128), -(-groups // 4) * 4)
    assert torch.equal(from_blocks(made, outputs), rounded(weight))


@given(OUTPUTS, GROUPS, st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_rounding_again_changes_no_bit(outputs: int, groups: int, seed: int) -> None:
    once = in_blocks(drawn(outputs, 128 * groups, seed=seed))
    again = in_blocks(from_blocks(once, outputs))
    assert torch.equal(once.values.view(torch.uint8), again.values.view(torch.uint8))
    assert torch.allclose(once.scales, again.scales, rtol=1e-6)


def test_a_stack_is_rounded_one_by_one() -> None:
    weight = drawn(3, 200, 256)
    stack = in_blocks(weight)
    for index, one in enumerate(weight):
        alone = in_blocks(one)
        assert torch.equal(stack.values[index].float(), alone.values.float())
        assert torch.equal(stack.scales[index], alone.scales)
    assert torch.equal(from_blocks(stack, 200)[1], from_blocks(in_blocks(weight[1]), 200))


def operands(tokens: int, outputs: int, groups: int, device: torch.device) -> tuple[Groups8, Blocks8]:
    x = in_form(drawn(tokens, 128 * groups, seed=1, device=device), "groups8")
    assert isinstance(x, Groups8)
    return x, in_blocks(drawn(outputs, 128 * groups, seed=2, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "outputs", "groups"),
    [(1, 64, 1), (1, 128, 9), (3, 200, 4), (16, 1, 2), (17, 130, 3), (64, 256, 2), (70, 96, 5)],
)
def test_the_triton_product_is_the_plain_one(
    tokens: int, outputs: int, groups: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = operands(tokens, outputs, groups, device)
    found = block_product_triton(x, weight, outputs, dtype)
    wanted = block_product_reference(x, weight, outputs, dtype)
    assert found.shape == (tokens, outputs)
    assert found.dtype == dtype
    assert found.is_contiguous()
    # Sums in another order; and one step of bf16, to which Triton's interpreter cuts instead of rounding.
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-7}[dtype]
    allowed = 1e-5 * wanted.float().abs().max() + step * wanted.float().abs()
    assert ((found.float() - wanted.float()).abs() <= allowed).all()


def test_scales_of_tokens_may_lie_either_way(device: torch.device) -> None:
    x, weight = operands(5, 128, 4, device)
    turned = Groups8(x.values, x.scales.T.contiguous().T)
    assert torch.equal(
        block_product_triton(x, weight, 128, torch.float32), block_product_triton(turned, weight, 128, torch.float32)
    )


def test_padding_of_the_last_block_is_never_seen(device: torch.device) -> None:
    x, weight = operands(4, 70, 2, device)
    for product in (block_product, block_product_triton):
        spoilt = weight.values.clone().view(torch.uint8)
        spoilt[70:] = 0x7F  # not a number
        found = product(x, Blocks8(spoilt.view(torch.float8_e4m3fn), weight.scales), 70, torch.float32)
        assert torch.equal(found, product(x, weight, 70, torch.float32))


@given(st.integers(1, 500), st.integers(1, 150), st.integers(1, 2000))
def test_inputs_are_cut_only_where_it_pays(tokens: int, groups: int, tiles: int) -> None:
    parts = parts_of(tokens, groups, tiles)
    assert 1 <= parts <= max(1, groups // 2)
    assert parts == 1 or parts * tokens * 8 <= groups * 128 / 4, "sums in fp32 move a quarter of the weight at most"
    assert parts == 1 or parts * tiles <= 512
