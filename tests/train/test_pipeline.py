"""Pipelines compute what one process does, whatever the split; each stage has only its own; the ends' copies agree."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Trained, on_ranks, trained
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef

from llmb.config.parallel_layout import most_layers, stage_layers
from llmb.config.spec import Parallel, RunConfig
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.perfmodel.pipeline_schedule import SENDS_UNDER_WAY, bubble, most_in_flight
from llmb.train.loop import Job, accumulate_gradients
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import Mesh, open_mesh
from llmb.train.parallel.pipeline import Pipeline, Stage, copied_weights, own_parts
from llmb.train.parallelize import ready_parts
from llmb.train.train_support import supported_workload

CLOSE = 1e-5
ROUNDED_ONCE = 2**-8  # what a last bit of the weights makes of an activation that bf16 then rounds the other way
Train = Callable[[RunConfig], Trained]


def small(architecture: str, **changes: Any) -> RunConfig:
    """Four micro-batches a step, of two sequences each."""
    base = changed(CONFIG, model=SMALL_MODELS[architecture], seqlen=32, mbs=2, gbs=8, ga=4, steps=3)
    return changed(base, **changes)


def without_pipeline(config: RunConfig) -> RunConfig:
    return replace(config, parallel=Parallel())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains each configuration once."""
    done: dict[str, Trained] = {}

    def train(config: RunConfig) -> Trained:
        if repr(config) not in done:
            done[repr(config)] = trained(config, tmp_path_factory.mktemp("run"))
        return done[repr(config)]

    return train


@pytest.fixture(autouse=True)
def _small_tensors_are_offloaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmb.train.activation_offload.SMALLEST_BYTES", 1)


SPLITS = [
    *((architecture, {"pp": 2, "vp": vp}) for architecture in SMALL_MODELS for vp in (None, 2)),
    ("llama", {"pp": 2, "layers": 5}),
    ("llama", {"pp": 4, "layers": 5}),
    ("llama", {"pp": 2, "vp": 2, "layers": 5, "ga": 6, "gbs": 12}),
    ("llama", {"pp": 2, "ga": 2, "gbs": 4}),
    ("llama", {"pp": 2, "ga": 3, "gbs": 6}),
    ("llama", {"pp": 2, "vp": 2, "recompute_layers": 1}),
    ("grok1", {"pp": 2, "vp": 2, "recompute_layers": 2}),
    ("llama", {"pp": 2, "vp": 2, "offload_layers": 1}),
    ("llama", {"pp": 2, "vp": 2, "overlap_send": False}),
    ("deepseek", {"pp": 2, "recompute_layers": 1, "offload_layers": 1}),
]


@pytest.mark.parametrize(("architecture", "changes"), SPLITS, ids=str)
def test_a_pipeline_computes_what_one_process_does(run: Train, architecture: str, changes: dict[str, Any]) -> None:
    config = small(architecture, **changes)
    assert run(config).farthest(run(without_pipeline(config))) < CLOSE


def test_equal_runs_give_equal_bits(run: Train, tmp_path: Path) -> None:
    config = small("grok1", pp=2, vp=2)
    first, second = run(config), trained(config, tmp_path)
    assert first.losses == second.losses
    assert first.norms == second.norms
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_stream_travels_in_its_own_number_format(run: Train, dtype: str) -> None:
    """Nothing is rounded on the way. Only sums have another order: the norm, the gradient of the tied matrix.

    Two steps: in the third a last bit of a weight makes other 8-bit numbers, and AdamW whole steps of the difference.
    """
    config = small("grok1", dtype=dtype, pp=2, steps=2)
    split, whole = run(config), run(without_pipeline(config))
    assert split.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
    assert split.farthest(whole) < ROUNDED_ONCE


@pytest.mark.parametrize("architecture", SMALL_MODELS)
def test_every_weight_is_in_one_part_except_one_that_both_ends_use(architecture: str) -> None:
    model = SMALL_MODELS[architecture]
    with torch.device("meta"):
        whole = [name for name, _ in build_model(model).named_parameters()]
        ranks = on_ranks(2, _names_of_parts, model)
    names = [name for rank in ranks for part in rank for name in part]
    tied = ["embedding.weight"] if model.tied_embeddings else []
    assert sorted(names) == sorted(whole + tied)
    first, last = ranks[0][0], ranks[1][-1]
    assert "embedding.weight" in first
    assert "norm.weight" in last


def _names_of_parts(_rank: int, model: Any) -> list[list[str]]:
    config = changed(CONFIG, model=model, pp=2, vp=2)
    with torch.device("meta"):
        return [[name for name, _ in part.named_parameters()] for part in own_parts(build_model(model), _mesh(config))]


def _mesh(config: RunConfig) -> Mesh:
    with torch.device("cpu"):
        return open_mesh(config)


def test_copies_at_both_ends_stay_equal_to_the_last_bit() -> None:
    first, last = on_ranks(2, _embedding_after_steps, small("grok1", pp=2))
    assert first["copied"] == set()
    assert last["copied"] == {"embedding.weight"}
    assert not torch.equal(first["before"], first["after"])
    assert torch.equal(first["after"], last["after"])
    assert torch.equal(first["gradient"], last["gradient"])


def _embedding_after_steps(_rank: int, config: RunConfig) -> dict[str, Any]:
    job, parts, optimizer = _ready(config)
    (part,) = parts
    before = part.embedding.weight.detach().clone()
    accumulate_gradients(job, parts, 1)
    gradient = part.embedding.weight.grad.clone()
    for step in (1, 2):
        optimizer.update(1e-2)
        accumulate_gradients(job, parts, step)
    after = part.embedding.weight.detach()
    return {"copied": copied_weights(parts), "before": before, "gradient": gradient, "after": after}


