"""On a GPU: layers of a Llama by hand against the same block by block, and what they hold at the peak."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmb.config.serialization import to_json
from llmb.config.spec import Machine, Model, Parallel, Precision, RopeConfig, RunConfig, Training
from llmb.events import StepDone, read
from llmb.models.architectures import Network
from llmb.ops.attention import segment_attention
from llmb.ops.attention.attention_block import PLAIN
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.train.__main__ import main
from llmb.train.fused_llama import FusedLayer, begin_step
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallelize import build_model_parts, build_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

GPU = torch.device("cuda", 0)
MODEL = Model(
    name="4 layers of 8b", architecture="llama", layers=4, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128,
    vocab=16384, rope=RopeConfig(theta=500000.0),
)  # fmt: skip


def config_of(gpu: str, dtype: str = "bf16", **changes: object) -> RunConfig:
    work = Training(seqlen=1024, mbs=2, gbs=4, ga=2, steps=3, window=(2, 3), lr=1e-3)
    return RunConfig(
        name="test", target="test", size="test", model=MODEL, parallel=Parallel(), precision=Precision(dtype=dtype),  # type: ignore[arg-type]
        machine=Machine(gpu=gpu, gpus=1, gpus_per_node=1), workload=replace(work, **changes),  # type: ignore[arg-type]
    )  # fmt: skip


def part_of(config: RunConfig) -> Network:
    assert isinstance(config.workload, Training)
    (part,) = build_model_parts(config, config.workload, Mesh(0, 1, GPU))
    assert all(isinstance(layer, FusedLayer) == (config.machine.gpu != "cpu") for layer in part.layers)
    begin_step(part)
    return part


def add_gradients(part: Network, micro_batches: int = 2) -> list[float]:
    losses = []
    for micro in range(micro_batches):
        tokens = synthetic_tokens(7, 10 * micro, (2, 1025), MODEL.vocab, GPU)
        loss = part(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    return losses


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


Found = tuple[list[float], dict[str, Tensor]]  # losses, and gradients by their names


def gradients_of(config: RunConfig) -> Found:
    """Of two micro-batches."""
    part = part_of(config)
    losses = add_gradients(part)
    return losses, {name: _grad(one).cpu() for name, one in part.named_parameters()}


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.fixture(scope="module")
def exact() -> Found:
    """Block by block in fp32."""
    return gradients_of(config_of("cpu", "fp32"))


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def plain(request: pytest.FixtureRequest) -> tuple[str, Found]:
    """Block by block in a format, and its name."""
    return request.param, gradients_of(config_of("cpu", request.param))


@pytest.mark.parametrize("recomputed", [0, 4])
def test_by_hand_is_as_near_to_fp32_as_block_by_block(recomputed: int, plain: tuple[str, Found], exact: Found) -> None:
    """Random numbers are the worst that 8 bits can be given: a third is lost either way."""
    dtype, (_, theirs) = plain
    losses, ours = gradients_of(config_of("h200", dtype, recompute_layers=recomputed))
    assert losses == pytest.approx(exact[0], rel={"bf16": 1e-3, "fp8": 0.01}[dtype])
    away = {name: (error(ours[name], one), error(theirs[name], one)) for name, one in exact[1].items()}
    worse = {name: found for name, found in away.items() if found[0] > 1.05 * found[1] + 1e-3}
    assert not worse, f"further away than block by block: {worse}"


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_equal_steps_give_equal_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but cuDNN's attention, which on its way back adds up the queries' slopes in whatever order they come."""
    monkeypatch.setattr(segment_attention, "kernel_for", lambda _q, _spans: PLAIN)
    found = []
    for _ in range(2):
        config = config_of("h200", dtype)
        part = part_of(config)
        optimizer = build_optimizer([part], config.workload, Mesh(0, 1, GPU))  # type: ignore[arg-type]
        losses = []
        for _step in range(3):
            begin_step(part)
            losses += add_gradients(part)
            optimizer.update(1e-3)
        found.append(losses)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ga": 1, "gbs": 2},
        {"recompute_layers": 3},
        {"moments": "bf16"},
        {"gradients": "bf16", "master_weights": "bf16"},
        {"save_norm_outputs": True},
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_peak_is_the_one_foretold(tmp_path: Path, dtype: str, settings: dict) -> None:
    config = config_of("h200", dtype, seqlen=8192, **settings)
    (tmp_path / "config.json").write_text(to_json(config))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert main([str(tmp_path / "config.json")]) == 0
    steps = [event for event in read(tmp_path / "events.rank0.jsonl") if isinstance(event, StepDone)]
    assert steps[-1].memory_bytes == pytest.approx(memory_estimate(config).total, rel=0.03)
