"""What stands between two products of a served model: norms, gates, rounding; by Triton as in plain torch."""

import pytest
import torch
from torch import Tensor

from llmb.ops.activation.gated_act import gated_reference
from llmb.ops.activation.gated_act_triton import gated_triton
from llmb.ops.norm.add_rms_norm import add_norm_reference
from llmb.ops.norm.add_rms_norm_triton import add_norm_triton
from llmb.ops.quant.activation_quant import Activation, Form, as_plain, in_form_reference
from llmb.ops.quant.activation_quant_triton import in_form_triton

FORMS: tuple[Form, ...] = ("plain", "rows8", "groups8")


def assert_same(made: Activation, expected: Activation) -> None:
    """Scales are equal up to the order of sums. Triton's interpreter rounds roughly to 8 bits where a number carries
    into the next power of two, so a few of its values differ there; the GPU's do not (tests/gpu)."""
    assert type(made) is type(expected)
    if isinstance(made, Tensor) or isinstance(expected, Tensor):
        return torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.scales, expected.scales, rtol=1e-6, atol=0)
    a, b = made.values.float(), expected.values.float()
    assert a.shape == b.shape
    assert (a == b).float().mean() > 0.9
    assert ((a - b).abs() <= 0.51 * b.abs() + 0.01).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (3, 384), (5, 1024)])
@pytest.mark.parametrize("adds", [True, False])
def test_add_norm_is_one_pass(form, tokens, width, adds):
    generator = torch.Generator().manual_seed(width)
    added, stream = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    weight = torch.randn(width, generator=generator)
    normed, total = add_norm_reference(added, stream if adds else None, weight, 1e-5, form)
    made, made_total = add_norm_triton(added.clone(), stream.clone() if adds else None, weight, 1e-5, form)
    assert_same(made, normed)
    torch.testing.assert_close(made_total, total, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (4, 384)])
def test_gated_product(form, activation, tokens, width):
    both = torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(1))
    assert_same(gated_triton(both, activation, form), gated_reference(both, activation, form))


@pytest.mark.parametrize("form", ["rows8", "groups8"])
def test_rounding_of_rows_with_a_stride(form):
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(2))[:, :384]
    assert_same(in_form_triton(x, form), in_form_reference(x, form))


@pytest.mark.parametrize("form", ["rows8", "groups8"])
def test_a_row_of_zeros_stays_zero(form):
    assert not as_plain(in_form_triton(torch.zeros(2, 256), form), torch.float32).any()


def test_nothing_comes_of_no_tokens():
    assert in_form_triton(torch.zeros(0, 128), "rows8").values.shape == (0, 128)
    assert gated_triton(torch.zeros(0, 256), "silu", "plain").shape == (0, 128)
