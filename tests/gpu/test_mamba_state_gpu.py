"""Mamba with kept states on a real GPU at the widths of Nemotron-H 8B: compiled kernels, the mixer, a captured decode.

No Triton kernel is imported here at the top: where there is no GPU, tests/kernels chooses the interpreter first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.config.spec import MambaConfig, Model
from llmb.models.mamba2 import MambaMixer
from llmb.ops.mamba.selective_state_update import MambaState, MambaWeights, StateRows, selective_state_update
from llmb.ops.mamba.ssd import ssd, ssd_with_state
from llmb.serve.layers.served_mamba import ServedMamba
from llmb.serve.rank_groups import RankGroup
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)
MODEL = Model(
    name="8b of 1 layer",
    architecture="nemotron_h",
    layers=1,
    hidden=4096,
    ffn=21504,
    gated=False,
    activation="squared_relu",
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=1000,
    rope=None,
    pattern="M",
    mamba=MambaConfig(heads=128, head_dim=64, groups=8, state=128, chunk=128),
)
HEADS, WIDTH, GROUPS, STATE, CHANNELS = 128, 64, 8, 128, 10240
SLOTS = 70


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU)


def whole(numbers: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=GPU)


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def drawn(dtype: torch.dtype) -> tuple[MambaWeights, MambaState]:
    rates = 1 + 15 * torch.rand(HEADS, generator=torch.Generator(GPU).manual_seed(3), device=GPU)
    weights = MambaWeights(
        normal(CHANNELS, 1, 4) / 2, normal(CHANNELS, seed=1), normal(HEADS) - 4, -rates, normal(HEADS, seed=2), 1e-3
    )
    return weights, MambaState(normal(SLOTS, 3, CHANNELS).to(dtype), normal(SLOTS, HEADS, WIDTH, STATE))


def rows_of_a_batch() -> StateRows:
    """64, in slots that are not in order; one begins and three are of no sequence, with slots that are not there."""
    positions, lengths = [100 + row for row in range(64)], [101 + row for row in range(64)]
    positions[5], lengths[5] = 0, 1
    lengths[61:] = [0, 0, 0]
    slots = [(row * 37) % SLOTS for row in range(61)] + [-1, SLOTS, 10**9]
    return StateRows(whole(slots), whole(positions), whole(lengths, torch.int32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_compiled_kernels_give_what_torch_gives(dtype: torch.dtype, tolerance: float) -> None:
    weights, state = drawn(dtype)
    there = MambaState(*(one.clone() for one in state))
    mixed = normal(64, GROUPS, 2320).to(dtype)[..., 1024:]  # a slice, as beside the gate
    rows = rows_of_a_batch()
    wanted = selective_state_update.reference(mixed, weights, state, rows)
    ours = selective_state_update(mixed, weights, there, rows)
    assert ours.dtype == dtype
    assert not ours[61:].any()
    assert error(ours, wanted) < tolerance
    assert torch.equal(there.conv_state_SKC, state.conv_state_SKC)
    assert error(there.ssm_state_SHPN, state.ssm_state_SHPN) < tolerance
    unused = sorted(set(range(SLOTS)) - set(rows.state_indices_R[:61].tolist()))
    assert torch.equal(there.ssm_state_SHPN[unused], drawn(dtype)[1].ssm_state_SHPN[unused])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 1e-2)])
def test_pieces_of_a_scan_give_what_it_gives_whole(dtype: torch.dtype, tolerance: float) -> None:
    weights, _ = drawn(dtype)
    x, b, c = normal(1500, HEADS, WIDTH), normal(1500, GROUPS, STATE) / 4, normal(1500, GROUPS, STATE, seed=1) / 4
    dt = F.softplus(normal(1500, HEADS) - 4)
    x, b, c = (one.to(dtype) for one in (x, b, c))
    exact = ssd.reference(
        x[None].double(), dt[None].double(), weights.a_H.double(), b[None].double(), c[None].double(),
        weights.d_H.double(), 64,
    )[0]  # fmt: skip
    state, pieces = torch.zeros(HEADS, WIDTH, STATE, device=GPU), []
    for part in (slice(0, 700), slice(700, 703), slice(703, 1500)):
        y, state = ssd_with_state(state, x[part], dt[part], weights.a_H, b[part], c[part], weights.d_H, 128)
        pieces.append(y)
    assert error(torch.cat(pieces), exact) < tolerance


def inputs_of(slots: list[int], starts: list[int], counts: list[int], decodes: int, padding: int = 0) -> StepInputs:
    """As far as this mixer reads them; padding comes after the decodes, which then is all there is."""
    positions = [at for start, count in zip(starts, counts, strict=True) for at in range(start, start + count)]
    none = torch.empty(0, device=GPU)
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    return StepInputs(
        positions_N=whole(positions + [0] * padding),
        slot_mapping_N=none,
        slots_P=whole(slots + [0] * padding),
        cu_seqlens_P1=none,
        seq_lens_P=whole(lengths + [0] * padding, torch.int32),
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


def of_training(x_TC: Tensor) -> Tensor:
    """What the mixer of training makes of a sequence, in fp32."""
    weights = RandomWeights(MODEL, 4, torch.float32, GPU)
    with torch.no_grad():
        with GPU:
            network = MambaMixer(MODEL)
        for name, parameter in network.named_parameters():
            parameter.copy_(weights.load(f"layers.0.mixer.{name}"))
        return network(x_TC[None])[0]


@contextmanager
def never_waiting() -> Iterator[None]:
    """Whatever would make the host wait for the device fails."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_the_mixer_gives_what_training_gives(dtype: torch.dtype, tolerance: float) -> None:
    """Two sequences: prompts in chunks, the one decoding beside the other's chunks; no step waits for the device."""
    first, second = normal(400, 4096, seed=1), normal(400, 4096, seed=2)
    steps = [
        ([(0, 0, 300)], 0),
        ([(0, 300, 1), (1, 0, 200)], 1),
        ([(0, 301, 1), (1, 200, 198)], 1),
        ([(0, 302, 1), (1, 398, 1)], 2),
        ([(0, 303, 97), (1, 399, 1)], 0),
    ]
    mixer, texts = mixer_of(dtype), (first, second)
    made: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pieces, decodes in steps:
        x_NC = torch.cat([texts[who][start : start + count] for who, start, count in pieces]).to(dtype)
        who, starts, counts = (list(one) for one in zip(*pieces, strict=True))
        inputs = inputs_of([7 - one for one in who], starts, counts, decodes)
        with never_waiting():
            out_NC = mixer(x_NC, inputs)
        for one, part in zip(who, out_NC.split(counts), strict=True):
            made[one].append(part)
    for x_TC, ours in zip(texts, made, strict=True):
        assert error(torch.cat(ours), of_training(x_TC)) < tolerance


