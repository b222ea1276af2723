"""Latent attention on a real GPU at DeepSeek-V3's widths: kernels, the mixer, and both as a replayed CUDA graph.

No Triton kernel is imported here at the top: where there is no GPU, tests/kernels chooses the interpreter first.
"""

import pytest
import torch
from torch import Tensor

from llmb.config.spec import MlaConfig, Model, MoEConfig, RopeConfig
from llmb.models.blocks import rope_table
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.mla_attention import (
    MlaCache,
    mla_attention,
    mla_prefill_attention,
    mla_rope_and_cache,
)
from llmb.ops.quant.activation_quant import E4M3, quantize_activation
from llmb.serve.layers.served_mla import PagedMla
from llmb.serve.rank_groups import RankGroup
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)
RANK, TURNED, BLOCK, SCALE = 512, 64, 64, 192**-0.5
MODEL = Model(
    name="of-true-width",
    architecture="deepseek",
    layers=1,
    hidden=7168,
    ffn=256,
    heads=128,
    kv_heads=128,
    head_dim=128,
    vocab=1024,
    mla=MlaConfig(q_rank=1536, kv_rank=RANK, nope_dim=128, rope_dim=TURNED, value_dim=128),
    rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=4096, mscale_all_dim=1.0),
    experts=MoEConfig(count=8, top_k=3, ffn=128, shared=1, dense_layers=1),
)


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator(GPU).manual_seed(sum(sizes)), device=GPU).to(dtype)


def error(ours: Tensor, wanted: Tensor) -> float:
    return ((ours.float() - wanted.float()).norm() / wanted.float().norm()).item()


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=GPU)


