"""Steps of a handful of tokens on a real GPU, at the widths of Llama 8b: the thin way against the usual one."""

import pytest
import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.ops.attention.decode_attention import thin_attention, thin_attention_reference
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.gemm.skinny_gemm import Norm, ThinWeight, thin_product, thin_product_reference
from llmb.ops.quant.activation_quant import Rows8, as_plain, in_form
from llmb.ops.sampling.argmax import argmax
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import How, Stack, build_stack
from llmb.serve.rank_groups import Ranks
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import Cut, RandomWeights, Weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no GPU with 8-bit products",
    ),
]

GPU = torch.device("cuda", 0)
E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
LENGTH, BLOCKS = 64, 400  # tokens of a block, blocks of the cache
LLAMA = Model(
    name="8b", architecture="llama", layers=2, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=4096
)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "both": (28672, 4096), "down": (4096, 14336)}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("eight_bits", [True, False])
@pytest.mark.parametrize("layer", SHAPES)
def test_products_with_all_around_them(layer: str, eight_bits: bool, tokens: int) -> None:
    outputs, inputs = SHAPES[layer]
    x, values = drawn(tokens, inputs).to(BF16), drawn(outputs, inputs, seed=1) * inputs**-0.5
    rounded = in_form(values, "rows8")
    assert isinstance(rounded, Rows8)
    weight = ThinWeight(rounded.values, rounded.scales[:, 0]) if eight_bits else ThinWeight(values.to(BF16))
    norm = Norm(drawn(inputs, seed=2).to(BF16), 1e-5) if layer in ("qkv", "both") else None
    activation = "silu" if layer == "both" else None
    onto = drawn(tokens, outputs, seed=3).to(BF16) if layer in ("o", "down") else None
    wanted = thin_product_reference(x, weight, torch.float32, norm, activation, onto)
    found = thin_product(x, weight, BF16, norm, activation, onto)
    assert relative_error(found, wanted) < 0.003  # of rounding to bf16 once


def decodes(lengths: list[int], longest: int) -> Inputs:
    """One token each, of sequences whose blocks lie scattered; a length of 0 is padding."""
    n, most = len(lengths), -(-longest // LENGTH)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1))[: n * most].view(n, most).int()
    places = [int(table[i, (m - 1) // LENGTH]) * LENGTH + (m - 1) % LENGTH if m else -1 for i, m in enumerate(lengths)]
    return Inputs(
        positions_N=torch.tensor(lengths, device=GPU).sub(1).clamp(min=0),
        places_N=torch.tensor(places, device=GPU),
        slots_P=torch.arange(n, device=GPU),
        starts_P1=torch.arange(n + 1, dtype=torch.int32, device=GPU),
        lengths_P=torch.tensor(lengths, dtype=torch.int32, device=GPU),
        table_PM=table.to(GPU),
        decodes=n,
        longest_part=1,
        longest=longest,
    )


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(
    ("lengths", "longest"),
    [([1000], 2048), ([1], 2048), ([20_000], 22_000), ([64, 65, 0, 2047], 2048), ([5000, 1, 300], 6000), ([40], 40)],
    ids=str,
)
def test_attention_again_and_again(lengths: list[int], longest: int, dtype: torch.dtype) -> None:
    """Many times, because programs count one another: what they count must be gone before the next kernel."""
    inputs = decodes(lengths, longest)
    shapes = ((BLOCKS, 8, LENGTH, 128), (BLOCKS, 8, 128, LENGTH))
    ours, theirs = (KvCache(*(drawn(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))) for _ in range(2))
    angles = drawn(len(lengths), 64, seed=5)
    there = inputs.lengths_P > 0
    for seed in range(20):
        qkv = drawn(len(lengths), 48 * 128, seed=10 + seed).to(BF16)
        around = (angles.cos(), angles.sin())
        wanted = thin_attention_reference(qkv.clone(), *around, theirs, inputs.places_N, inputs, 128**-0.5, None)
        found = thin_attention(qkv, *around, ours, inputs.places_N, inputs, 128**-0.5, None)
        # The reference turns in bf16, and sees its own token rounded to the cache's 8 bits.
        assert relative_error(found[there], wanted[there]) < (0.01 if dtype is BF16 else 0.04)
    for mine, its in ((ours.keys_BGLD, theirs.keys_BGLD), (ours.values_BGDL, theirs.values_BGDL)):
        assert relative_error(mine, its) < 0.001


class Rounded(RandomWeights):
    """The numbers that weights in 8 bits stand for: of linear layers a scale for each output."""

    def take(self, name: str, cut: Cut | None = None) -> Tensor:
        values = super().take(name, cut)
        if not name.startswith("layers.") or values.dim() == 1:
            return values
        return as_plain(in_form(values, "rows8"), torch.float32)


def small(weights: Weights, dtype: torch.dtype, format: Format, kv_dtype: torch.dtype) -> Stack:
    stack = build_stack(LLAMA, weights, How(dtype, format, kv_dtype), Ranks(GPU))
    for mixer in stack.mixers():
        mixer.allocate(BLOCKS, LENGTH, 8, GPU)
        if mixer.bytes_per_token:
            cache = mixer.cache  # type: ignore[attr-defined]
            cache.keys_BGLD.copy_(drawn(*cache.keys_BGLD.shape, seed=7))
            cache.values_BGDL.copy_(drawn(*cache.values_BGDL.shape, seed=8))
    return stack


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every step goes the usual way until this is undone."""
    for module in ("served_model", "served_linear"):
        monkeypatch.setattr(f"llmb.serve.layers.{module}.is_thin", lambda _: False)
    return monkeypatch


@pytest.mark.parametrize("lengths", [[1000], [700, 1, 0, 2048]], ids=str)
@pytest.mark.parametrize(("format", "kv_dtype"), [("plain", BF16), ("fp8_channel", E4M3)], ids=["bf16", "fp8"])
@torch.inference_mode()
def test_a_llama_of_true_width(
    lengths: list[int], format: Format, kv_dtype: torch.dtype, usual: pytest.MonkeyPatch
) -> None:
    """Against the same numbers in fp32; of 8-bit weights it is nearer than the usual way, which rounds inputs too."""
    made_of = RandomWeights if format == "plain" else Rounded
    exact = small(made_of(LLAMA, 3, BF16, GPU), torch.float32, "plain", kv_dtype)
    stack = small(RandomWeights(LLAMA, 3, BF16, GPU), BF16, format, kv_dtype)
    inputs = decodes(lengths, 2048)
    tokens, rows = torch.arange(len(lengths), device=GPU) + 5, torch.arange(len(lengths), device=GPU)
    there = inputs.lengths_P > 0

    def logits(of: Stack = stack) -> Tensor:
        return of.logits(of.through(of.embed(tokens), inputs), rows)

    wanted, usually = logits(exact), logits()
    usual.undo()
    found = logits()
    error = relative_error(found[there], wanted[there])
    assert error < (0.02 if format == "plain" else 0.04)
    assert format == "plain" or error < relative_error(usually[there], wanted[there])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = logits()
    for _ in range(20):
        graph.replay()
        # The order in which shares of attention end does not matter to their sum.
        assert torch.equal(held[there], found[there])


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_argmax_of_a_vocabulary(rows: int) -> None:
    x = drawn(rows, 128_256).to(BF16)  # of so few values that several are the largest
    assert torch.equal(argmax(x).cpu(), x.cpu().argmax(dim=-1))
