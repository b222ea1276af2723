"""The serving engine on a real GPU: kernels against plain torch at real widths, graphs against single launches."""

from dataclasses import replace

import pytest
import torch

from llmb.config.spec import Inference, Machine, Model, Parallel, Precision, RunConfig
from llmb.models.architectures import build_model
from llmb.models.hf_weights import save_weights
from llmb.ops.activation.gated_act import gated_activation
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
FORMS = ("plain", "per_token", "1x128")


def same_numbers(made, expected) -> None:
    """Plain numbers near; 8-bit ones equal but for the few that rounding of the last bit of a sum moves by a step."""
    if isinstance(expected, torch.Tensor):
        return torch.testing.assert_close(made, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(made.scales, expected.scales, rtol=1e-2, atol=0)
    assert (made.values.float() == expected.values.float()).float().mean() > 0.98


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [4096, 7168])
@pytest.mark.parametrize("tokens", [1, 37])
def test_rows(form, width, tokens):
    torch.manual_seed(width)
    added, stream = (torch.randn(tokens, width, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(width, device=GPU, dtype=torch.bfloat16)
    expected, total = add_rms_norm.reference(added, stream, weight, 1e-5, form)
    made, made_total = add_rms_norm(added, stream.clone(), weight, 1e-5, form)
    same_numbers(made, expected)
    torch.testing.assert_close(made_total, total, rtol=0, atol=0)
    gate_up = torch.cat((added, stream), 1)
    same_numbers(gated_activation(gate_up, "silu", form), gated_activation.reference(gate_up, "silu", form))
    same_numbers(quantize_activation(added, form), quantize_activation.reference(added, form))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("parts", [[(700, 1), (0, 1), (64, 1)], [(0, 900), (0, 40)], [(100, 1), (130, 700), (0, 3)]])
def test_paged_attention(dtype, parts):
    """Llama 8b's heads. Chunks take their own keys and values unrounded, so in 8 bits they only come near."""
    torch.manual_seed(1)
    heads, kv_heads, width, tokens = 32, 8, 128, 64
    blocks = [-(-(first + count) // tokens) for first, count in parts]
    order = torch.randperm(sum(blocks) + 3).tolist()
    table = torch.zeros(len(parts), max(blocks), dtype=torch.int32)
    places, starts = [], [0]
    for row, ((first, count), need) in enumerate(zip(parts, blocks, strict=True)):
        own = [order.pop() for _ in range(need)]
        table[row, :need] = torch.tensor(own, dtype=torch.int32)
        places += [own[p // tokens] * tokens + p % tokens for p in range(first, first + count)]
        starts.append(starts[-1] + count)
    decodes = sum(count == 1 for _, count in parts)
    lengths = [first + count for first, count in parts]
    spans = AttentionMetadata(
        cu_seqlens_P1=torch.tensor(starts, dtype=torch.int32, device=GPU),
        seq_lens_P=torch.tensor(lengths, dtype=torch.int32, device=GPU),
        block_table_PM=table.to(GPU),
        num_decodes=decodes,
        max_query_len=max(count for _, count in parts),
        max_seq_len=max(lengths),
        prefill_chunks=tuple(parts[decodes:]),
    )
    total = sum(blocks) + 3
    keys = torch.randn(total, kv_heads, tokens, width, device=GPU).to(dtype)
    values = torch.randn(total, kv_heads, width, tokens, device=GPU).to(dtype)
    qkv = torch.randn(starts[-1], (heads + 2 * kv_heads) * width, device=GPU, dtype=torch.bfloat16)
    angles = torch.rand(starts[-1], width // 2, device=GPU) * 6
    caches = [KvCache(keys.clone(), values.clone()) for _ in range(2)]
    where = torch.tensor(places, device=GPU)
    q, k, v = rope_and_cache.reference(qkv.float(), angles.cos(), angles.sin(), caches[0], where)
    expected = paged_attention.reference(q, k, v, caches[0], spans, width**-0.5)
    views = rope_and_cache(qkv.clone(), angles.cos(), angles.sin(), caches[1], where)
    made = paged_attention(*views, caches[1], spans, width**-0.5)
    difference = (made - expected).norm() / expected.norm()
    assert difference < (0.01 if dtype == torch.bfloat16 else 0.05), difference
    # Both turn in fp32: a number that is nearly between two may round the other way, never by more than one step.
    written, wanted = caches[1].keys_BGLD.float(), caches[0].keys_BGLD.float()
    step = torch.finfo(dtype).eps * torch.maximum(wanted.abs(), written.abs()).clamp(min=2.0**-6)
    other = (written - wanted).abs()
    assert (other <= step).all()
    assert (other > 0).float().mean() < 0.05


MODEL = Model(
    name="small", architecture="llama", layers=3, hidden=512, ffn=1024, heads=8, kv_heads=2, head_dim=64, vocab=1000
)
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


def answers(config: RunConfig, device: torch.device = GPU, **changes) -> dict[int, tuple[int, ...]]:
    config = replace(config, workload=replace(WORK, **changes))
    engine = build_engine(config, RankInfo(0, 1, device), max_seq_len=160)
    found: dict[int, tuple[int, ...]] = {}
    for number in range(30):
        prompt = torch.randint(0, 1000, (3 + 3 * number,), generator=torch.Generator().manual_seed(number)).tolist()
        ended = lambda answer: found.update({answer.request_id: answer.token_ids})  # noqa: E731
        engine.submit(Request(request_id=number, prompt=prompt, max_tokens=40, on_end=ended))
    engine.drain()
    assert engine.stats.blocks_used == 0
    return found


def share_alike(a: dict, b: dict) -> float:
    return sum(a[n] == b[n] for n in a) / len(a)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_graphs_and_single_launches_give_the_same_answers(dtype):
    """Padding changes which kernels cuBLAS picks, so a near tie may fall the other way; most answers are equal."""
    config = replace(CONFIG, precision=Precision(dtype=dtype, kv_dtype="fp8" if dtype == "fp8" else None))
    with_graphs, without = answers(config), answers(config, cuda_graphs=False)
    assert all(len(tokens) == 40 for tokens in with_graphs.values())
    assert share_alike(with_graphs, without) > 0.6


def test_fp32_on_a_gpu_answers_as_on_a_cpu(tmp_path):
    network = build_model(MODEL)
    network.init_weights(1)
    save_weights(network, tmp_path / "weights", torch.float32)
    folder = str(tmp_path / "weights")
    config = replace(CONFIG, precision=Precision(dtype="fp32"))
    expected = answers(config, torch.device("cpu"), weights=folder)
    assert share_alike(answers(config, weights=folder), expected) == 1
    assert share_alike(answers(config, weights=folder, max_num_tokens=40, block_tokens=16), expected) == 1


def test_rows8_is_what_a_product_takes():
    x = quantize_activation(torch.randn(3, 512, device=GPU, dtype=torch.bfloat16), "per_token")
    assert isinstance(x, PerTokenFp8)
    assert x.scales.shape == (3, 1)
