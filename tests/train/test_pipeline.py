"""Pipeline parallelism: stages hold only their weights and micro-batches in flight, tied copies stay equal."""

from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from config_changes import changed
from small_config import CONFIG
from small_models import SMALL_MODELS
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef
from training_ranks import build_job, on_ranks

from llmb.config.parallel_layout import max_layers_per_rank, stage_layers
from llmb.config.spec import Parallel, RunConfig
from llmb.perfmodel.pipeline_schedule import MAX_PENDING_SENDS, rank_order
from llmb.train.loop import accumulate_gradients
from llmb.train.parallel.pipeline import Stage
from llmb.train.parallel.pipeline_stages import tied_copies


def small(architecture: str, **changes: Any) -> RunConfig:
    """Return a configuration of four micro-batches of two sequences per step."""
    base = changed(CONFIG, model=SMALL_MODELS[architecture], seqlen=32, mbs=2, gbs=8, ga=4, steps=3)
    return changed(base, **changes)


@pytest.mark.slow
def test_tied_embeddings_stay_bitwise_equal() -> None:
    first, last = on_ranks(2, _embedding_after_steps, small("grok1", pp=2))
    assert first["copied"] == set()
    assert last["copied"] == {"embedding.weight"}
    assert not torch.equal(first["before"], first["after"])
    assert torch.equal(first["after"], last["after"])
    assert torch.equal(first["gradient"], last["gradient"])


def _embedding_after_steps(_rank: int, config: RunConfig) -> dict[str, Any]:
    job, model_parts, optimizer = build_job(config)
    (model_part,) = model_parts
    before = model_part.embedding.weight.detach().clone()
    accumulate_gradients(job, model_parts, 1)
    bucket = model_part.embedding.weight.bucket
    gradient = bucket.grad_shard.clone()
    for step in (1, 2):
        optimizer.update(1e-2)
        accumulate_gradients(job, model_parts, step)
    after = model_part.embedding.weight.detach()
    return {"copied": tied_copies(model_parts), "before": before, "gradient": gradient, "after": after}


class LiveTensors:
    """Counter of transferred tensors, and how many were alive at once."""

    def __init__(self) -> None:
        self._seen: list[StorageWeakRef] = []
        self.count = self.peak = 0

    def track(self, transfers: list[Any]) -> list[Any]:
        self._seen = [reference for reference in self._seen if not reference.expired()]
        self._seen += [StorageWeakRef(transfer.tensor.untyped_storage()) for transfer in transfers]
        self.count += len(transfers)
        self.peak = max(self.peak, len(self._seen))
        return transfers


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "vp"), [(2, 2), *(pytest.param(pp, None, marks=pytest.mark.nightly) for pp in (2, 4))])
def test_stage_memory_is_for_micro_batches_in_flight(pp: int, vp: int | None) -> None:
    ga = 16
    for rank, counted in enumerate(on_ranks(pp, _count_transfers, small("grok1", pp=pp, vp=vp, ga=ga, gbs=2 * ga))):
        model_parts = vp or 1
        inputs, gradients = (2 * ga * (model_parts - (rank == end)) for end in (0, pp - 1))
        assert [count for count, _ in counted.values()] == [inputs, gradients, gradients, inputs]
        # The schedule itself references its last transfer, and received tensors may wait to be used.
        in_flight = accumulate(1 if action.forward else -1 for action in rank_order(pp, vp, ga, rank))
        assert counted["get_fwd_recv_ops"][1] <= max(in_flight) + 2
        assert counted["get_bwd_recv_ops"][1] <= 2
        sent = counted["get_fwd_send_ops"][1], counted["get_bwd_send_ops"][1]
        assert max(sent) <= (MAX_PENDING_SENDS + 1 if vp else 3)


def _count_transfers(_rank: int, config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return how many tensors two steps received and sent, and how many were alive at once."""
    job, model_parts, optimizer = build_job(config)
    counters = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
            counters[name] = counted = LiveTensors()
            real = getattr(PipelineStage, name)
            patch.setattr(PipelineStage, name, lambda *args, real=real, track=counted.track: track(real(*args)))
        for step in (1, 2):
            accumulate_gradients(job, model_parts, step)
            optimizer.update(1e-2)
    return {name: (counted.count, counted.peak) for name, counted in counters.items()}


def test_unsupported_torch_receive_buffers_are_detected() -> None:
    first, last = on_ranks(2, _unsupported_torch, small("llama", pp=2))
    assert first == last == f"the receive buffers of pipeline stages in torch {torch.__version__} are not supported"


def _unsupported_torch(_rank: int, config: RunConfig) -> str:
    """Simulate a torch that allocates receive buffers on the stage's device."""
    job, model_parts, _ = build_job(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "_on_meta_device", lambda _stage: nullcontext())
        with pytest.raises(AssertionError) as raised:
            accumulate_gradients(job, model_parts, 1)
    return str(raised.value)


@pytest.mark.slow
def test_error_of_a_stage_is_not_wrapped() -> None:
    first, _ = on_ranks(2, _raised, small("llama", pp=2, vp=2))
    assert first == "MemoryError('no more')"


def _raised(rank: int, config: RunConfig) -> str | None:
    """Raise in the second step, which only the first rank starts: no other rank waits for it."""
    job, model_parts, _ = build_job(config)
    accumulate_gradients(job, model_parts, 1)
    if rank > 0:
        return None

    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    next(iter(model_parts[0].layers)).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError) as raised:
        accumulate_gradients(job, model_parts, 2)
    return repr(raised.value)


def test_stage_layers_are_a_partition() -> None:
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            ranges = stage_layers(layers, stages, None)
            assert [number for stage in ranges for number in stage] == list(range(layers))
            assert min(map(len, ranges)) >= 1
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 2
    assert [len(stage) for stage in stage_layers(126, 8, 8)] == [1, *[2] * 62, 1]


def test_max_layers_per_rank() -> None:
    assert max_layers_per_rank(126, Parallel(pp=8, vp=8)) == 16
    assert max_layers_per_rank(5, Parallel(pp=2)) == 3
    assert max_layers_per_rank(5, Parallel()) == 5