def test_a_captured_decode_begins_goes_on_and_pads_as_its_inputs_say() -> None:
    """One graph of four rows, replayed with other slots, positions and lengths in the same tensors."""
    mixer, free = mixer_of(torch.bfloat16), mixer_of(torch.bfloat16)
    x_NC = normal(4, 4096).bfloat16()
    held = inputs_of([0, 1, 2], [0, 0, 0], [1, 1, 1], decodes=3, padding=1)
    mixer(x_NC, held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_NC = mixer(x_NC, held)
    for step, (slots, positions, lengths) in enumerate(
        [
            ([5, 6, 7, 5], [0, 0, 0, 0], [1, 1, 1, 0]),
            ([5, 6, 7, 8], [1, 1, 1, 0], [2, 2, 2, 1]),
            ([8, 7, 5, 6], [1, 2, 0, 0], [2, 3, 1, 0]),
        ]
    ):
        x_NC.copy_(normal(4, 4096, seed=step))
        live = replace(held, slots_P=whole(slots), positions_N=whole(positions), seq_lens_P=whole(lengths, torch.int32))
        for name in ("slots_P", "positions_N", "seq_lens_P"):
            getattr(held, name).copy_(getattr(live, name))
        graph.replay()
        assert error(out_NC, free(x_NC, live)) < 5e-3
    assert mixer.state is not None
    assert free.state is not None
    for one, other in zip(mixer.state, free.state, strict=True):
        assert error(one[5:], other[5:]) < 5e-3


def seconds_of(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20e3


def test_the_kernels_are_faster_than_plain_torch() -> None:
    """64 sequences; the states alone are read and written at the rate that is printed."""
    weights, state = drawn(torch.bfloat16)
    mixed, rows = normal(64, GROUPS, 1296).bfloat16(), rows_of_a_batch()
    fast = seconds_of(lambda: selective_state_update(mixed, weights, state, rows))
    plain = seconds_of(lambda: selective_state_update.reference(mixed, weights, state, rows))
    rate = 2 * 61 * state.ssm_state_SHPN[0].nbytes / fast
    print(f"Mamba step of 64: kernels {fast:.6f} s ({rate / 1e12:.2f} TB/s of state), plain torch {plain:.6f} s")
    assert fast < plain / 2
