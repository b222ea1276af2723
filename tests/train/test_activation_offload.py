"""Activation offload is bit-exact and bounds the activations on the device."""

import gc
from functools import partial
from itertools import count
from weakref import WeakSet

import pytest
import torch
from nightly_cases import by_turns
from small_models import SMALL_MODELS

from llmb.models.architectures import build_model
from llmb.ops.quant.delayed_scaling import DelayedScaling
from llmb.train import activation_offload as activation_offload
from llmb.train.activation_offload import CopyStream, OffloadedActivations, offload_activations
from llmb.train.parallelize import apply_recompute
from llmb.train.precision import compute_in_bf16, compute_in_fp8

CPU = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch) -> list[tuple]:
    """Record copies to and from the host in order, with a number for each layer's activations."""
    copied: list[tuple] = []
    numbers = count()
    copy_out, prefetch = OffloadedActivations._copy_out, OffloadedActivations.prefetch

    def counted_copy_out(saved: OffloadedActivations, tensor: torch.Tensor, size: int) -> None:
        if not saved._on_host:
            saved.number = next(numbers)
        copied.append(("out", saved.number))
        copy_out(saved, tensor, size)

    def counted_prefetch(saved: OffloadedActivations) -> None:
        copied.extend([("in", saved.number) for tensor in saved._on_device if tensor is None])
        prefetch(saved)

    monkeypatch.setattr(OffloadedActivations, "_copy_out", counted_copy_out)
    monkeypatch.setattr(OffloadedActivations, "prefetch", counted_prefetch)
    return copied


def gradients(name: str, dtype: str, offloaded: int, recomputed: int = 0) -> list[torch.Tensor]:
    """Return the losses and gradients of two consecutive micro-batches."""
    network = build_model(SMALL_MODELS[name])
    network.init_weights(1)
    if dtype == "bf16":
        compute_in_bf16(network)
    elif dtype == "fp8":
        compute_in_fp8(network, partial(DelayedScaling, device=CPU))
    apply_recompute(network, recomputed)
    offload_activations(network, first=recomputed, layers=offloaded)
    tokens = torch.randint(128, (2, 2, 33), generator=torch.Generator().manual_seed(2))
    losses = []
    for batch in tokens:
        losses.append(network(batch[:, :-1], batch[:, 1:]))
        losses[-1].backward()
    return [*losses, *(p.grad for p in network.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    by_turns([name for name, model in SMALL_MODELS.items() if model.layers > 2], ("fp32", "bf16", "fp8"), period=3),
)
def test_offload_is_bit_exact(name: str, dtype: str, copies: list) -> None:
    layers = SMALL_MODELS[name].layers
    plain = gradients(name, dtype, 0)
    assert not copies
    for offloaded, recomputed in ((1, 0), (2, 1), (2, 2), (layers, 0), (layers - 1, 1)):
        copies.clear()
        for actual, expected in zip(gradients(name, dtype, offloaded, recomputed), plain, strict=True):
            assert torch.equal(actual, expected)
        copied_layers = min(offloaded, layers - recomputed - 1)  # the network's last layer is not offloaded
        assert len(set(copies)) == 2 * 2 * copied_layers
        for saved in {number for _, number in copies}:
            assert copies.count(("out", saved)) == copies.count(("in", saved)) > 1


def test_at_most_two_offloaded_layers_on_device(monkeypatch) -> None:
    alive: WeakSet[OffloadedActivations] = WeakSet()
    peak = 0
    original = OffloadedActivations.__init__

    def created(saved: OffloadedActivations, *arguments) -> None:
        original(saved, *arguments)
        alive.add(saved)

    monkeypatch.setattr(OffloadedActivations, "__init__", created)
    pack, unpack = OffloadedActivations.pack, OffloadedActivations.unpack

    def count_on_device() -> None:
        nonlocal peak
        peak = max(peak, sum(any(t is not None for t in s._on_device) for s in alive))

    monkeypatch.setattr(OffloadedActivations, "pack", lambda s, t: (pack(s, t), count_on_device())[0])
    monkeypatch.setattr(OffloadedActivations, "unpack", lambda s, p: (unpack(s, p), count_on_device())[0])
    gradients("nemotron_h", "fp32", 4)
    assert peak == 2


@pytest.mark.slow
def test_host_buffers_are_reused(monkeypatch) -> None:
    streams: list[CopyStream] = []
    original = CopyStream.__init__
    monkeypatch.setattr(
        CopyStream, "__init__", lambda stream, device: (streams.append(stream), original(stream, device))[1]
    )
    sizes: list[int] = []
    allocate = CopyStream.allocate
    monkeypatch.setattr(CopyStream, "allocate", lambda stream, size: (sizes.append(size), allocate(stream, size))[1])
    gradients("llama", "fp32", 3)
    gc.collect()
    (stream,) = streams
    free = [buffer for buffers in stream._free_buffers.values() for buffer in buffers]
    assert len(free) == len(sizes) // 2  # shared by two micro-batches
    assert len({buffer.data_ptr() for buffer in free}) == len(free)


def test_shared_activations_are_copied_once_and_parameters_never() -> None:
    weight, shared, x = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)
    saved = OffloadedActivations(
        CopyStream(CPU), None, lambda _: None, lambda: {t.untyped_storage()._cdata for t in (weight, shared)}
    )
    assert saved.pack(weight) is weight
    assert saved.pack(shared) is shared
    expanded = torch.randn(1, 8).expand(100, 8)
    assert saved.pack(expanded) is expanded, "a copy would be larger than what it replaces"
    assert saved.pack(x) == saved.pack(x.detach()) == 0
    assert saved.pack(x.T) == 1, "another view of the same numbers"
    assert saved.pack(x[:, :4]) == 2, "a view with gaps"
    saved.end_forward()
    expected_x = x.clone()
    x.zero_()
    saved.free_device()
    saved.prefetch()
    for packed, expected in ((0, expected_x), (1, expected_x.T), (2, expected_x[:, :4])):
        assert torch.equal(saved.unpack(packed), expected)
    assert saved.unpack(1).stride() == x.T.stride()


def test_small_tensors_are_not_offloaded(monkeypatch, copies: list) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 2**20)
    gradients("llama", "fp32", 3)
    assert not copies


@pytest.mark.parametrize(
    ("changes", "dtype"),
    by_turns(({"offload_layers": 1}, {"recompute_layers": 1, "offload_layers": 1}, {"ga": 2}), ("bf16", "fp8")),
)
def test_run_with_offload_is_bit_exact(trained, changes: dict, dtype: str) -> None:
    shape = {"layers": 3, "dtype": dtype, "ga": 1} | {key: changes[key] for key in changes if key == "ga"}
    shape["gbs"] = 4 * shape["ga"]
    offloaded = trained(**shape | {"offload_layers": 2} | changes)
    assert offloaded.ended().status == "ok"
    assert offloaded.losses() == trained(**shape).losses()
