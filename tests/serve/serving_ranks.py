"""Requests served by several forked gloo ranks, each of which drives its own engine as the benchmark does.

    outcome = served_by_ranks(config, requests, blocks=9)

Ranks that compute the same requests must have the same outputs, which is checked here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

from forked_ranks import on_ranks
from small_served import MAX_SEQ_LEN, serve

from llmb.config.native.serving_support import check_serving_layout
from llmb.config.spec import Inference, RunConfig
from llmb.perfmodel.serving_time.cache_blocks import CacheBlocks
from llmb.runtime.rank_info import init_distributed
from llmb.serve.benchmark.request_load import data_parallel_shard
from llmb.serve.engine import Engine
from llmb.serve.engine_builder import engine_for_model, serving_dtypes, weight_source
from llmb.serve.layers.served_model import build_served_model
from llmb.serve.request import Request
from llmb.serve.serve_layout import join_groups


@dataclass
class ServedOutcome:
    """Outputs and statistics of the requests."""

    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by request id
    preempted: list[int] = field(default_factory=list)  # how often, on each rank
    computed: list[int] = field(default_factory=list)  # tokens, on each rank


def served_by_ranks(
    config: RunConfig, requests: Sequence[Request], blocks: int, change: Callable[[Engine], None] | None = None
) -> ServedOutcome:
    """Return the outputs of all ranks, with caches of so many blocks; `change` may modify every rank's engine."""
    outcome = ServedOutcome()
    for actual in on_ranks(config.parallel.world_size, rank_outcome, config, requests, blocks, change):
        outcome.preempted += actual.preempted
        outcome.computed += actual.computed
        for number, tokens in actual.outputs.items():
            assert outcome.outputs.setdefault(number, tokens) == tokens, "ranks with the same request disagree"
    return outcome


def rank_outcome(
    rank: int, config: RunConfig, requests: Sequence[Request], blocks: int, change: Callable[[Engine], None] | None
) -> ServedOutcome:
    """Return the outputs of one rank; a single process is rank 0 of one."""
    engine = rank_engine(config, blocks)
    if change is not None:
        change(engine)
    shard = data_parallel_shard(rank, config.parallel.tp, _work(config).attention_dp)
    with (
        mock.patch.object(engine.scheduler, "_preempt", wraps=engine.scheduler._preempt) as preempt,
        mock.patch.object(engine.runner, "launch", wraps=engine.runner.launch) as launch,
    ):
        collector = serve(engine, requests[shard.index :: shard.size])
    outputs = {number: output.token_ids for number, output in collector.outputs.items()}
    return ServedOutcome(
        outputs, [preempt.call_count], [sum(call.args[0].num_tokens for call in launch.call_args_list)]
    )


def rank_engine(config: RunConfig, blocks: int) -> Engine:
    """Build this rank's engine with a KV cache of so many blocks."""
    check_serving_layout(config)
    place = init_distributed(config, "llmb.serve")
    ranks = join_groups(config, place)
    served_model = build_served_model(config.model, weight_source(config, place.device), serving_dtypes(config), ranks)
    return engine_for_model(served_model, _work(config), MAX_SEQ_LEN, CacheBlocks(blocks))


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload
