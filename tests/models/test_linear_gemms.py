"""The three products of a linear layer: written, added to, into other formats and other memory."""

import pytest
import torch
from torch import Tensor

from llmb.models.llama_layer.linear_gemms import Fp8Products, Products
from llmb.ops.gemm.fp8_linear import E5M2, Fp8, fp8_linear_reference
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import in_both_forms

TOKENS, INPUTS, OUTPUTS = 32, 48, 16


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((tokens, INPUTS), (OUTPUTS, INPUTS), (tokens, OUTPUTS))
    return tuple(drawn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))  # type: ignore[return-value]


def in_fp8(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Fp8, Fp8, Fp8]:
    return in_both_forms(x, E4M3), in_both_forms(weight, E4M3), in_both_forms(dy, E5M2)


def exact(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x @ weight.T, dy @ weight, dy.T @ x


def made(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize(
    ("products", "form", "reference"),
    [(Products(), lambda *plain: plain, exact), (Fp8Products(), in_fp8, fp8_linear_reference)],
    ids=["plain", "fp8"],
)
@pytest.mark.parametrize("tokens", [TOKENS, 30, 1])
def test_there_and_back_equal_the_reference(products, form, reference, tokens):
    plain = operands(tokens=tokens)
    x, weight, dy = form(*plain)
    wanted = reference(*plain)
    into = made((OUTPUTS, INPUTS))
    products.weight_gradient(dy, x, into, fresh=True)
    out, dx = made((tokens, OUTPUTS)), made((tokens, INPUTS))
    assert products.forward(x, weight, out) is out
    assert products.input_gradient(dy, weight, dx) is dx
    torch.testing.assert_close((out, dx, into.clone()), wanted, rtol=1e-5, atol=1e-4)
    products.weight_gradient(dy, x, into, fresh=False)
    torch.testing.assert_close(into, 2 * wanted[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("products", "form"), [(Products(), lambda *plain: plain), (Fp8Products(), in_fp8)], ids=["plain", "fp8"]
)
def test_results_are_added_to_what_is_there(products, form):
    x, weight, _ = form(*operands())
    alone, base = products.forward(x, weight, made((TOKENS, OUTPUTS))), drawn(TOKENS, OUTPUTS, seed=9)
    added, here = made((TOKENS, OUTPUTS)), base.clone()
    assert products.forward(x, weight, added, onto=base) is added
    assert products.forward(x, weight, here, onto=here) is here
    for one in (added, here):
        torch.testing.assert_close(one, base + alone, rtol=1e-5, atol=1e-4)


def test_results_may_have_rows_apart_and_be_made_anew():
    """As the head's do."""
    x, weight, dy = operands()
    wide = torch.full((TOKENS, OUTPUTS + 5), 7.0)
    returned = Products().forward(x, weight, out=wide[:, :OUTPUTS])
    assert returned.data_ptr() == wide.data_ptr()
    torch.testing.assert_close(wide[:, :OUTPUTS], Products().forward(x, weight))
    assert bool((wide[:, OUTPUTS:] == 7).all())
    dx = drawn(TOKENS, INPUTS, seed=8)
    wanted = dx + Products().input_gradient(dy, weight)
    assert Products().input_gradient(dy, weight, out=dx, onto=dx) is dx
    torch.testing.assert_close(dx, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("products", "form"), [(Products(), lambda *plain: plain), (Fp8Products(), in_fp8)], ids=["plain", "fp8"]
)
def test_a_gradient_of_fp32_loses_nothing_that_its_operands_have(products, form):
    plain = operands(torch.bfloat16)
    x, _, dy = form(*plain)
    into = torch.zeros(OUTPUTS, INPUTS)
    for _ in range(3):
        products.weight_gradient(dy, x, into, fresh=False)
    once = made((OUTPUTS, INPUTS))
    products.weight_gradient(dy, x, once, fresh=True)
    torch.testing.assert_close(into, 3 * once, rtol=1e-5, atol=1e-5)
    if isinstance(products, Products):
        torch.testing.assert_close(once, plain[2].float().T @ plain[0].float(), rtol=1e-5, atol=1e-5)
