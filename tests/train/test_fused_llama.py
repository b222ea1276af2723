"""Layers computed by hand, in one step of autograd: what the plain layers compute."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_config import CONFIG, changed
from torch import Tensor

from llmb.config.spec import Model, RunConfig
from llmb.models.architectures import Network
from llmb.ops.gemm.matmul import multiply
from llmb.train.fused_llama import FusedLayer, begin_step, scales_of
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallelize import optimizer_of, ready_parts
from llmb.train.train_checkpoint import Checkpoints

ONE = Mesh(0, 1, torch.device("cpu"))
MODEL = Model(
    name="small", architecture="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=128
)


def config_of(gpu: str, dtype: str = "bf16", **changes: object) -> RunConfig:
    few = {"mbs": 2, "gbs": 4, "ga": 2, "seqlen": 32, "lr": 1e-3}
    config = changed(CONFIG, dtype=dtype, **(few | changes))
    return replace(config, model=MODEL, machine=replace(config.machine, gpu=gpu))


def part_of(config: RunConfig) -> Network:
    (part,) = ready_parts(config, config.workload, ONE)
    begin_step(part)
    return part


def add_gradients(part: Network, micro_batches: int, sequences: int = 2) -> list[float]:
    losses = []
    for micro in range(micro_batches):
        tokens = torch.randint(128, (sequences, 33), generator=torch.Generator().manual_seed(micro))
        loss = part(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    return losses


def both(dtype: str, **changes: object) -> tuple[Network, Network]:
    """Layer by layer and block by block, and by hand."""
    plain, fused = (part_of(config_of(gpu, dtype, **changes)) for gpu in ("cpu", "h200"))
    assert not any(isinstance(layer, FusedLayer) for layer in plain.layers)
    assert all(isinstance(layer, FusedLayer) for layer in fused.layers)
    return plain, fused


def errors(found: Network, wanted: Network) -> dict[str, float]:
    expected = {name: one.grad for name, one in wanted.named_parameters()}

    def error(ours: Tensor, theirs: Tensor) -> float:
        return float((ours.double() - theirs.double()).norm() / theirs.double().norm())

    return {name: error(one.grad, expected[name]) for name, one in found.named_parameters()}


@pytest.mark.parametrize(("ga", "micro_batches"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("changes", [{}, {"recompute_layers": 1}, {"offload_layers": 1}])
def test_losses_and_gradients_in_bf16(ga: int, micro_batches: int, changes: dict) -> None:
    plain, fused = both("bf16", ga=ga, gbs=2 * ga, **changes)
    assert add_gradients(fused, micro_batches) == pytest.approx(add_gradients(plain, micro_batches), rel=1e-3)
    assert max(errors(fused, plain).values()) < 0.03


def test_losses_and_gradients_in_fp8() -> None:
    """Scales are others, those of a tensor's largest number with room above it: two roundings of the same numbers."""
    plain, fused = both("fp8")
    assert add_gradients(fused, 2) == pytest.approx(add_gradients(plain, 2), rel=0.01)
    assert max(errors(fused, plain).values()) < 0.25
    assert scales_of([fused]) is not None


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("recomputed", [0, 1])
def test_what_is_kept_is_what_would_be_made_again(dtype: str, recomputed: int) -> None:
    made, kept = (part_of(config_of("h200", dtype, recompute_layers=recomputed, keep_inputs=k)) for k in (False, True))
    for _step in range(2):  # in the second scales are known beforehand
        assert add_gradients(made, 2) == add_gradients(kept, 2)
        assert set(errors(kept, made).values()) == {0.0}
        for part in (made, kept):
            part.zero_grad()
            begin_step(part)


