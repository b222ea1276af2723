"""Offloading changes where activations wait, and no bit of the result."""

import gc
from itertools import count
from weakref import WeakSet

import pytest
import torch
from small_models import SMALL_MODELS

from llmb.models.architectures import ARCHITECTURES, build_model
from llmb.train import activation_offload as offloading
from llmb.train.activation_offload import Lane, Stash, offload
from llmb.train.parallelize import recompute
from llmb.train.precision import compute_in_bf16, compute_in_fp8

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch) -> None:
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 1)


@pytest.fixture
def copies(monkeypatch) -> list[tuple]:
    """What was copied out and in, in order, with a number for each stash."""
    made: list[tuple] = []
    numbers = count()
    copy_out, fetch = Stash._copy_out, Stash.fetch

    def counted_copy_out(stash: Stash, tensor: torch.Tensor, size: int) -> None:
        if not stash._on_host:
            stash.number = next(numbers)
        made.append(("out", stash.number))
        copy_out(stash, tensor, size)

    def counted_fetch(stash: Stash) -> None:
        made.extend([("in", stash.number) for tensor in stash._on_device if tensor is None])
        fetch(stash)

    monkeypatch.setattr(Stash, "_copy_out", counted_copy_out)
    monkeypatch.setattr(Stash, "fetch", counted_fetch)
    return made


def gradients(name: str, dtype: str, offloaded: int, recomputed: int = 0) -> list[torch.Tensor]:
    """The losses and gradients of two micro-batches, one after the other."""
    network = build_model(SMALL_MODELS[name])
    network.init_weights(1)
    if dtype == "bf16":
        compute_in_bf16(network)
    elif dtype == "fp8":
        compute_in_fp8(network, CPU)
    recompute(network, recomputed)
    offload(network, first=recomputed, layers=offloaded)
    tokens = torch.randint(128, (2, 2, 33), generator=torch.Generator().manual_seed(2))
    losses = []
    for batch in tokens:
        losses.append(network(batch[:, :-1], batch[:, 1:]))
        losses[-1].backward()
    return [*losses, *(p.grad for p in network.parameters())]


def test_every_architecture_has_a_small_model() -> None:
    assert SMALL_MODELS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_no_bit_changes(name: str, dtype: str, copies: list) -> None:
    layers = SMALL_MODELS[name].layers
    plain = gradients(name, dtype, 0)
    assert not copies
    for offloaded, recomputed in ((1, 0), (2, 1), (2, 2), (layers, 0), (layers - 1, 1)):
        copies.clear()
        for ours, theirs in zip(gradients(name, dtype, offloaded, recomputed), plain, strict=True):
            assert torch.equal(ours, theirs)
        moved = min(offloaded, layers - recomputed - 1)  # the network's last layer stays
        assert len(set(copies)) == 2 * 2 * moved
        for stash in {number for _, number in copies}:
            assert copies.count(("out", stash)) == copies.count(("in", stash)) > 1


def test_only_two_layers_are_on_the_device_at_once(monkeypatch) -> None:
    alive: WeakSet[Stash] = WeakSet()
    most = 0
    original = Stash.__init__

    def born(stash: Stash, *arguments) -> None:
        original(stash, *arguments)
        alive.add(stash)

    monkeypatch.setattr(Stash, "__init__", born)
    pack, unpack = Stash.pack, Stash.unpack

    def look() -> None:
        nonlocal most
        most = max(most, sum(any(t is not None for t in s._on_device) for s in alive))

    monkeypatch.setattr(Stash, "pack", lambda s, t: (pack(s, t), look())[0])
    monkeypatch.setattr(Stash, "unpack", lambda s, p: (unpack(s, p), look())[0])
    gradients("nemotron_h", "fp32", 4)
    assert most == 2


def test_buffers_are_used_again_and_given_back(monkeypatch) -> None:
    lanes: list[Lane] = []
    original = Lane.__init__
    monkeypatch.setattr(Lane, "__init__", lambda lane, device: (lanes.append(lane), original(lane, device))[1])
    taken: list[int] = []
    take = Lane.take
    monkeypatch.setattr(Lane, "take", lambda lane, size: (taken.append(size), take(lane, size))[1])
    gradients("llama", "fp32", 3)
    gc.collect()
    (lane,) = lanes
    free = [buffer for buffers in lane._free.values() for buffer in buffers]
    assert len(free) == len(taken) // 2  # two micro-batches used the same
    assert len({buffer.data_ptr() for buffer in free}) == len(free)


def test_what_is_saved_twice_is_copied_once_and_parameters_never() -> None:
    weight, shared, x = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)
    stash = Stash(Lane(CPU), None, lambda _: None, lambda: {t.untyped_storage()._cdata for t in (weight, shared)})
    assert stash.pack(weight) is weight
    assert stash.pack(shared) is shared
    expanded = torch.randn(1, 8).expand(100, 8)
    assert stash.pack(expanded) is expanded, "a copy would be larger than what it replaces"
    assert stash.pack(x) == stash.pack(x.detach()) == 0
    assert stash.pack(x.T) == 1, "another view of the same numbers"
    assert stash.pack(x[:, :4]) == 2, "a view with gaps"
    stash.close()
    kept = x.clone()
    x.zero_()
    stash.leave()
    stash.fetch()
    for packed, wanted in ((0, kept), (1, kept.T), (2, kept[:, :4])):
        assert torch.equal(stash.unpack(packed), wanted)
    assert stash.unpack(1).stride() == x.T.stride()


def test_small_tensors_stay(monkeypatch, copies: list) -> None:
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 2**20)
    gradients("llama", "fp32", 3)
    assert not copies


@pytest.mark.parametrize("changes", [{"offload_layers": 1}, {"recompute_layers": 1, "offload_layers": 1}, {"ga": 2}])
def test_a_run_with_offload_equals_one_without(trained, changes: dict) -> None:
    shape = {"layers": 3, "dtype": "bf16", "ga": 1} | {key: changes[key] for key in changes if key == "ga"}
    shape["gbs"] = 4 * shape["ga"]
    offloaded = trained(**shape | {"offload_layers": 2} | changes)
    assert offloaded.ended().status == "ok"
    assert offloaded.losses() == trained(**shape).losses()


def test_more_layers_than_are_left_are_refused(trained) -> None:
    done = trained(recompute_layers=1, offload_layers=2)
    assert done.code == 1
    assert done.ended().reason == "offload_layers=2: 1 of the 2 layers are not recomputed, so 0 to 1"
