"""One rank alone runs the step of its layout: the shapes, FLOPs and micro-batches of a real rank, and its bytes."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import on_ranks
from small_models import SMALL_MODELS, llama_model
from torch.utils.flop_counter import FlopCounterMode
from training_ranks import build_job, layout_config

from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, OneRank, RunConfig, Training
from llmb.errors import ConfigError
from llmb.events import RunStarted, StepDone, read_all
from llmb.perfmodel.communication import step_traffic
from llmb.results.derive import derive
from llmb.runtime.local_group import LocalGroup
from llmb.runtime.rank_info import init_distributed
from llmb.runtime.recorder import EventRecorder
from llmb.train.__main__ import run
from llmb.train.loop import train_step
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import EXPERT, Mesh

CPU = Machine(gpu="cpu", gpus=1, gpus_per_node=1)
LLAMA = llama_model(name="tiny", layers=4, ffn=64, vocab=128)
GROK, NEMOTRON = SMALL_MODELS["grok1"], SMALL_MODELS["nemotron_h"]
SCALARS = 256  # bytes a step
BATCH: dict[str, Any] = {"mbs": 2, "gbs": 8, "dtype": "bf16"}


def alone(config: RunConfig, rank: int) -> RunConfig:
    return replace(config, one_rank=OneRank(rank=rank, machine=CPU))


@dataclass(kw_only=True)
class Step:
    """One training step of a rank."""

    shapes: dict[str, tuple[int, ...]]
    shards: list[int]  # of buckets that the optimizer updates
    micro_batches: int  # forward passes of the first model part
    flops: int
    has_loss: bool
    groups: dict[str, str] = field(default_factory=dict)  # name of the process group of a mesh dimension
    copied: Counter[tuple[str, str]] = field(default_factory=Counter)  # bytes by kind and group


def one_step(_process: int, config: RunConfig) -> Step:
    """Run two steps in this process, and return the second."""
    job, parts, optimizer = build_job(config)
    groups = _groups(job.mesh)
    train_step(job, parts, optimizer, step=1)
    before = _bytes(groups.values())
    passes: list[int] = []
    parts[0].register_forward_hook(lambda *_: passes.append(1))
    with FlopCounterMode(display=False) as counter:
        train_step(job, parts, optimizer, step=2)
    sharded = [sharded_parameters(part) for part in parts]
    return Step(
        shapes={name: tuple(p.shape) for each in sharded for name, p in each.parameters.items()},
        shards=[bucket.shard_size for each in sharded for bucket in each.buckets],
        micro_batches=len(passes),
        flops=counter.get_total_flops(),
        has_loss=parts[-1].last,
        groups={name: group.group_name for name, group in groups.items()},
        copied=_bytes(groups.values()) - before,
    )


def _groups(mesh: Mesh) -> dict[str, LocalGroup]:
    """Return the group of each mesh dimension; dimensions of the same ranks may share one."""
    groups = {name: mesh.submesh(name).get_group() for name in ("tp", "cp", "pp")}
    groups |= {name: each.get_group() for name, each in (("replicas", mesh.replicas), ("stage", mesh.stage)) if each}
    groups |= {name: mesh.submesh(name).get_group() for name in EXPERT[1:]} if mesh.expert else {}
    return {name: group for name, group in groups.items() if isinstance(group, LocalGroup)}


def _bytes(groups: Iterable[LocalGroup]) -> Counter[tuple[str, str]]:
    by_name = {group.group_name: group for group in groups}
    return Counter({(kind, name): size for name, group in by_name.items() for kind, size in group.bytes.items()})


LAYOUTS = {
    "tp2": (LLAMA, {"tp": 2}),
    "fsdp dp4": (LLAMA, {"dp": 4, "fsdp": True}),
    "cp2": (LLAMA, {"cp": 2, "seqlen": 64}),
    "middle of pp4, recomputed": (LLAMA, {"pp": 4, "recompute_layers": 1}, 2),
    "last of tp2 pp2 vp2 dp2": (LLAMA, {"tp": 2, "pp": 2, "vp": 2, "dp": 2}, 4),
    "tp2 ep2 experts": (GROK, {"tp": 2, "ep": 2, "dp": 2, "balanced_experts": True}),
    "hybrid tp2": (NEMOTRON, {"tp": 2}),
}


NIGHTLY = ("cp2", "hybrid tp2", "middle of pp4, recomputed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in LAYOUTS]
)
def test_copies_the_bytes_that_the_communication_model_counts(layout: str) -> None:
    model, changes, *rank = LAYOUTS[layout]
    config = alone(layout_config(model, **{**BATCH, **changes}), *rank or [0])
    (step,) = on_ranks(1, one_step, config)
    work = config.workload
    assert isinstance(work, Training)
    assert step.micro_batches == work.ga
    counted: Counter[tuple[str, str]] = Counter()
    for traffic in step_traffic(config, config.pipeline_rank or 0):
        counted[traffic.kind, step.groups[traffic.dimension]] += traffic.bytes
    if step.has_loss and config.parallel.tp > 1:  # two fp32 numbers per token, which the model leaves out
        lse = 2 * 4 * work.ga * work.mbs * work.seqlen // config.parallel.cp * config.parallel.tp
        counted["all-gather", step.groups["tp"]] += lse
    for kind, group in {*counted, *step.copied}:
        scalars = SCALARS if kind in ("all-reduce", "all-to-all") else 0  # losses, norms, tokens per expert
        assert 0 <= step.copied[kind, group] - counted[kind, group] <= scalars, kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.nightly),
        pytest.param({"dp": 2, "fsdp": True}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_has_the_shapes_flops_and_micro_batches_of_a_real_rank(changes: dict[str, Any]) -> None:
    config = layout_config(LLAMA, **BATCH, **changes)
    real = on_ranks(2, one_step, config)
    for rank in (0, 1):
        (step,) = on_ranks(1, one_step, alone(config, rank))
        assert replace(step, groups={}, copied=Counter()) == real[rank]


@pytest.mark.slow
def test_a_run_ends_ok_without_losses(tmp_path: Path) -> None:
    config = alone(layout_config(LLAMA, **BATCH, tp=2, pp=2, dp=2), 5)
    config = replace(config, machine=Machine(gpu="h100", gpus=8, gpus_per_node=8))
    (tmp_path / "config.json").write_text(json.dumps(to_plain(config)))
    (code,) = on_ranks(1, _run, tmp_path)
    events = list(read_all([tmp_path / "events.rank0.jsonl"]))
    assert code == 0
    assert [(e.rank, e.world_size) for e in events if isinstance(e, RunStarted)] == [(0, 8)]
    steps = [e for e in events if isinstance(e, StepDone)]
    assert len(steps) == config.workload.steps  # type: ignore[union-attr]
    assert {(e.loss, e.grad_norm) for e in steps} == {(None, None)}
    result = derive(config, events)
    assert result.status == "ok"
    assert result.one_rank is not None
    assert (result.one_rank.rank, result.one_rank.ranks, result.one_rank.pipeline_rank) == (5, 8, 1)
    assert result.one_rank.communication_s is not None
    assert set(result.one_rank.communication_s) == {"tp", "pp", "dp"}


def _run(_process: int, folder: Path) -> int:
    return run(folder / "config.json", EventRecorder(folder, 0))


@pytest.mark.slow
def test_training_goes_on_where_a_sum_over_ranks_would_be_needed(tmp_path: Path) -> None:
    """A huge learning rate makes losses infinite; of all ranks together that would be divergence."""
    config = alone(layout_config(LLAMA, **{**BATCH, "dtype": "fp32"}, dp=2, lr=1e30), 0)
    (tmp_path / "config.json").write_text(json.dumps(to_plain(config)))
    assert on_ranks(1, _run, tmp_path) == [0]


def test_refuses_to_be_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it without torchrun"):
        init_distributed(alone(layout_config(LLAMA, **BATCH, tp=2), 0), "llmb.train")