def _ready(config: RunConfig) -> tuple[Job, Any, Optimizer]:
    work, mesh = supported_workload(config), open_mesh(config)
    parts = ready_parts(config, work, mesh)
    job = Job(config, work, mesh)
    job = replace(job, pipeline=Pipeline(parts, config, work, mesh, job.span))
    named = (pair for part in parts for pair in part.named_parameters())
    return job, parts, Optimizer(named, mesh, work.lr, copied_weights(parts))


class Counted:
    """How many of some tensors had memory at once, at most."""

    def __init__(self) -> None:
        self._seen: list[StorageWeakRef] = []
        self.made = self.most = 0

    def see(self, transfers: list[Any]) -> list[Any]:
        self._seen = [one for one in self._seen if not one.expired()]
        self._seen += [StorageWeakRef(one.tensor.untyped_storage()) for one in transfers]
        self.made += len(transfers)
        self.most = max(self.most, len(self._seen))
        return transfers


@pytest.mark.parametrize(("pp", "vp"), [(2, None), (2, 2), (4, None)])
def test_a_stage_has_memory_for_what_is_in_flight_only(pp: int, vp: int | None) -> None:
    ga = 16
    for rank, counted in enumerate(on_ranks(pp, _transferred, small("grok1", pp=pp, vp=vp, ga=ga, gbs=2 * ga))):
        parts = vp or 1
        inputs, gradients = (2 * ga * (parts - (rank == end)) for end in (0, pp - 1))
        assert [made for made, _ in counted.values()] == [inputs, gradients, gradients, inputs]
        # The schedule itself holds on to the transfer it began last, and what arrives may wait for its turn.
        assert counted["get_fwd_recv_ops"][1] <= most_in_flight(pp, vp, ga, rank) + 2
        assert counted["get_bwd_recv_ops"][1] <= 2
        sent = counted["get_fwd_send_ops"][1], counted["get_bwd_send_ops"][1]
        assert max(sent) <= (SENDS_UNDER_WAY + 1 if vp else 3)


def _transferred(_rank: int, config: RunConfig) -> dict[str, tuple[int, int]]:
    """In two steps: how many tensors were received into and sent, and how many of them there were at once."""
    job, parts, optimizer = _ready(config)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
            found[name] = counted = Counted()
            real = getattr(PipelineStage, name)
            patch.setattr(PipelineStage, name, lambda *given, real=real, see=counted.see: see(real(*given)))
        for step in (1, 2):
            accumulate_gradients(job, parts, step)
            optimizer.update(1e-2)
    return {name: (counted.made, counted.most) for name, counted in found.items()}


def test_another_torch_that_keeps_what_it_receives_is_noticed() -> None:
    first, last = on_ranks(2, _unknown_torch, small("llama", pp=2))
    assert first == last == f"torch {torch.__version__} keeps what pipeline stages receive in a way not known here"


def _unknown_torch(_rank: int, config: RunConfig) -> str:
    """Which makes everything it receives into on the stage's device."""
    job, parts, _ = _ready(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "_shapes_only", lambda _stage: nullcontext())
        with pytest.raises(AssertionError) as raised:
            accumulate_gradients(job, parts, 1)
    return str(raised.value)


def test_what_a_stage_raises_is_raised_as_it_is() -> None:
    first, _ = on_ranks(2, _raised, small("llama", pp=2, vp=2))
    assert first == "MemoryError('no more')"


def _raised(rank: int, config: RunConfig) -> str | None:
    """In the second step, which the first rank begins by itself: no other is left waiting for it."""
    job, parts, _ = _ready(config)
    accumulate_gradients(job, parts, 1)
    if rank > 0:
        return None

    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    next(iter(parts[0].layers)).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError) as raised:
        accumulate_gradients(job, parts, 2)
    return repr(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pp": 4}, "pp 4 needs at least 4 micro-batches, a step has 2"),
        ({"pp": 2, "vp": 2, "ga": 5, "gbs": 10}, "vp 2 takes micro-batches in rounds of pp 2, a step has 5"),
        ({"pp": 2, "vp": 3}, "pp 2 x vp 3 needs more layers than the 4"),
        ({"vp": 2}, "vp 2 has no effect without pipeline parallelism"),
        ({"pp": 2, "recompute_layers": 3}, "recompute_layers=3: a rank of the pipeline has 2 layers, so 0 to 2"),
        ({"pp": 2, "cuda_graphs": True}, "does not run cuda_graphs=true with pp=2"),
    ],
)
def test_what_no_schedule_can_do_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        supported_workload(small("llama", **({"ga": 2, "gbs": 4} | changes)))
    assert "\n" not in str(refused.value)


def test_every_stage_has_a_layer_and_every_layer_a_stage() -> None:
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            ranges = stage_layers(layers, stages, None)
            assert [number for stage in ranges for number in stage] == list(range(layers))
            assert min(map(len, ranges)) >= 1
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 2
    assert [len(stage) for stage in stage_layers(126, 8, 8)] == [1, *[2] * 62, 1]


def test_the_rank_with_most_layers() -> None:
    assert most_layers(126, Parallel(pp=8, vp=8)) == 16
    assert most_layers(5, Parallel(pp=2)) == 3
    assert most_layers(5, Parallel()) == 5


def test_the_bubble_shrinks_with_micro_batches_and_virtual_stages() -> None:
    assert bubble(1, None, 4) == 0
    assert bubble(8, None, 16) == pytest.approx(7 / 23)
    assert bubble(8, 8, 16) == pytest.approx(7 / 135)
