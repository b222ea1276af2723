"""Serving of Mamba2 on a GPU at the widths of Nemotron-H 8B: the mixer, a captured decode."""

from dataclasses import replace

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, no_synchronization, randn, relative_error
from recipe_models import recipe_model
from step_inputs import step_inputs
from torch import Tensor

from llmb.models.mamba2 import MambaMixer
from llmb.serve.layers.served_mamba import ServedMamba
from llmb.serve.rank_groups import RankGroup
from llmb.serve.weights.weight_source import RandomWeights

pytestmark = NEEDS_GPU

MODEL = recipe_model("pretrain_nemotronh", "8b", layers=1, pattern="M")
SLOTS = 70
TOKENS = 1024  # in a block of a KV cache, which this mixer does not read


def integers(numbers: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=GPU)


def mixer_of(dtype: torch.dtype) -> ServedMamba:
    weights = RandomWeights(MODEL, 4, torch.float32, GPU)
    mixer = ServedMamba(weights, "layers.0.mixer", MODEL, "plain", dtype, RankGroup())
    mixer.allocate(0, 16, SLOTS, GPU)
    return mixer


def trained_output(x_TC: Tensor) -> Tensor:
    """Return the output of the training mixer for a sequence, in fp32."""
    weights = RandomWeights(MODEL, 4, torch.float32, GPU)
    with torch.no_grad():
        with GPU:
            network = MambaMixer(MODEL)
        for name, parameter in network.named_parameters():
            parameter.copy_(weights.load(f"layers.0.mixer.{name}"))
        return network(x_TC[None])[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_mixer_matches_training(dtype: torch.dtype, tolerance: float) -> None:
    """Two sequences: chunked prefills, one decoding next to chunks of the second; no step synchronizes."""
    first, second = (randn(400, 4096, seed=seed, dtype=torch.float32) for seed in (1, 2))
    steps = [
        ([(0, 0, 300)], 0),
        ([(0, 300, 1), (1, 0, 200)], 1),
        ([(0, 301, 1), (1, 200, 198)], 1),
        ([(0, 302, 1), (1, 398, 1)], 2),
        ([(0, 303, 97), (1, 399, 1)], 0),
    ]
    mixer, texts = mixer_of(dtype), (first, second)
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for chunks, decodes in steps:
        x_NC = torch.cat([texts[sequences][start : start + count] for sequences, start, count in chunks]).to(dtype)
        sequences, counts = [x for x, _, _ in chunks], [count for *_, count in chunks]
        rows = [(7 - x, (0,), start, count) for x, start, count in chunks]
        inputs = step_inputs(rows, TOKENS, decodes=decodes, device=GPU)
        with no_synchronization():
            out_NC = mixer(x_NC, inputs)
        for x, rows_slice in zip(sequences, out_NC.split(counts), strict=True):
            outputs[x].append(rows_slice)
    for x_TC, actual in zip(texts, outputs, strict=True):
        assert relative_error(torch.cat(actual), trained_output(x_TC)) < tolerance


def test_captured_decode_reads_new_slots_positions_and_padding() -> None:
    """One graph of four rows, replayed with other slots, positions and lengths in the same tensors."""
    mixer, eager = mixer_of(torch.bfloat16), mixer_of(torch.bfloat16)
    x_NC = randn(4, 4096)
    static_inputs = step_inputs([(slot, (0,), 0, 1) for slot in range(3)], TOKENS, padding=1, device=GPU)
    mixer(x_NC, static_inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_NC = mixer(x_NC, static_inputs)
    for step, (slots, positions, lengths) in enumerate(
        [
            ([5, 6, 7, 5], [0, 0, 0, 0], [1, 1, 1, 0]),
            ([5, 6, 7, 8], [1, 1, 1, 0], [2, 2, 2, 1]),
            ([8, 7, 5, 6], [1, 2, 0, 0], [2, 3, 1, 0]),
        ]
    ):
        x_NC.copy_(randn(4, 4096, seed=step))
        new_inputs = replace(
            static_inputs,
            slots_P=integers(slots),
            positions_N=integers(positions),
            seq_lens_P=integers(lengths, torch.int32),
        )
        for name in ("slots_P", "positions_N", "seq_lens_P"):
            getattr(static_inputs, name).copy_(getattr(new_inputs, name))
        graph.replay()
        assert relative_error(out_NC, eager(x_NC, new_inputs)) < 5e-3
    assert mixer.state is not None
    assert eager.state is not None
    for x, y in zip(mixer.state, eager.state, strict=True):
        assert relative_error(x[5:], y[5:]) < 5e-3
