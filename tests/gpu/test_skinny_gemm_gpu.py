"""Decode steps of a few tokens on a GPU, at the widths of Llama 8b: decode attention, layers with skinny GEMM."""

import pytest
import torch
from cuda_checks import GPU, NEEDS_FP8_GEMM, randn, relative_error
from small_models import llama_model
from torch import Tensor

from llmb.ops.attention.decode_attention import decode_attention
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.quant.activation_quant import dequantize, quantize_activation
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import ServedModel, ServingDtypes, build_served_model
from llmb.serve.rank_groups import RankGroups
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import RandomWeights, WeightShard, WeightSource

pytestmark = NEEDS_FP8_GEMM

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
LENGTH, BLOCKS = 64, 400  # tokens of a block, blocks of the cache
LLAMA = llama_model(name="8b", hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=4096)


def decodes(lengths: list[int], max_seq_len: int) -> StepInputs:
    """Inputs of decodes whose blocks are shuffled; a length of 0 is padding."""
    n, max_blocks = len(lengths), -(-max_seq_len // LENGTH)
    table = (
        torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1))[: n * max_blocks].view(n, max_blocks).int()
    )
    slots = [int(table[i, (m - 1) // LENGTH]) * LENGTH + (m - 1) % LENGTH if m else -1 for i, m in enumerate(lengths)]
    return StepInputs(
        positions_N=torch.tensor(lengths, device=GPU).sub(1).clamp(min=0),
        slot_mapping_N=torch.tensor(slots, device=GPU),
        slots_P=torch.arange(n, device=GPU),
        cu_seqlens_P1=torch.arange(n + 1, dtype=torch.int32, device=GPU),
        seq_lens_P=torch.tensor(lengths, dtype=torch.int32, device=GPU),
        block_table_PM=table.to(GPU),
        num_decodes=n,
        max_query_len=1,
        max_seq_len=max_seq_len,
    )


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(
    ("lengths", "max_seq_len"),
    [([1000], 2048), ([1], 2048), ([20_000], 22_000), ([64, 65, 0, 2047], 2048), ([5000, 1, 300], 6000), ([40], 40)],
    ids=str,
)
def test_decode_attention_repeatedly(lengths: list[int], max_seq_len: int, dtype: torch.dtype) -> None:
    """Many times, because programs count arrivals: the counters must be zero before the next kernel."""
    inputs = decodes(lengths, max_seq_len)
    shapes = ((BLOCKS, 8, LENGTH, 128), (BLOCKS, 8, 128, LENGTH))
    cache, reference_cache = (
        KvCache(*(randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))) for _ in range(2)
    )
    angles = randn(len(lengths), 64, seed=5, dtype=torch.float32)
    valid = inputs.seq_lens_P > 0
    for seed in range(20):
        qkv = randn(len(lengths), 48 * 128, seed=10 + seed)
        tables = (angles.cos(), angles.sin())
        expected = decode_attention.reference(
            qkv.clone(), *tables, reference_cache, inputs.slot_mapping_N, inputs, 128**-0.5, None
        )
        actual = decode_attention(qkv, *tables, cache, inputs.slot_mapping_N, inputs, 128**-0.5, None)
        # The reference applies RoPE in bf16, and reads the newest token rounded to the cache's dtype.
        assert relative_error(actual[valid], expected[valid]) < (0.01 if dtype is BF16 else 0.04)
    for a, b in ((cache.keys_BGLD, reference_cache.keys_BGLD), (cache.values_BGDL, reference_cache.values_BGDL)):
        assert relative_error(a, b) < 0.001


class QuantizedWeights(RandomWeights):
    """Random weights rounded as fp8_channel rounds them, one scale per output of a linear layer."""

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        values = super().load(name, shard)
        if not name.startswith("layers.") or values.dim() == 1:
            return values
        return dequantize(quantize_activation(values, "per_token"), torch.float32)


def build_filled_model(weights: WeightSource, dtype: torch.dtype, format: Format, kv_dtype: torch.dtype) -> ServedModel:
    stack = build_served_model(LLAMA, weights, ServingDtypes(dtype, format, kv_dtype), RankGroups(GPU))
    for mixer in stack.mixers():
        mixer.allocate(BLOCKS, LENGTH, 8, GPU)
        if mixer.bytes_per_token:
            cache = mixer.cache  # type: ignore[attr-defined]
            cache.keys_BGLD.copy_(randn(*cache.keys_BGLD.shape, seed=7))
            cache.values_BGDL.copy_(randn(*cache.values_BGDL.shape, seed=8))
    return stack


@pytest.fixture
def without_skinny_gemm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No step uses skinny GEMM until this is undone."""
    for module in ("served_model", "served_linear"):
        monkeypatch.setattr(f"llmb.serve.layers.{module}.takes_skinny_gemm", lambda _: False)
    return monkeypatch


@pytest.mark.parametrize("lengths", [[1000], [700, 2048], [2048, 0]], ids=str)
@pytest.mark.parametrize(("format", "kv_dtype"), [("plain", BF16), ("fp8_channel", E4M3)], ids=["bf16", "fp8"])
@torch.inference_mode()
def test_llama_layers_of_full_width(
    lengths: list[int], format: Format, kv_dtype: torch.dtype, without_skinny_gemm: pytest.MonkeyPatch
) -> None:
    """Against fp32; with fp8 weights closer than the usual GEMM, which rounds its inputs too."""
    source = RandomWeights if format == "plain" else QuantizedWeights
    exact = build_filled_model(source(LLAMA, 3, BF16, GPU), torch.float32, "plain", kv_dtype)
    stack = build_filled_model(RandomWeights(LLAMA, 3, BF16, GPU), BF16, format, kv_dtype)
    inputs = decodes(lengths, 2048)
    tokens, rows = torch.arange(len(lengths), device=GPU) + 5, torch.arange(len(lengths), device=GPU)
    valid = inputs.seq_lens_P > 0

    def logits(of: ServedModel = stack) -> Tensor:
        return of.logits(of.forward(of.embed(tokens), inputs), rows)

    expected, without = logits(exact), logits()
    without_skinny_gemm.undo()
    actual = logits()
    error = relative_error(actual[valid], expected[valid])
    assert error < (0.02 if format == "plain" else 0.04)
    assert format == "plain" or error < relative_error(without[valid], expected[valid])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed = logits()
    for _ in range(20):
        graph.replay()
        # The order in which KV splits finish does not change the result.
        assert torch.equal(graphed[valid], actual[valid])