@pytest.mark.parametrize("gpu", ["cpu", "h200"], ids=["layer by layer", "by hand"])
@pytest.mark.parametrize("fast_sums", [False, True])
def test_sums_of_the_way_back_are_fast_where_that_is_asked_for(monkeypatch, gpu: str, fast_sums: bool) -> None:
    counts = Counter[bool]()

    def counted(*operands: Tensor, fast: bool = False, **others: object) -> Tensor:
        counts[fast] += "scales" in others
        return multiply(*operands, fast=fast, **others)

    for module in ("llmb.ops.gemm.fp8_linear", "llmb.models.llama_layer.linear_gemms"):
        monkeypatch.setattr(f"{module}.multiply", counted)
    add_gradients(part_of(config_of(gpu, "fp8", fast_sums=fast_sums)), 1)
    # Of two layers, each of seven matrices; by hand gate and up are one, and going back queries, keys and values too.
    forward, back = (2 * 7, 2 * 2 * 7) if gpu == "cpu" else (2 * 6, 2 * 2 * 4)
    assert counts[True] == forward + fast_sums * back
    assert counts[False] == (not fast_sums) * back


def test_fast_sums_are_for_fp8_only(trained) -> None:
    refused = trained(dtype="bf16", fast_sums=True, steps=1)
    assert "does not run fast_sums=true with dtype=bf16" in refused.ended().reason


def test_inputs_are_kept_by_layers_by_hand_only(trained) -> None:
    refused = trained(keep_inputs=True, steps=1)
    assert "does not run keep_inputs=true with llama in fp32 on 1 ranks of cpu" in refused.ended().reason


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_few_steps_learn_the_same(dtype: str) -> None:
    losses = []
    for part, gpu in zip(both(dtype), ("cpu", "h200"), strict=True):
        config = config_of(gpu, dtype)
        optimizer = optimizer_of([part], config.workload, ONE)
        for _ in range(10):
            begin_step(part)
            losses.append(add_gradients(part, 2)[-1])
            optimizer.update(1e-2)
    assert losses[19] < losses[10] - 0.5
    assert losses[19] == pytest.approx(losses[9], rel=0.05)


def test_gradients_lie_side_by_side_and_stay_where_they_are() -> None:
    part = part_of(config_of("h200"))
    places = set()
    for _ in range(3):
        add_gradients(part, 1)
        attention = part.layers[0].attention
        places.add(tuple(linear.weight.grad.data_ptr() for linear in (attention.q, attention.k, attention.v)))
    (found,) = places
    assert [place - found[0] for place in found] == [0, 64 * 64 * 4, (64 + 32) * 64 * 4]


def test_8_bit_weights_are_those_after_the_update() -> None:
    part = part_of(config_of("h200", "fp8"))
    optimizer = optimizer_of([part], config_of("h200", "fp8").workload, ONE)
    layer = part.layers[0]
    before = layer.fp8.rows("w2").rows.float()
    add_gradients(part, 1)
    optimizer.update(1e-2)
    assert torch.equal(layer.fp8.rows("w2").rows.float(), before)
    begin_step(part)
    form = layer.fp8.columns("w2")
    wanted = layer.mlp.down.weight.detach().float()
    assert ((form.columns.T.float() * form.scale) - wanted).norm() < 0.05 * wanted.norm()
    assert not torch.equal(form.rows.float(), before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("other", ["h200", "cpu"])
def test_an_fp8_run_goes_on_from_a_checkpoint(tmp_path: Path, other: str) -> None:
    """By hand to the bit, scales and all; block by block from the same weights."""

    def run(gpu: str, steps: range) -> list[float]:
        config = config_of(gpu, "fp8", checkpoint_every=3 if steps.start == 1 else None)
        work = config.workload
        parts = ready_parts(config, work, ONE)
        optimizer = optimizer_of(parts, work, ONE)
        losses = []
        with Checkpoints(tmp_path, config, work, ONE, parts, optimizer) as checkpoints:
            if steps.start > 1:
                checkpoints.load(tmp_path / "checkpoints" / f"step_{steps.start - 1}")
            for step in steps:
                begin_step(parts[0])
                losses += add_gradients(parts[0], 2)
                optimizer.update(1e-3)
                checkpoints.after(step)
        return losses

    straight = run("h200", range(1, 7))
    rest = run(other, range(4, 7))
    assert rest == (straight[6:] if other == "h200" else pytest.approx(straight[6:], rel=0.02))
