"""MLA on a GPU at DeepSeek-V3's widths: the serving mixer, and a replayed CUDA graph."""

from dataclasses import replace

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, randn, relative_error
from recipe_models import recipe_model
from step_inputs import step_inputs
from torch import Tensor

from llmb.models.blocks import rope_table
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.mla_attention import MlaCache, mla_attention
from llmb.ops.quant.activation_quant import E4M3, quantize_activation
from llmb.serve.layers.served_mla import PagedMla
from llmb.serve.rank_groups import RankGroup
from llmb.serve.weights.weight_source import RandomWeights

pytestmark = NEEDS_GPU

MODEL = recipe_model("inference_deepseek-r1", "671b", layers=1)
RANK, ROPE, BLOCK, SCALE = 512, 64, 64, 192**-0.5


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=GPU)


def mixer_of(format: str, kv_dtype: torch.dtype) -> PagedMla:
    weights = RandomWeights(MODEL, 1, torch.bfloat16, GPU)
    return PagedMla(weights, "layers.0.attention", MODEL, format, torch.bfloat16, kv_dtype, RankGroup())


def step(mixer: PagedMla, x_NC: Tensor, start: int, decode: bool = False) -> Tensor:
    """Run the next tokens of one sequence, whose blocks are in reverse order."""
    assert mixer.cache is not None
    blocks = mixer.cache.latents_BLR.shape[0]
    rows = [(0, range(blocks - 1, -1, -1), start, len(x_NC))]
    inputs = step_inputs(rows, BLOCK, decodes=int(decode), device=GPU)
    cos_ND, sin_ND = rope_table(MODEL.rope, ROPE, inputs.positions_N)
    inputs = replace(inputs, cos_ND=cos_ND, sin_ND=sin_ND)
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
    metadata = AttentionMetadata(
        cu_seqlens_P1=integers(*range(9)),
        seq_lens_P=integers(*[500] * 8),
        block_table_PM=torch.randperm(64, device=GPU).view(8, 8).int(),
        num_decodes=0,
        max_query_len=1,
        max_seq_len=4096,
    )
    cache = MlaCache(randn(64, BLOCK, RANK), randn(64, BLOCK, ROPE, seed=1))
    q_latent, q_rope = randn(8, 128, RANK, seed=2), randn(8, 128, ROPE, seed=3)
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
