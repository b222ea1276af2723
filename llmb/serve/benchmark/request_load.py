"""Request arrivals: all at once, at a fixed concurrency, where a new request arrives whenever one ends, or at a rate.

    RequestLoad(list(enumerate(prompts)), concurrency).shard(index=1, size=4)

Nothing here reads a clock: ranks that compute the same requests must send them in the same order between the same
steps. Ranks that have their own requests (attention data parallelism) take them round-robin. Requests at a rate have
the times of `llmb/loadgen/arrivals.py`, on a single rank.
"""

from dataclasses import dataclass, replace
from itertools import islice

from llmb.config.spec import Inference
from llmb.loadgen.arrivals import Arrivals, arrival_times
from llmb.loadgen.prompt_sampler import Prompt
from llmb.serve.benchmark.prompts import PromptSampler

FULL_BATCH_STEPS = 32  # steps of the warm-up in which all of its requests are computed together


@dataclass(frozen=True)
class RequestLoad:
    """Prompts with their request ids, in order of arrival, and the maximum concurrency."""

    prompts: list[tuple[int, Prompt]]
    concurrency: int
    due_s: tuple[float, ...] | None = None  # when each is due; none: when another has ended

    def shard(self, index: int, size: int) -> "RequestLoad":
        """Return the load of one data-parallel shard, so that all shards together keep to the concurrency.

        Some have no requests if the concurrency is lower than the number of shards.
        """
        senders = min(size, self.concurrency)
        if index >= senders:
            return RequestLoad([], 0)
        concurrency = self.concurrency // senders + (index < self.concurrency % senders)
        due_s = None if self.due_s is None else self.due_s[index::senders]
        return RequestLoad(self.prompts[index::senders], concurrency, due_s)


def measured_load(work: Inference, prompts: list[Prompt]) -> RequestLoad:
    """Return the measured load: at the rate of the run if it has one, else at its concurrency."""
    if work.rate is None:
        return make_load(prompts, work.concurrency)
    arrivals = Arrivals("poisson" if work.burstiness == 1 else "gamma", work.rate, work.burstiness)
    due_s = tuple(islice(arrival_times(arrivals, work.seed), len(prompts)))
    return replace(make_load(prompts, work.max_batch_size), due_s=due_s)  # the warm-up fills the batch


def make_load(prompts: list[Prompt], concurrency: int) -> RequestLoad:
    """Return the load at this concurrency; below 1 it is not limited, so that all requests arrive at once."""
    limit = len(prompts) if concurrency < 1 else min(concurrency, len(prompts))
    return RequestLoad(list(enumerate(prompts)), limit)


def warmup_load(
    work: Inference, load: RequestLoad, size: int, cache_tokens: int, sampler: PromptSampler
) -> RequestLoad:
    """Return the warm-up of one of `size` shards: a full batch, unless the number of requests is configured.

    The requests have the lengths of the measured ones and other tokens. Their outputs end when all of them have been
    computed together for a while: the steps beyond that are alike.
    """
    if work.warmup_requests is not None:
        count = -(-work.warmup_requests // size)
    else:
        cached = cache_tokens * len(load.prompts) // max(1, sum(prompt.num_tokens for _, prompt in load.prompts))
        count = min(load.concurrency, work.max_batch_size, max(1, cached))
    measured = [(len(prompt.tokens), prompt.output_tokens) for _, prompt in load.prompts]
    lengths = [measured[i % len(measured)] for i in range(count)] if measured else []
    prefill_steps = -(-sum(isl for isl, _ in lengths) // work.max_num_tokens)  # until the last request has begun
    prompts = sampler.prompts((isl, min(osl, prefill_steps + FULL_BATCH_STEPS)) for isl, osl in lengths)
    return make_load(prompts, load.concurrency)


@dataclass(frozen=True)
class DataParallelShard:
    """This rank's shard of the requests, and whether the rank records them.

    Ranks count along tensor, then pipeline parallelism. Ranks that compute the same requests all drive them, and the
    first of them records.
    """

    index: int
    size: int
    records: bool


def data_parallel_shard(rank: int, tp: int, attention_dp: bool) -> DataParallelShard:
    """Return the shard of a rank."""
    if attention_dp:
        return DataParallelShard(rank % tp, tp, records=rank < tp)
    return DataParallelShard(0, 1, records=rank == 0)
