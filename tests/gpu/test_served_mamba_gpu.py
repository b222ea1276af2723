"""Serving of Mamba2 on a GPU at the widths of Nemotron-H 8B: kernels, the mixer, a captured decode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_models import nemotron_h_model
from torch import Tensor

from llmb.config.spec import MambaConfig
from llmb.models.mamba2 import MambaMixer
from llmb.ops.mamba.selective_state_update import MambaState, MambaWeights, StateRows, selective_state_update
from llmb.ops.mamba.ssd import ssd, ssd_with_state
from llmb.serve.layers.served_mamba import ServedMamba
from llmb.serve.rank_groups import RankGroup
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)
MODEL = nemotron_h_model(
    name="8b of 1 layer",
    hidden=4096,
    ffn=21504,
    heads=32,
    kv_heads=8,
    vocab=1000,
    pattern="M",
    mamba=MambaConfig(heads=128, head_dim=64, groups=8, state=128, chunk=128),
)
HEADS, WIDTH, GROUPS, STATE, CHANNELS = 128, 64, 8, 128, 10240
SLOTS = 70


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU)


def integers(numbers: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=GPU)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact.double()).norm() / exact.double().norm()).item()


def random_weights_and_state(dtype: torch.dtype) -> tuple[MambaWeights, MambaState]:
    rates = 1 + 15 * torch.rand(HEADS, generator=torch.Generator(GPU).manual_seed(3), device=GPU)
    weights = MambaWeights(
        randn(CHANNELS, 1, 4) / 2, randn(CHANNELS, seed=1), randn(HEADS) - 4, -rates, randn(HEADS, seed=2), 1e-3
    )
    return weights, MambaState(randn(SLOTS, 3, CHANNELS).to(dtype), randn(SLOTS, HEADS, WIDTH, STATE))


def rows_of_a_batch() -> StateRows:
    """64 rows in shuffled slots: one starts a sequence, three are padding with invalid slots."""
    positions, lengths = [100 + row for row in range(64)], [101 + row for row in range(64)]
    positions[5], lengths[5] = 0, 1
    lengths[61:] = [0, 0, 0]
    slots = [(row * 37) % SLOTS for row in range(61)] + [-1, SLOTS, 10**9]
    return StateRows(integers(slots), integers(positions), integers(lengths, torch.int32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_selective_state_update_matches_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    weights, state = random_weights_and_state(dtype)
    state_copy = MambaState(*(x.clone() for x in state))
    qkv_conv = randn(64, GROUPS, 2320).to(dtype)[..., 1024:]  # a slice, as next to the gate
    rows = rows_of_a_batch()
    expected = selective_state_update.reference(qkv_conv, weights, state, rows)
    actual = selective_state_update(qkv_conv, weights, state_copy, rows)
    assert actual.dtype == dtype
    assert not actual[61:].any()
    assert relative_error(actual, expected) < tolerance
    assert torch.equal(state_copy.conv_state_SKC, state.conv_state_SKC)
    assert relative_error(state_copy.ssm_state_SHPN, state.ssm_state_SHPN) < tolerance
    unused = sorted(set(range(SLOTS)) - set(rows.state_indices_R[:61].tolist()))
    assert torch.equal(state_copy.ssm_state_SHPN[unused], random_weights_and_state(dtype)[1].ssm_state_SHPN[unused])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 1e-2)])
def test_scan_in_chunks_equals_the_whole_scan(dtype: torch.dtype, tolerance: float) -> None:
    weights, _ = random_weights_and_state(dtype)
    x, b, c = randn(1500, HEADS, WIDTH), randn(1500, GROUPS, STATE) / 4, randn(1500, GROUPS, STATE, seed=1) / 4
    dt = F.softplus(randn(1500, HEADS) - 4)
    x, b, c = (x.to(dtype) for x in (x, b, c))
    exact = ssd.reference(
        x[None].double(), dt[None].double(), weights.a_H.double(), b[None].double(), c[None].double(),
        weights.d_H.double(), 64,
    )[0]  # fmt: skip
    state, chunks = torch.zeros(HEADS, WIDTH, STATE, device=GPU), []
    for rows_slice in (slice(0, 700), slice(700, 703), slice(703, 1500)):
        y, state = ssd_with_state(
            state, x[rows_slice], dt[rows_slice], weights.a_H, b[rows_slice], c[rows_slice], weights.d_H, 128
        )
        chunks.append(y)
    assert relative_error(torch.cat(chunks), exact) < tolerance


def step_inputs(slots: list[int], starts: list[int], counts: list[int], decodes: int, padding: int = 0) -> StepInputs:
    """Inputs of a step as far as this mixer reads them; padding follows decodes, without prefills."""
    positions = [at for start, count in zip(starts, counts, strict=True) for at in range(start, start + count)]
    none = torch.empty(0, device=GPU)
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    return StepInputs(
        positions_N=integers(positions + [0] * padding),
        slot_mapping_N=none,
        slots_P=integers(slots + [0] * padding),
        cu_seqlens_P1=none,
        seq_lens_P=integers(lengths + [0] * padding, torch.int32),
        block_table_PM=none,
        num_decodes=decodes + padding,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        prefill_chunks=tuple(zip(starts[decodes:], counts[decodes:], strict=True)),
    )


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


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Fail on any synchronization of host and device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_mixer_matches_training(dtype: torch.dtype, tolerance: float) -> None:
    """Two sequences: chunked prefills, one decoding next to chunks of the second; no step synchronizes."""
    first, second = randn(400, 4096, seed=1), randn(400, 4096, seed=2)
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
        sequences, starts, counts = (list(x) for x in zip(*chunks, strict=True))
        inputs = step_inputs([7 - x for x in sequences], starts, counts, decodes)
        with no_synchronization():
            out_NC = mixer(x_NC, inputs)
        for x, rows_slice in zip(sequences, out_NC.split(counts), strict=True):
            outputs[x].append(rows_slice)
    for x_TC, actual in zip(texts, outputs, strict=True):
        assert relative_error(torch.cat(actual), trained_output(x_TC)) < tolerance


def test_captured_decode_reads_new_slots_positions_and_padding() -> None:
    """One graph of four rows, replayed with other slots, positions and lengths in the same tensors."""
    mixer, eager = mixer_of(torch.bfloat16), mixer_of(torch.bfloat16)
    x_NC = randn(4, 4096).bfloat16()
    static_inputs = step_inputs([0, 1, 2], [0, 0, 0], [1, 1, 1], decodes=3, padding=1)
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


def measure_seconds(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20e3


@pytest.mark.exclusive  # measures time
def test_selective_state_update_is_faster_than_plain_torch() -> None:
    """64 sequences; prints the bandwidth of reading and writing their states."""
    weights, state = random_weights_and_state(torch.bfloat16)
    qkv_conv, rows = randn(64, GROUPS, 1296).bfloat16(), rows_of_a_batch()
    fast = measure_seconds(lambda: selective_state_update(qkv_conv, weights, state, rows))
    plain = measure_seconds(lambda: selective_state_update.reference(qkv_conv, weights, state, rows))
    rate = 2 * 61 * state.ssm_state_SHPN[0].nbytes / fast
    print(f"Mamba step of 64: kernels {fast:.6f} s ({rate / 1e12:.2f} TB/s of state), plain torch {plain:.6f} s")
    assert fast < plain / 2
