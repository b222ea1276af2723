"""Sharding of requests, concurrency and warm-up."""

from hypothesis import given
from hypothesis import strategies as st

from llmb.config.spec import Inference
from llmb.loadgen.prompt_sampler import Prompt
from llmb.serve.benchmark.prompts import ModelInfo, PromptSampler
from llmb.serve.benchmark.request_load import (
    FULL_BATCH_STEPS,
    DataParallelShard,
    RequestLoad,
    data_parallel_shard,
    make_load,
    warmup_load,
)


def load(count: int, concurrency: int) -> RequestLoad:
    return make_load([Prompt([number], 1) for number in range(count)], concurrency)


@given(count=st.integers(0, 40), concurrency=st.integers(1, 60), size=st.integers(1, 9))
def test_shards_partition_requests_and_concurrency(count: int, concurrency: int, size: int) -> None:
    whole = load(count, concurrency)
    shards = [whole.shard(index, size) for index in range(size)]
    assert sorted(number for shard in shards for number, _ in shard.prompts) == list(range(count))
    assert sum(shard.concurrency for shard in shards) <= concurrency
    for shard in shards:
        assert (shard.concurrency > 0) == bool(shard.prompts)  # no shard has requests without concurrency
        assert shard.concurrency <= max(1, len(shard.prompts))
    sizes = [len(shard.prompts) for shard in shards if shard.prompts]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_requests_are_sharded_round_robin() -> None:
    assert [number for number, _ in load(7, 7).shard(1, 3).prompts] == [1, 4]


def test_unlimited_concurrency_sends_all_at_once() -> None:
    assert load(5, 0).concurrency == load(5, -1).concurrency == load(5, 5).concurrency == load(5, 9).concurrency == 5
    assert load(5, 4).concurrency == 4


def test_recording_ranks() -> None:
    assert [data_parallel_shard(rank, tp=4, attention_dp=False) for rank in (0, 1, 4)] == [
        DataParallelShard(0, 1, True),
        DataParallelShard(0, 1, False),
        DataParallelShard(0, 1, False),
    ]
    assert [data_parallel_shard(rank, tp=4, attention_dp=True) for rank in (0, 3, 5)] == [
        DataParallelShard(0, 4, True),
        DataParallelShard(3, 4, True),
        DataParallelShard(1, 4, False),  # the second stage of a pipeline
    ]


def warmed(**changes) -> list[tuple[int, int]]:
    """Return (input, output) tokens of the warm-up for requests of 100 + 500 tokens at a concurrency of 32."""
    settings = {"mode": "max_throughput", "use_case": "chat", "isl": 100, "osl": 500, "num_requests": 64}
    settings |= {"max_batch_size": 16, "concurrency": 32, "max_num_tokens": 400, "kv_fraction": 0.5}
    cache_tokens, size = changes.pop("cache_tokens", 10**6), changes.pop("size", 1)
    load = make_load([Prompt([number] * 100, 500) for number in range(64)], 32).shard(0, size)
    warmup = warmup_load(Inference(**settings | changes), load, size, cache_tokens, PromptSampler(0, ModelInfo(1000)))
    assert len(warmup.prompts) == 0 or warmup.concurrency == min(len(warmup.prompts), load.concurrency)
    return [(len(prompt.tokens), prompt.output_tokens) for _, prompt in warmup.prompts]


def test_warmup_is_one_full_batch() -> None:
    assert warmed() == [(100, 4 + FULL_BATCH_STEPS)] * 16  # a full batch, four prompts of which fit into a step
    assert len(warmed(max_batch_size=100)) == 32  # the concurrency
    assert len(warmed(cache_tokens=6000)) == 10  # what the cache holds
    assert len(warmed(cache_tokens=1)) == 1
    assert len(warmed(size=4)) == 8  # a shard of the concurrency
    assert warmed(max_num_tokens=1) == [(100, 500)] * 16  # never longer than the measured outputs


def test_configured_number_of_warmup_requests() -> None:
    assert warmed(warmup_requests=0) == []
    assert len(warmed(warmup_requests=70)) == 70
    assert len(warmed(warmup_requests=9, size=4)) == 3
