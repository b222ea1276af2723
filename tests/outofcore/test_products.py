"""The three products of a linear layer: written, added to, into other formats and other memory."""

import pytest
import torch
from torch import Tensor

from llmb.kernels.fp8 import fp8_linear_reference
from llmb.outofcore.products import Fp8Products, Products

TOKENS, INPUTS, OUTPUTS = 32, 48, 16


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((TOKENS, INPUTS), (OUTPUTS, INPUTS), (TOKENS, OUTPUTS))
    return tuple(drawn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))  # type: ignore[return-value]


@pytest.mark.parametrize("products", [Products(), Fp8Products()], ids=["plain", "fp8"])
def test_there_and_back_equal_the_reference(products):
    x, weight, dy = operands()
    exact = x @ weight.T, dy @ weight, dy.T @ x
    wanted = fp8_linear_reference(x, weight, dy) if isinstance(products, Fp8Products) else exact
    into = torch.full_like(weight, torch.nan)
    products.weight_gradient(dy, x, into, fresh=True)
    found = products.forward(x, weight), products.input_gradient(dy, weight), into.clone()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    products.weight_gradient(dy, x, into, fresh=False)
    torch.testing.assert_close(into, 2 * wanted[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("products", [Products(), Fp8Products()], ids=["plain", "fp8"])
def test_results_go_where_they_are_wanted(products):
    x, weight, dy = operands()
    wide = torch.full((TOKENS, OUTPUTS + 5), 7.0)
    returned = products.forward(x, weight, out=wide[:, :OUTPUTS])
    assert returned.data_ptr() == wide.data_ptr()
    torch.testing.assert_close(wide[:, :OUTPUTS], products.forward(x, weight))
    assert bool((wide[:, OUTPUTS:] == 7).all())
    base = drawn(TOKENS, OUTPUTS, seed=9)
    added, here = torch.empty_like(base), base.clone()
    products.forward(x, weight, out=added, onto=base)
    products.forward(x, weight, out=here, onto=here)
    for one in (added, here, products.forward(x, weight, onto=base)):
        torch.testing.assert_close(one, base + products.forward(x, weight), rtol=1e-5, atol=1e-4)
    dx = drawn(TOKENS, INPUTS, seed=8)
    wanted = dx + products.input_gradient(dy, weight)
    assert products.input_gradient(dy, weight, out=dx, onto=dx) is dx
    torch.testing.assert_close(dx, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("products", [Products(), Fp8Products()], ids=["plain", "fp8"])
def test_one_input_through_several_weights(products):
    x, weight, _ = operands()
    outs = torch.empty(TOKENS, OUTPUTS), torch.empty(TOKENS, 2 * OUTPUTS)
    products.project(x, (weight, torch.cat((weight, -weight))), outs)
    torch.testing.assert_close(outs[0], products.forward(x, weight))
    torch.testing.assert_close(outs[1], torch.cat((outs[0], -outs[0]), dim=1))


@pytest.mark.parametrize("products", [Products(), Fp8Products()], ids=["plain", "fp8"])
def test_a_gradient_of_fp32_loses_nothing_that_bf16_operands_have(products):
    x, _, dy = operands(torch.bfloat16)
    into = torch.zeros(OUTPUTS, INPUTS)
    for _ in range(3):
        products.weight_gradient(dy, x, into, fresh=False)
    once = torch.full_like(into, torch.nan)
    products.weight_gradient(dy, x, once, fresh=True)
    torch.testing.assert_close(into, 3 * once, rtol=1e-5, atol=1e-5)
    if not isinstance(products, Fp8Products):
        torch.testing.assert_close(once, dy.float().T @ x.float(), rtol=1e-5, atol=1e-5)


def test_sizes_that_8_bits_cannot_have_are_computed_plainly():
    x, weight, dy = drawn(30, INPUTS), drawn(OUTPUTS, INPUTS, seed=1), drawn(30, OUTPUTS, seed=2)
    into, out = torch.empty_like(weight), torch.empty(30, OUTPUTS)
    Fp8Products().weight_gradient(dy, x, into, fresh=True)
    Fp8Products().project(x, (weight,), (out,))
    for found, wanted in (
        (Fp8Products().forward(x, weight), x @ weight.T),
        (Fp8Products().input_gradient(dy, weight), dy @ weight),
        (into, dy.T @ x),
        (out, x @ weight.T),
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
