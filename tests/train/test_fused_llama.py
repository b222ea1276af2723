"""Fused Llama layers, one autograd node each, compute what the plain layers do."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_config import CONFIG, changed
from small_models import llama_model
from torch import Tensor

from llmb.config.spec import RunConfig
from llmb.models.architectures import Network
from llmb.ops.gemm.matmul import matmul
from llmb.train.fused_llama import FusedLayer, begin_step, fp8_scales
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallelize import build_model_parts, build_optimizer
from llmb.train.train_checkpoint import Checkpointer

ONE = Mesh(0, 1, torch.device("cpu"))
MODEL = llama_model(name="small", hidden=64, ffn=96, vocab=128)


def config_of(gpu: str, dtype: str = "bf16", **changes: object) -> RunConfig:
    sizes = {"mbs": 2, "gbs": 4, "ga": 2, "seqlen": 32, "lr": 1e-3}
    config = changed(CONFIG, dtype=dtype, **(sizes | changes))
    return replace(config, model=MODEL, machine=replace(config.machine, gpu=gpu))


def build_part(config: RunConfig) -> Network:
    (model_part,) = build_model_parts(config, config.workload, ONE)
    begin_step(model_part)
    return model_part


def add_gradients(model_part: Network, micro_batches: int, sequences: int = 2) -> list[float]:
    losses = []
    for micro in range(micro_batches):
        tokens = torch.randint(128, (sequences, 33), generator=torch.Generator().manual_seed(micro))
        loss = model_part(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    return losses


def plain_and_fused(dtype: str, **changes: object) -> tuple[Network, Network]:
    """Return a plain and a fused network."""
    plain, fused = (build_part(config_of(gpu, dtype, **changes)) for gpu in ("cpu", "h200"))
    assert not any(isinstance(layer, FusedLayer) for layer in plain.layers)
    assert all(isinstance(layer, FusedLayer) for layer in fused.layers)
    return plain, fused


def errors(network: Network, reference: Network) -> dict[str, float]:
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}

    def error(actual: Tensor, expected_grad: Tensor) -> float:
        return float((actual.double() - expected_grad.double()).norm() / expected_grad.double().norm())

    return {name: error(parameter.grad, expected[name]) for name, parameter in network.named_parameters()}


@pytest.mark.parametrize(("ga", "micro_batches"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("changes", [{}, {"recompute_layers": 1}, {"offload_layers": 1}])
def test_losses_and_gradients_in_bf16(ga: int, micro_batches: int, changes: dict) -> None:
    plain, fused = plain_and_fused("bf16", ga=ga, gbs=2 * ga, **changes)
    assert add_gradients(fused, micro_batches) == pytest.approx(add_gradients(plain, micro_batches), rel=1e-3)
    assert max(errors(fused, plain).values()) < 0.03


def test_losses_and_gradients_in_fp8() -> None:
    """Delayed scaling leaves a margin above the amax, so the two round the same values differently."""
    plain, fused = plain_and_fused("fp8")
    assert add_gradients(fused, 2) == pytest.approx(add_gradients(plain, 2), rel=0.01)
    assert max(errors(fused, plain).values()) < 0.25
    assert fp8_scales([fused]) is not None


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("recomputed", [0, 1])
def test_saved_norm_outputs_equal_recomputed_ones(dtype: str, recomputed: int) -> None:
    recomputed_part, saved_part = (
        build_part(config_of("h200", dtype, recompute_layers=recomputed, save_norm_outputs=k)) for k in (False, True)
    )
    for _step in range(2):  # the second step has scales from the first
        assert add_gradients(recomputed_part, 2) == add_gradients(saved_part, 2)
        assert set(errors(saved_part, recomputed_part).values()) == {0.0}
        for model_part in (recomputed_part, saved_part):
            model_part.zero_grad()
            begin_step(model_part)


@pytest.mark.parametrize("gpu", ["cpu", "h200"], ids=["plain", "fused"])
@pytest.mark.parametrize("fp8_fast_accum", [False, True])
def test_fast_accumulation_of_backward_gemms(monkeypatch, gpu: str, fp8_fast_accum: bool) -> None:
    counts = Counter[bool]()

    def count_matmul(*operands: Tensor, fast: bool = False, **kwargs: object) -> Tensor:
        counts[fast] += "scales" in kwargs
        return matmul(*operands, fast=fast, **kwargs)

    for module in ("llmb.ops.gemm.fp8_linear", "llmb.models.llama_layer.linear_gemms"):
        monkeypatch.setattr(f"{module}.matmul", count_matmul)
    add_gradients(build_part(config_of(gpu, "fp8", fp8_fast_accum=fp8_fast_accum)), 1)
    # Two layers of seven matrices; fused layers merge gate and up, in the backward pass also q, k and v.
    forward, back = (2 * 7, 2 * 2 * 7) if gpu == "cpu" else (2 * 6, 2 * 2 * 4)
    assert counts[True] == forward + fp8_fast_accum * back
    assert counts[False] == (not fp8_fast_accum) * back


def test_fast_accumulation_needs_fp8(trained) -> None:
    refused = trained(dtype="bf16", fp8_fast_accum=True, steps=1)
    assert "does not run fp8_fast_accum=true with dtype=bf16" in refused.ended().reason


def test_save_norm_outputs_needs_fused_layers(trained) -> None:
    refused = trained(save_norm_outputs=True, steps=1)
    assert "does not run save_norm_outputs=true with llama in fp32 on 1 ranks of cpu" in refused.ended().reason


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_fused_and_plain_layers_learn_the_same(dtype: str) -> None:
    losses = []
    for model_part, gpu in zip(plain_and_fused(dtype), ("cpu", "h200"), strict=True):
        config = config_of(gpu, dtype)
        optimizer = build_optimizer([model_part], config.workload, ONE)
        for _ in range(10):
            begin_step(model_part)
            losses.append(add_gradients(model_part, 2)[-1])
            optimizer.update(1e-2)
    assert losses[19] < losses[10] - 0.5
    assert losses[19] == pytest.approx(losses[9], rel=0.05)


def test_gradients_are_contiguous_and_reused() -> None:
    model_part = build_part(config_of("h200"))
    addresses = set()
    for _ in range(3):
        add_gradients(model_part, 1)
        attention = model_part.layers[0].attention
        addresses.add(tuple(linear.weight.grad.data_ptr() for linear in (attention.q, attention.k, attention.v)))
    (network,) = addresses
    assert [place - network[0] for place in network] == [0, 64 * 64 * 4, (64 + 32) * 64 * 4]


def test_fp8_weights_are_refreshed_by_begin_step() -> None:
    model_part = build_part(config_of("h200", "fp8"))
    optimizer = build_optimizer([model_part], config_of("h200", "fp8").workload, ONE)
    layer = model_part.layers[0]
    before = layer.fp8.rows("w2").rows.float()
    add_gradients(model_part, 1)
    optimizer.update(1e-2)
    assert torch.equal(layer.fp8.rows("w2").rows.float(), before)
    begin_step(model_part)
    weight = layer.fp8.columns("w2")
    reference = layer.mlp.down.weight.detach().float()
    assert ((weight.columns.T.float() * weight.scale) - reference).norm() < 0.05 * reference.norm()
    assert not torch.equal(weight.rows.float(), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("resumed_gpu", ["h200", "cpu"])
def test_fp8_run_resumes_from_checkpoint(tmp_path: Path, resumed_gpu: str) -> None:
    """Fused layers resume bit-exactly, with their scales; plain layers from the same weights."""

    def run(gpu: str, steps: range) -> list[float]:
        config = config_of(gpu, "fp8", checkpoint_every=3 if steps.start == 1 else None)
        work = config.workload
        model_parts = build_model_parts(config, work, ONE)
        optimizer = build_optimizer(model_parts, work, ONE)
        losses = []
        with Checkpointer(tmp_path, config, work, ONE, model_parts, optimizer) as checkpointer:
            if steps.start > 1:
                checkpointer.load(tmp_path / "checkpoints" / f"step_{steps.start - 1}")
            for step in steps:
                begin_step(model_parts[0])
                losses += add_gradients(model_parts[0], 2)
                optimizer.update(1e-3)
                checkpointer.after_step(step)
        return losses

    straight = run("h200", range(1, 7))
    resumed = run(resumed_gpu, range(4, 7))
    assert resumed == (straight[6:] if resumed_gpu == "h200" else pytest.approx(straight[6:], rel=0.02))
