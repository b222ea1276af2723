"""Routed experts: the reference against single tokens worked out by hand, the Triton kernels against the reference."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.gated_act import gated_reference
from llmb.ops.moe.expert_weights import Kind, Stacked, empty_stack, fill_rows, plain_matrix
from llmb.ops.moe.fused_moe import Visits, routed_mlp_reference
from llmb.ops.quant.activation_quant import E4M3, Form, as_plain, in_form

pytest.importorskip("triton")
import triton.language as language
from triton.runtime import interpreter

from llmb.ops.moe.align_triton import deal, most_tiles, rows_of_tile
from llmb.ops.moe.fused_moe_fp8_triton import fits_wide
from llmb.ops.moe.fused_moe_triton import gate, product, routed_mlp_triton

FP32 = torch.float32
FORMS: tuple[Form, ...] = ("plain", "rows8", "groups8")
FORM_OF: dict[Kind, Form] = {"plain": "plain", "rows8": "rows8", "groups8": "groups8", "nvfp4": "plain"}
KINDS = tuple(FORM_OF)


@pytest.fixture(autouse=True)
def round_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses the carry when it rounds to 8 bits: let torch round there."""
    convert = interpreter._convert_float

    def rounded(x, x_type, to_type, mode):
        if (x_type, to_type) == (language.float32, language.float8e4nv):
            return torch.from_numpy(x).to(E4M3).view(torch.uint8).numpy()
        return convert(x, x_type, to_type, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(11)


def stack(shape: tuple[int, int, int], kind: Kind, seed: int = 0) -> Stacked:
    made = empty_stack(shape, kind, FP32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for expert in range(shape[0]):
        fill_rows(made, expert, 0, torch.randn(shape[1:], generator=generator) * 0.1 * (expert + 1))
    return made


def visits_of(tokens: int, top_k: int, experts: int, seed: int = 0) -> Visits:
    """Uneven: low experts are visited more often, the last one never."""
    generator = torch.Generator().manual_seed(seed)
    wish = torch.rand(tokens, experts - 1, generator=generator) - 0.15 * torch.arange(experts - 1)
    return Visits(torch.rand(tokens, top_k, generator=generator), wish.topk(top_k).indices, experts)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def moved(what, device: torch.device):
    """A tensor, or a tuple of tensors and other things, on the device."""
    if isinstance(what, Tensor):
        return what.to(device)
    return type(what)(*(moved(one, device) for one in what)) if isinstance(what, tuple) else what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_reference_is_each_token_through_each_of_its_experts(kind: Kind, activation: str) -> None:
    both, down = stack((4, 256, 128), kind, 1), stack((4, 128, 128), kind, 2)
    x_NC, visits = torch.randn(5, 128), visits_of(5, 2, 4)
    x = in_form(x_NC, FORM_OF[kind])
    found = routed_mlp_reference(x, visits, both, down, activation, FP32)
    for token, x_C in enumerate(as_plain(x, FP32)):
        wanted = torch.zeros(128)
        for weight, expert in zip(visits.weights_NK[token], visits.chosen_NK[token].tolist(), strict=True):
            gate, up = (plain_matrix(both, expert) @ x_C).chunk(2)
            gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
            hidden_F = as_plain(in_form((gate * up)[None], FORM_OF[kind]), FP32)[0]
            wanted += weight * (plain_matrix(down, expert) @ hidden_F)
        assert relative(found[token], wanted) < 1e-5


@pytest.mark.parametrize(("tokens", "top_k", "experts", "rows"), [(1, 2, 5, 16), (17, 3, 5, 16), (40, 4, 9, 32)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_visit_is_dealt_once_to_a_tile_of_its_expert(
    tokens: int, top_k: int, experts: int, rows: int, ranks: int, device: torch.device
) -> None:
    chosen_M = visits_of(tokens, top_k, experts).chosen_NK.flatten()
    first, here = 0 if ranks == 1 else 2, experts if ranks == 1 else 2
    dealt = deal(chosen_M.view(tokens, top_k).to(device), first, here, rows)
    found = []
    for expert, tile in zip(dealt.experts_T.tolist(), dealt.visits_P.view(-1, rows).tolist(), strict=True):
        if expert >= 0:
            real = [visit for visit in tile if visit < len(chosen_M)]
            assert real, "a tile of padding only"
            assert (chosen_M[real] == first + expert).all()
            assert tile[len(real) :] == [len(chosen_M)] * (rows - len(real))
            found += real
    wanted = ((chosen_M >= first) & (chosen_M < first + here)).nonzero().flatten().tolist()
    assert sorted(found) == wanted
    assert found == sorted(found, key=lambda visit: (chosen_M[visit].item(), visit))


def test_there_are_tiles_enough_for_the_worst_case() -> None:
    for visits, experts, rows in ((8, 256, 16), (35, 3, 16), (100, 4, 32), (1, 1, 16)):
        alone = min(experts, visits)
        sizes = [1] * (alone - 1) + [visits - alone + 1]
        assert sum(-(-size // rows) for size in sizes) <= most_tiles(visits, experts, rows) <= visits
    assert [rows_of_tile(v, 8) for v in (1, 128, 129, 512, 513, 100_000)] == [16, 16, 32, 64, 128, 128]


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_wide_product_gives_what_torch_gives(top_k: int, device: torch.device) -> None:
    weight, visits = stack((3, 512, 256), "groups8", 3), visits_of(140, 2, 3)
    x = in_form(torch.randn(140 * 2 // top_k, 256), "groups8")
    dealt = deal(visits.chosen_NK.to(device), 0, 3, 128)
    assert fits_wide(weight, dealt)
    given = (moved(x, device), moved(weight, device), dealt, 280, top_k, FP32)
    found = product(*given, moved(visits.weights_NK, device)).cpu()
    rows = as_plain(x, FP32).repeat_interleave(top_k, 0)
    for visit, expert in enumerate(visits.chosen_NK.flatten().tolist()):
        wanted = visits.weights_NK.flatten()[visit] * (plain_matrix(weight, expert) @ rows[visit])
        assert relative(found[visit], wanted) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (3, 32), (17, 16), (40, 64)])
@pytest.mark.parametrize("top_k", [1, 2])
def test_products_give_what_torch_gives(kind: Kind, tokens: int, rows: int, top_k: int, device: torch.device) -> None:
    weight, visits = stack((5, 384, 256), kind, 3), visits_of(tokens, 2, 5)
    x, factor_M = in_form(torch.randn(tokens * 2 // top_k, 256), FORM_OF[kind]), visits.weights_NK.flatten()
    wanted_MO = torch.stack([
        plain_matrix(weight, expert) @ as_plain(x, FP32)[visit // top_k] * factor_M[visit]
        for visit, expert in enumerate(visits.chosen_NK.flatten().tolist())
    ])  # fmt: skip
    dealt = deal(visits.chosen_NK.to(device), 0, 5, rows)
    on_device = product(moved(x, device), moved(weight, device), dealt, tokens * 2, top_k, FP32, factor_M.to(device))
    # Tensor cores add 8-bit products with fewer bits than fp32 has.
    assert relative(on_device.cpu(), wanted_MO) < (1e-3 if device.type == "cuda" and FORM_OF[kind] != "plain" else 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("width", [128, 1152])
def test_the_gate_gives_what_torch_gives(form: Form, activation: str, width: int, device: torch.device) -> None:
    both_M2F, chosen_NK = 3 * torch.randn(6, 2 * width), torch.tensor([[1, 0], [2, 1], [2, 3]])
    there = [0, 2, 3, 4]  # visits to experts 1 and 2
    found = moved(gate(both_M2F.to(device), chosen_NK.to(device), 1, 2, activation, form), torch.device("cpu"))
    wanted = gated_reference(both_M2F, activation, form)
    if not isinstance(found, Tensor):
        torch.testing.assert_close(found.scales[there], wanted.scales[there])
    # A number halfway between two of the format may go to the other.
    assert relative(as_plain(found, FP32)[there], as_plain(wanted, FP32)[there]) < (1e-6 if form == "plain" else 2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (3, 32), (17, None)])
def test_kernels_give_what_the_reference_gives(kind: Kind, tokens: int, rows: int | None, device: torch.device) -> None:
    both, down = stack((5, 256, 256), kind, 3), stack((5, 256, 128), kind, 4)
    visits, x = visits_of(tokens, 2, 5), in_form(torch.randn(tokens, 256), FORM_OF[kind])
    wanted = routed_mlp_reference(x, visits, both, down, "silu", FP32)
    given = (moved(one, device) for one in (x, visits, both, down))
    found = routed_mlp_triton(*given, "silu", FP32, rows).cpu()
    assert relative(found, wanted) < (1e-5 if FORM_OF[kind] == "plain" else 2e-3)


@pytest.mark.parametrize("kind", ["plain", "nvfp4"])
def test_kernels_take_sizes_that_fill_no_tile(kind: Kind, device: torch.device) -> None:
    both, down = stack((3, 2 * 80, 48), kind, 5), stack((3, 48, 80), kind, 6)
    visits, x_NC = visits_of(7, 2, 3), torch.randn(7, 48)
    wanted = routed_mlp_reference(x_NC, visits, both, down, "gelu", FP32)
    given = (moved(one, device) for one in (x_NC, visits, both, down))
    assert relative(routed_mlp_triton(*given, "gelu", FP32).cpu(), wanted) < 1e-5


def test_kernels_add_nothing_for_other_ranks_experts(device: torch.device) -> None:
    both, down = stack((6, 64, 32), "plain", 7), stack((6, 32, 32), "plain", 8)
    x_NC, visits = torch.randn(9, 32).to(device), visits_of(9, 3, 6)
    wanted = routed_mlp_reference(x_NC.cpu(), visits, both, down, "silu", FP32)
    both, down, visits = (moved(one, device) for one in (both, down, visits))
    parts = [
        routed_mlp_triton(
            x_NC, visits._replace(first=first), Stacked("plain", both.values[first:][:2].contiguous()),
            Stacked("plain", down.values[first:][:2].contiguous()), "silu", FP32,
        )
        for first in (0, 2, 4)
    ]  # fmt: skip
    assert relative(sum(parts).cpu(), wanted) < 1e-5
    nobody = visits._replace(chosen_NK=torch.full_like(visits.chosen_NK, 5))
    first_two = Stacked("plain", both.values[:2]), Stacked("plain", down.values[:2])
    assert (routed_mlp_triton(x_NC, nobody, *first_two, "silu", FP32) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_very_many_tokens_are_computed_in_parts(
    kind: Kind, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, down = stack((3, 256, 128), kind, 9), stack((3, 128, 128), kind, 10)
    given = [
        moved(one, device) for one in (in_form(torch.randn(7, 128), FORM_OF[kind]), visits_of(7, 2, 3), both, down)
    ]
    at_once = routed_mlp_triton(*given, "silu", FP32)
    monkeypatch.setattr("llmb.ops.moe.fused_moe_triton.MOST_TOKENS", 3)
    assert torch.equal(routed_mlp_triton(*given, "silu", FP32), at_once)


def test_a_token_may_visit_an_expert_twice(device: torch.device) -> None:
    """As no router chooses, but a row of padding may hold anything."""
    both, down = stack((1, 64, 32), "plain", 11), stack((1, 32, 32), "plain", 12)
    x_NC, visits = torch.randn(20, 32), Visits(torch.rand(20, 2), torch.zeros(20, 2, dtype=torch.int64), 8)
    wanted = routed_mlp_reference(x_NC, visits, both, down, "silu", FP32)
    given = (moved(one, device) for one in (x_NC, visits, both, down))
    assert relative(routed_mlp_triton(*given, "silu", FP32).cpu(), wanted) < 1e-5


def test_no_tokens(device: torch.device) -> None:
    visits = Visits(torch.ones(0, 2), torch.zeros(0, 2, dtype=torch.int64), 2)
    parts = (torch.ones(0, 32), visits, stack((2, 64, 32), "plain"), stack((2, 32, 32), "plain"))
    assert routed_mlp_triton(*(moved(one, device) for one in parts), "silu", FP32).shape == (0, 32)
