"""Requests served by several forked gloo ranks, each of which drives an engine of its own as the benchmark does.

    outcome = served_by_ranks(config, requests, blocks=9)

Whoever computes the same requests must answer alike: that is checked here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

from forked_ranks import on_ranks
from small_served import LONGEST, serve

from llmb.config.spec import Inference, RunConfig
from llmb.runtime.rank_info import join_ranks
from llmb.serve.benchmark.arrivals import seat_of
from llmb.serve.engine import Engine
from llmb.serve.engine_builder import engine_on, weights_of
from llmb.serve.layers.served_model import build_stack
from llmb.serve.request import Request
from llmb.serve.serve_layout import join_groups
from llmb.serve.serve_support import check_layout
from llmb.serve.served_dtypes import how_of


@dataclass
class Outcome:
    """What came of the requests."""

    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by the number of the request
    preempted: list[int] = field(default_factory=list)  # how often, on each rank
    computed: list[int] = field(default_factory=list)  # tokens, on each rank


def served_by_ranks(
    config: RunConfig, requests: Sequence[Request], blocks: int, change: Callable[[Engine], None] | None = None
) -> Outcome:
    """What all ranks together answer, with caches of so many blocks; `change` gets every rank's engine beforehand."""
    outcome = Outcome()
    for found in on_ranks(config.parallel.world_size, rank_outcome, config, requests, blocks, change):
        outcome.preempted += found.preempted
        outcome.computed += found.computed
        for number, tokens in found.answers.items():
            assert outcome.answers.setdefault(number, tokens) == tokens, "ranks with the same request disagree"
    return outcome


def rank_outcome(
    rank: int, config: RunConfig, requests: Sequence[Request], blocks: int, change: Callable[[Engine], None] | None
) -> Outcome:
    """What one rank answers; one process is rank 0 of one."""
    engine = rank_engine(config, blocks)
    if change is not None:
        change(engine)
    seat = seat_of(rank, config.parallel.tp, _work(config).attention_dp)
    with (
        mock.patch.object(engine.scheduler, "_preempt", wraps=engine.scheduler._preempt) as preempt,
        mock.patch.object(engine.runner, "launch", wraps=engine.runner.launch) as launch,
    ):
        heard = serve(engine, requests[seat.index :: seat.parts])
    answers = {number: answer.tokens for number, answer in heard.answers.items()}
    return Outcome(answers, [preempt.call_count], [sum(call.args[0].tokens for call in launch.call_args_list)])


def rank_engine(config: RunConfig, blocks: int) -> Engine:
    """This rank's engine, of whose cache a test says how large it is."""
    check_layout(config)
    place = join_ranks(config, "llmb.serve")
    ranks = join_groups(config, place)
    stack = build_stack(config.model, weights_of(config, place.device), how_of(config), ranks)
    return engine_on(stack, _work(config), LONGEST, blocks)


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload
