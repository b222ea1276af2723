"""Steps of a handful of tokens on a real GPU, at the widths of Llama 8b: the thin way against the usual one."""

import pytest
import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.ops.attention.decode_attention import decode_attention
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.gemm.skinny_gemm import InputNorm, SkinnyGemmWeight, skinny_gemm
from llmb.ops.quant.activation_quant import PerTokenFp8, dequantize, quantize_activation
from llmb.ops.sampling.argmax import argmax
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import ServedModel, ServingDtypes, build_served_model
from llmb.serve.rank_groups import RankGroups
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import RandomWeights, WeightShard, WeightSource

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
    rounded = quantize_activation(values, "per_token")
    assert isinstance(rounded, PerTokenFp8)
    weight = SkinnyGemmWeight(rounded.values, rounded.scales[:, 0]) if eight_bits else SkinnyGemmWeight(values.to(BF16))
    norm = InputNorm(drawn(inputs, seed=2).to(BF16), 1e-5) if layer in ("qkv", "both") else None
    activation = "silu" if layer == "both" else None
    onto = drawn(tokens, outputs, seed=3).to(BF16) if layer in ("o", "down") else None
    wanted = skinny_gemm.reference(x, weight, torch.float32, norm, activation, onto)
    found = skinny_gemm(x, weight, BF16, norm, activation, onto)
    assert relative_error(found, wanted) < 0.003  # of rounding to bf16 once


def decodes(lengths: list[int], longest: int) -> StepInputs:
    """One token each, of sequences whose blocks lie scattered; a length of 0 is padding."""
    n, most = len(lengths), -(-longest // LENGTH)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1))[: n * most].view(n, most).int()
    places = [int(table[i, (m - 1) // LENGTH]) * LENGTH + (m - 1) % LENGTH if m else -1 for i, m in enumerate(lengths)]
    return StepInputs(
        positions_N=torch.tensor(lengths, device=GPU).sub(1).clamp(min=0),
        slot_mapping_N=torch.tensor(places, device=GPU),
        slots_P=torch.arange(n, device=GPU),
        cu_seqlens_P1=torch.arange(n + 1, dtype=torch.int32, device=GPU),
        seq_lens_P=torch.tensor(lengths, dtype=torch.int32, device=GPU),
        block_table_PM=table.to(GPU),
        num_decodes=n,
        max_query_len=1,
        max_seq_len=longest,
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
    there = inputs.seq_lens_P > 0
    for seed in range(20):
        qkv = drawn(len(lengths), 48 * 128, seed=10 + seed).to(BF16)
        around = (angles.cos(), angles.sin())
        wanted = decode_attention.reference(
            qkv.clone(), *around, theirs, inputs.slot_mapping_N, inputs, 128**-0.5, None
        )
        found = decode_attention(qkv, *around, ours, inputs.slot_mapping_N, inputs, 128**-0.5, None)
        # The reference turns in bf16, and sees its own token rounded to the cache's 8 bits.
        assert relative_error(found[there], wanted[there]) < (0.01 if dtype is BF16 else 0.04)
    for mine, its in ((ours.keys_BGLD, theirs.keys_BGLD), (ours.values_BGDL, theirs.values_BGDL)):
        assert relative_error(mine, its) < 0.001


class Rounded(RandomWeights):
    """The numbers that weights in 8 bits stand for: of linear layers a scale for each output."""

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        values = super().load(name, shard)
        if not name.startswith("layers.") or values.dim() == 1:
            return values
        return dequantize(quantize_activation(values, "per_token"), torch.float32)


def small(weights: WeightSource, dtype: torch.dtype, format: Format, kv_dtype: torch.dtype) -> ServedModel:
    stack = build_served_model(LLAMA, weights, ServingDtypes(dtype, format, kv_dtype), RankGroups(GPU))
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
        monkeypatch.setattr(f"llmb.serve.layers.{module}.takes_skinny_gemm", lambda _: False)
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
    there = inputs.seq_lens_P > 0

    def logits(of: ServedModel = stack) -> Tensor:
        return of.logits(of.forward(of.embed(tokens), inputs), rows)

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
