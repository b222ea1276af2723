"""MLA on a GPU at DeepSeek-V3's widths: kernels, the serving mixer, and a replayed CUDA graph."""

import pytest
import torch
from small_models import deepseek_model
from torch import Tensor

from llmb.config.spec import MlaConfig, MoEConfig, RopeConfig
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
RANK, ROPE, BLOCK, SCALE = 512, 64, 64, 192**-0.5
MODEL = deepseek_model(
    name="of-true-width",
    layers=1,
    hidden=7168,
    ffn=256,
    heads=128,
    kv_heads=128,
    head_dim=128,
    vocab=1024,
    mla=MlaConfig(q_rank=1536, kv_rank=RANK, nope_dim=128, rope_dim=ROPE, value_dim=128),
    rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=4096, mscale_all_dim=1.0),
    experts=MoEConfig(count=8, top_k=3, ffn=128, shared=1, dense_layers=1),
)


def randn(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator(GPU).manual_seed(sum(sizes)), device=GPU).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=GPU)


def metadata_of(sequences: list[tuple[int, int]], max_seq_len: int | None = None) -> AttentionMetadata:
    """Metadata of sequences of (tokens, length); padding has one token and length 0."""
    max_blocks = max(-(-length // BLOCK) for _, length in sequences)
    table = torch.randperm(len(sequences) * max_blocks, generator=torch.Generator(GPU).manual_seed(1), device=GPU)
    return AttentionMetadata(
        cu_seqlens_P1=integers(0, *(count for count, _ in sequences)).cumsum(0, dtype=torch.int32),
        seq_lens_P=integers(*(length for _, length in sequences)),
        block_table_PM=table.view(len(sequences), max_blocks).int(),
        num_decodes=0,
        max_query_len=max(count for count, _ in sequences),
        max_seq_len=max_seq_len or max(length for _, length in sequences),
    )


def cache_of(metadata: AttentionMetadata, dtype: torch.dtype) -> MlaCache:
    blocks = metadata.block_table_PM.numel()
    return MlaCache(randn(blocks, BLOCK, RANK).to(dtype), randn(blocks, BLOCK, ROPE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize(
    ("sequences", "max_seq_len"),
    [
        ([(1, 1000)], 1000),
        ([(1, 1000)], 32768),  # as in a CUDA graph
        ([(1, 100 + 37 * number) for number in range(64)] + [(1, 0)] * 3, None),
        ([(1, 4096)] * 300, None),
        ([(5, 700), (1, 64), (130, 1130)], None),
    ],
)
def test_mla_attention_matches_the_reference(
    dtype: torch.dtype, heads: int, sequences: list[tuple[int, int]], max_seq_len: int | None
) -> None:
    metadata = metadata_of(sequences, max_seq_len)
    cache, tokens = cache_of(metadata, dtype), int(metadata.cu_seqlens_P1[-1])
    q_latent, q_rope = randn(heads, tokens, RANK).transpose(0, 1), randn(tokens, heads, 192)[..., 128:]
    expected = mla_attention.reference(q_latent.float(), q_rope.float(), cache, metadata, SCALE)
    assert relative_error(mla_attention(q_latent, q_rope, cache, metadata, SCALE), expected) < 0.01


@pytest.mark.parametrize(("count", "length"), [(256, 300), (1000, 5000), (77, 8192)])
def test_mla_prefill_attention_matches_the_reference(count: int, length: int) -> None:
    q, kv, keys = randn(count, 16, 192), randn(length, 16, 256), randn(length, 64)
    expected = mla_prefill_attention.reference(q.float(), kv.float(), keys.float(), SCALE)
    assert relative_error(mla_prefill_attention(q, kv, keys, SCALE), expected) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_mla_rope_and_cache_matches_the_reference(dtype: torch.dtype) -> None:
    tokens, heads = 37, 128
    q, down, norm = randn(tokens, heads, 192), randn(tokens, 1536 + RANK + ROPE), randn(RANK) * 100
    _, latent, key = down.split((1536, RANK, ROPE), dim=-1)
    angles = torch.rand(tokens, ROPE // 2, device=GPU) * 1e4
    slots = torch.randperm(3 * BLOCK, device=GPU)[:tokens]
    slots[5] = -1
    results = []
    for write in (mla_rope_and_cache, mla_rope_and_cache.reference):
        cache = MlaCache(
            torch.zeros(3, BLOCK, RANK, dtype=dtype, device=GPU),
            torch.zeros(3, BLOCK, ROPE, dtype=torch.bfloat16, device=GPU),
        )
        q_rope = q.clone()
        write(q_rope, latent, key, norm, 1e-6, angles.cos(), angles.sin(), cache, slots)
        results.append((q_rope, cache.latents_BLR, cache.keys_BLK))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < (0.02 if actual.dtype == E4M3 else 0.005)
        assert actual.float().isfinite().all()
        assert actual.float().any(-1).equal(expected.float().any(-1)), "the slots written to"


def mixer_of(format: str, kv_dtype: torch.dtype) -> PagedMla:
    weights = RandomWeights(MODEL, 1, torch.bfloat16, GPU)
    return PagedMla(weights, "layers.0.attention", MODEL, format, torch.bfloat16, kv_dtype, RankGroup())


def step(mixer: PagedMla, x_NC: Tensor, start: int, decode: bool = False) -> Tensor:
    """Run the next tokens of one sequence, whose blocks are in reverse order."""
    assert mixer.cache is not None
    count, blocks = len(x_NC), mixer.cache.latents_BLR.shape[0]
    positions_N = torch.arange(start, start + count, device=GPU)
    block_table_PM = torch.arange(blocks - 1, -1, -1, device=GPU, dtype=torch.int32)[None]
    cos_ND, sin_ND = rope_table(MODEL.rope, ROPE, positions_N)
    inputs = StepInputs(
        positions_N=positions_N,
        slot_mapping_N=block_table_PM[0, positions_N // BLOCK].long() * BLOCK + positions_N % BLOCK,
        slots_P=torch.zeros(1, dtype=torch.int64, device=GPU),
        cu_seqlens_P1=integers(0, count),
        seq_lens_P=integers(start + count),
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
def test_expanded_absorbed_and_decode_paths_agree(format: str, kv_dtype: torch.dtype) -> None:
    """The whole sequence by torch's attention against its end expanded, absorbed, or decoded."""
    x_NC = randn(1200, MODEL.hidden)
    mixer = mixer_of(format, kv_dtype)
    mixer.allocate(20, BLOCK, 1, GPU)
    expected = step(mixer, x_NC, 0)
    assert expected.isfinite().all()
    bound = 0.02 if format == "plain" else 0.04  # the last GEMM's input is rounded, which amplifies small errors
    assert relative_error(step(mixer, x_NC[700:], 700), expected[700:]) < bound, "expanded"
    assert relative_error(step(mixer, x_NC[1100:], 1100), expected[1100:]) < bound, "absorbed"
    assert relative_error(step(mixer, x_NC[1199:], 1199, decode=True), expected[1199:]) < bound, "decode"


def test_replayed_graph_reads_new_lengths() -> None:
    metadata, heads = metadata_of([(1, 500)] * 8, max_seq_len=4096), 128
    cache = cache_of(metadata, torch.bfloat16)
    q_latent, q_rope = randn(8, heads, RANK), randn(8, heads, ROPE)
    for _ in range(2):
        mla_attention(q_latent, q_rope, cache, metadata, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_attention(q_latent, q_rope, cache, metadata, SCALE)
    for lengths in ((512, 1, 64, 65, 300, 0, 0, 0), (1, 2, 3, 4, 5, 6, 7, 500)):
        metadata.seq_lens_P.copy_(integers(*lengths))
        graph.replay()
        expected = mla_attention.reference(q_latent.float(), q_rope.float(), cache, metadata, SCALE)
        assert relative_error(out, expected) < 0.01
