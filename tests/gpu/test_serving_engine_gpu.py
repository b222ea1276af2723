"""Serving engine on a GPU: kernels against their references at full width, CUDA graphs against eager."""

from dataclasses import replace

import pytest
import torch
from small_models import llama_model

from llmb.config.spec import Inference, Machine, Parallel, Precision, RunConfig
from llmb.models.architectures import build_model
from llmb.models.hf_weights import save_weights
from llmb.ops.activation.activation import gated_activation
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.paged_attention import (
    KvCache,
    paged_attention,
    rope_and_cache,
)
from llmb.ops.norm.add_rms_norm import add_rms_norm
from llmb.ops.quant.activation_quant import PerTokenFp8, quantize_activation
from llmb.runtime.rank_info import RankInfo
from llmb.serve.engine_builder import build_engine
from llmb.serve.request import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda", 0)
QUANT_FORMATS = ("plain", "per_token", "1x128")


def assert_close(actual, expected) -> None:
    """Compare plain numbers closely; few fp8 values may differ by one step, where the last bit of a sum decides."""
    if isinstance(expected, torch.Tensor):
        return torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-2, atol=0)
    assert (actual.values.float() == expected.values.float()).float().mean() > 0.98


@pytest.mark.parametrize("quant_format", QUANT_FORMATS)
@pytest.mark.parametrize("width", [4096, 7168])
@pytest.mark.parametrize("tokens", [1, 37])
def test_norm_activation_and_quantization(quant_format, width, tokens):
    torch.manual_seed(width)
    x, residual = (torch.randn(tokens, width, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(width, device=GPU, dtype=torch.bfloat16)
    expected, expected_total = add_rms_norm.reference(x, residual, weight, 1e-5, quant_format)
    actual, actual_total = add_rms_norm(x, residual.clone(), weight, 1e-5, quant_format)
    assert_close(actual, expected)
    torch.testing.assert_close(actual_total, expected_total, rtol=0, atol=0)
    gate_up = torch.cat((x, residual), 1)
    assert_close(
        gated_activation(gate_up, "silu", quant_format), gated_activation.reference(gate_up, "silu", quant_format)
    )
    assert_close(quantize_activation(x, quant_format), quantize_activation.reference(x, quant_format))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "sequences", [[(700, 1), (0, 1), (64, 1)], [(0, 900), (0, 40)], [(100, 1), (130, 700), (0, 3)]]
)
def test_paged_attention(dtype, sequences):
    """The heads of Llama 8b. Prefill chunks use their own keys and values unrounded: fp8 caches differ more."""
    torch.manual_seed(1)
    heads, kv_heads, width, tokens = 32, 8, 128, 64
    blocks = [-(-(first + count) // tokens) for first, count in sequences]
    order = torch.randperm(sum(blocks) + 3).tolist()
    table = torch.zeros(len(sequences), max(blocks), dtype=torch.int32)
    slots, starts = [], [0]
    for row, ((first, count), need) in enumerate(zip(sequences, blocks, strict=True)):
        sequence_blocks = [order.pop() for _ in range(need)]
        table[row, :need] = torch.tensor(sequence_blocks, dtype=torch.int32)
        slots += [sequence_blocks[p // tokens] * tokens + p % tokens for p in range(first, first + count)]
        starts.append(starts[-1] + count)
    decodes = sum(count == 1 for _, count in sequences)
    lengths = [first + count for first, count in sequences]
    metadata = AttentionMetadata(
        cu_seqlens_P1=torch.tensor(starts, dtype=torch.int32, device=GPU),
        seq_lens_P=torch.tensor(lengths, dtype=torch.int32, device=GPU),
        block_table_PM=table.to(GPU),
        num_decodes=decodes,
        max_query_len=max(count for _, count in sequences),
        max_seq_len=max(lengths),
        prefill_chunks=tuple(sequences[decodes:]),
    )
    num_blocks = sum(blocks) + 3
    keys = torch.randn(num_blocks, kv_heads, tokens, width, device=GPU).to(dtype)
    values = torch.randn(num_blocks, kv_heads, width, tokens, device=GPU).to(dtype)
    qkv = torch.randn(starts[-1], (heads + 2 * kv_heads) * width, device=GPU, dtype=torch.bfloat16)
    angles = torch.rand(starts[-1], width // 2, device=GPU) * 6
    caches = [KvCache(keys.clone(), values.clone()) for _ in range(2)]
    slot_mapping = torch.tensor(slots, device=GPU)
    q, k, v = rope_and_cache.reference(qkv.float(), angles.cos(), angles.sin(), caches[0], slot_mapping)
    expected = paged_attention.reference(q, k, v, caches[0], metadata, width**-0.5)
    views = rope_and_cache(qkv.clone(), angles.cos(), angles.sin(), caches[1], slot_mapping)
    actual = paged_attention(*views, caches[1], metadata, width**-0.5)
    difference = (actual - expected).norm() / expected.norm()
    assert difference < (0.01 if dtype == torch.bfloat16 else 0.05), difference
    # RoPE is in fp32 in both: a number near a tie may be rounded either way, by one step at most.
    actual_keys, expected_keys = caches[1].keys_BGLD.float(), caches[0].keys_BGLD.float()
    step = torch.finfo(dtype).eps * torch.maximum(expected_keys.abs(), actual_keys.abs()).clamp(min=2.0**-6)
    difference_of_keys = (actual_keys - expected_keys).abs()
    assert (difference_of_keys <= step).all()
    assert (difference_of_keys > 0).float().mean() < 0.05


MODEL = llama_model(name="small", layers=3, hidden=512, ffn=1024, heads=8, vocab=1000)
WORK = Inference(
    mode="max_throughput",
    use_case="chat",
    isl=100,
    osl=40,
    max_batch_size=12,
    concurrency=30,
    max_num_tokens=256,
    kv_fraction=0.01,
    num_requests=30,
)
CONFIG = RunConfig(
    name="small",
    target="t",
    size="s",
    machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
    model=MODEL,
    parallel=Parallel(),
    precision=Precision(dtype="bf16"),
    workload=WORK,
)


def generate(config: RunConfig, device: torch.device = GPU, **changes) -> dict[int, tuple[int, ...]]:
    config = replace(config, workload=replace(WORK, **changes))
    engine = build_engine(config, RankInfo(0, 1, device), max_seq_len=160)
    outputs: dict[int, tuple[int, ...]] = {}
    for number in range(30):
        prompt = torch.randint(0, 1000, (3 + 3 * number,), generator=torch.Generator().manual_seed(number)).tolist()
        ended = lambda response: outputs.update({response.request_id: response.token_ids})  # noqa: E731
        engine.submit(Request(request_id=number, prompt=prompt, max_tokens=40, on_end=ended))
    engine.drain()
    assert engine.stats.blocks_used == 0
    return outputs


def fraction_equal(a: dict, b: dict) -> float:
    return sum(a[n] == b[n] for n in a) / len(a)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_graphs_and_eager_generate_the_same_tokens(dtype):
    """Padding changes which kernels cuBLAS selects, so near ties may differ; most outputs are equal."""
    config = replace(CONFIG, precision=Precision(dtype=dtype, kv_dtype="fp8" if dtype == "fp8" else None))
    with_graphs, without = generate(config), generate(config, cuda_graphs=False)
    assert all(len(tokens) == 40 for tokens in with_graphs.values())
    assert fraction_equal(with_graphs, without) > 0.6


def test_fp32_generates_the_tokens_of_the_cpu(tmp_path):
    network = build_model(MODEL)
    network.init_weights(1)
    save_weights(network, tmp_path / "weights", torch.float32)
    folder = str(tmp_path / "weights")
    config = replace(CONFIG, precision=Precision(dtype="fp32"))
    expected = generate(config, torch.device("cpu"), weights=folder)
    assert fraction_equal(generate(config, weights=folder), expected) == 1
    assert fraction_equal(generate(config, weights=folder, max_num_tokens=40, block_tokens=16), expected) == 1


def test_per_token_scales_are_a_column():
    x = quantize_activation(torch.randn(3, 512, device=GPU, dtype=torch.bfloat16), "per_token")
    assert isinstance(x, PerTokenFp8)
    assert x.scales.shape == (3, 1)