def spans_of(parts: list[tuple[int, int]], longest: int | None = None) -> AttentionMetadata:
    """Parts of (count, length); padding has a token and no length."""
    most = max(-(-length // BLOCK) for _, length in parts)
    table = torch.randperm(len(parts) * most, generator=torch.Generator(GPU).manual_seed(1), device=GPU)
    return AttentionMetadata(
        cu_seqlens_P1=whole(0, *(count for count, _ in parts)).cumsum(0, dtype=torch.int32),
        seq_lens_P=whole(*(length for _, length in parts)),
        block_table_PM=table.view(len(parts), most).int(),
        num_decodes=0,
        max_query_len=max(count for count, _ in parts),
        max_seq_len=longest or max(length for _, length in parts),
    )


def cache_of(spans: AttentionMetadata, dtype: torch.dtype) -> MlaCache:
    blocks = spans.block_table_PM.numel()
    return MlaCache(normal(blocks, BLOCK, RANK).to(dtype), normal(blocks, BLOCK, TURNED))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("heads", [128, 32, 16])
@pytest.mark.parametrize(
    ("parts", "longest"),
    [
        ([(1, 1000)], 1000),
        ([(1, 1000)], 32768),  # as a graph has it
        ([(1, 100 + 37 * number) for number in range(64)] + [(1, 0)] * 3, None),
        ([(1, 4096)] * 300, None),
        ([(5, 700), (1, 64), (130, 1130)], None),
    ],
)
def test_kernels_give_what_torch_gives(
    dtype: torch.dtype, heads: int, parts: list[tuple[int, int]], longest: int | None
) -> None:
    spans = spans_of(parts, longest)
    cache, tokens = cache_of(spans, dtype), int(spans.cu_seqlens_P1[-1])
    q_latent, q_rope = normal(heads, tokens, RANK).transpose(0, 1), normal(tokens, heads, 192)[..., 128:]
    wanted = mla_attention.reference(q_latent.float(), q_rope.float(), cache, spans, SCALE)
    assert error(mla_attention(q_latent, q_rope, cache, spans, SCALE), wanted) < 0.01


@pytest.mark.parametrize(("count", "length"), [(256, 300), (1000, 5000), (77, 8192)])
def test_the_last_of_expanded_tokens_see_all_before_them(count: int, length: int) -> None:
    q, kv, keys = normal(count, 16, 192), normal(length, 16, 256), normal(length, 64)
    wanted = mla_prefill_attention.reference(q.float(), kv.float(), keys.float(), SCALE)
    assert error(mla_prefill_attention(q, kv, keys, SCALE), wanted) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_latents_are_normed_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    tokens, heads = 37, 128
    q, down, norm = normal(tokens, heads, 192), normal(tokens, 1536 + RANK + TURNED), normal(RANK) * 100
    _, latent, key = down.split((1536, RANK, TURNED), dim=-1)
    angles = torch.rand(tokens, TURNED // 2, device=GPU) * 1e4
    places = torch.randperm(3 * BLOCK, device=GPU)[:tokens]
    places[5] = -1
    made = []
    for write in (mla_rope_and_cache, mla_rope_and_cache.reference):
        cache = MlaCache(
            torch.zeros(3, BLOCK, RANK, dtype=dtype, device=GPU),
            torch.zeros(3, BLOCK, TURNED, dtype=torch.bfloat16, device=GPU),
        )
        turned = q.clone()
        write(turned, latent, key, norm, 1e-6, angles.cos(), angles.sin(), cache, places)
        made.append((turned, cache.latents_BLR, cache.keys_BLK))
    for ours, wanted in zip(*made, strict=True):
        assert error(ours, wanted) < (0.02 if ours.dtype == E4M3 else 0.005)
        assert ours.float().isfinite().all()
        assert ours.float().any(-1).equal(wanted.float().any(-1)), "the places written to"


def mixer_of(format: str, kv_dtype: torch.dtype) -> PagedMla:
    weights = RandomWeights(MODEL, 1, torch.bfloat16, GPU)
    return PagedMla(weights, "layers.0.attention", MODEL, format, torch.bfloat16, kv_dtype, RankGroup())


def step(mixer: PagedMla, x_NC: Tensor, start: int, decode: bool = False) -> Tensor:
    """The next tokens of one sequence, whose blocks lie in reverse."""
    assert mixer.cache is not None
    count, blocks = len(x_NC), mixer.cache.latents_BLR.shape[0]
    positions_N = torch.arange(start, start + count, device=GPU)
    block_table_PM = torch.arange(blocks - 1, -1, -1, device=GPU, dtype=torch.int32)[None]
    cos_ND, sin_ND = rope_table(MODEL.rope, TURNED, positions_N)
    inputs = StepInputs(
        positions_N=positions_N,
        slot_mapping_N=block_table_PM[0, positions_N // BLOCK].long() * BLOCK + positions_N % BLOCK,
        slots_P=torch.zeros(1, dtype=torch.int64, device=GPU),
        cu_seqlens_P1=whole(0, count),
        seq_lens_P=whole(start + count),
        block_table_PM=block_table_PM,
        num_decodes=int(decode),
        max_query_len=count,
        max_seq_len=start + count,
        prefill_chunks=() if decode else ((start, count),),
        cos_ND=cos_ND,
        sin_ND=sin_ND,
    )
    return mixer(quantize_activation(x_NC, mixer.input_format), inputs)


@pytest.mark.parametrize(("format", "kv_dtype"), [("plain", torch.bfloat16), ("plain", E4M3), ("fp8_block", E4M3)])
def test_every_way_to_compute_a_chunk_gives_the_same(format: str, kv_dtype: torch.dtype) -> None:
    """In one piece by torch's attention; the rest of it expanded, absorbed, or a token at a time."""
    x_NC = normal(1200, MODEL.hidden)
    mixer = mixer_of(format, kv_dtype)
    mixer.allocate(20, BLOCK, 1, GPU)
    wanted = step(mixer, x_NC, 0)
    assert wanted.isfinite().all()
    most = 0.02 if format == "plain" else 0.04  # where the last product's input is rounded, small errors grow
    assert error(step(mixer, x_NC[700:], 700), wanted[700:]) < most, "expanded"
    assert error(step(mixer, x_NC[1100:], 1100), wanted[1100:]) < most, "absorbed"
    assert error(step(mixer, x_NC[1199:], 1199, decode=True), wanted[1199:]) < most, "generating"


def test_a_graph_replayed_with_other_lengths_gives_what_torch_gives() -> None:
    spans, heads = spans_of([(1, 500)] * 8, longest=4096), 128
    cache = cache_of(spans, torch.bfloat16)
    q_latent, q_rope = normal(8, heads, RANK), normal(8, heads, TURNED)
    for _ in range(2):
        mla_attention(q_latent, q_rope, cache, spans, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_attention(q_latent, q_rope, cache, spans, SCALE)
    for lengths in ((512, 1, 64, 65, 300, 0, 0, 0), (1, 2, 3, 4, 5, 6, 7, 500)):
        spans.seq_lens_P.copy_(whole(*lengths))
        graph.replay()
        wanted = mla_attention.reference(q_latent.float(), q_rope.float(), cache, spans, SCALE)
        assert error(out, wanted) < 0.01
