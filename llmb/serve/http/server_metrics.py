"""Figures of the server for Prometheus, under vLLM's names where the meaning is the same.

Tokens are counted in plain integers and lists, as thousands arrive each second; prometheus_client only formats them
when somebody asks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from llmb.serve.http.engine_router import EngineRouter

FINISH_REASONS = ("stop", "length", "abort", "error")
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
TOKEN_GAP_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_S = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class LatencyHistogram:
    """Counts by bucket; `bounds` are the buckets' upper ends."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return upper end and count of all values up to it, as Prometheus expects."""
        buckets, count = [], 0
        for bound, number in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            count += number
            buckets.append((bound, float(count)))
        return buckets


class ServerMetrics:
    """Everything that /metrics shows. Tokens and engine states are the router's."""

    def __init__(self, model_name: str, router: EngineRouter):
        self._labels = {"model_name": model_name}
        self._router = router
        self.prompt_tokens = 0
        self.chunks = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.responses: Counter[str] = Counter()  # by HTTP status
        self.time_to_first_token = LatencyHistogram(FIRST_TOKEN_S)
        self.inter_token_latency = LatencyHistogram(TOKEN_GAP_S)
        self.time_per_output_token = LatencyHistogram(TOKEN_GAP_S)
        self.queue_time = LatencyHistogram(FIRST_TOKEN_S)
        self.request_latency = LatencyHistogram(REQUEST_S)
        self.request_prompt_tokens = LatencyHistogram(TOKENS)
        self.request_generation_tokens = LatencyHistogram(TOKENS)

    def render(self) -> bytes:
        """Return the exposition text."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Any]:
        """Yield metric families; prometheus_client calls this."""
        yield from self._engine_families()
        yield self._counter("vllm:prompt_tokens", "Tokens of the prompts of accepted requests.", self.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", self._router.generation_tokens)
        yield self._labelled_counter("vllm:request_success", "Outputs ended.", "finished_reason", self.finished)
        yield self._labelled_counter("llmb:http_responses", "Responses to /v1 requests.", "status", self.responses)
        yield self._counter("llmb:sse_chunks", "Chunks of streamed responses.", self.chunks)
        histograms = (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens of an output.", self.inter_token_latency),
            ("vllm:time_per_output_token_seconds", "Mean gap between an output's tokens.", self.time_per_output_token),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end of an output.", self.request_latency),
            ("vllm:request_queue_time_seconds", "From arrival to the first scheduled step.", self.queue_time),
            ("vllm:request_prompt_tokens", "Tokens of a prompt.", self.request_prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens of an output.", self.request_generation_tokens),
        )
        for name, text, histogram in histograms:
            yield self._histogram(name, text, histogram)

    def _engine_families(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        engines = self._router.states()
        levels = (
            ("vllm:num_requests_running", "Sequences in the running batch.", lambda state: state.running),
            ("vllm:num_requests_waiting", "Sequences in the engine's queue.", lambda state: state.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Used KV blocks; 1 is all.",
                lambda state: state.blocks_used / max(1, state.blocks),
            ),
            ("llmb:kv_blocks_used", "KV blocks that sequences hold.", lambda state: state.blocks_used),
            ("llmb:kv_blocks", "KV blocks in all.", lambda state: state.blocks),
            ("llmb:slots_free", "Sequences that could run beside the running ones.", lambda state: state.free_slots),
            ("llmb:slots", "Sequences that can run at once.", lambda state: state.slots),
        )
        counters = (
            ("vllm:num_preemptions", "Sequences that lost their blocks.", lambda state: state.preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", lambda state: state.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens that were in the cache.", lambda state: state.prefix_hits),
        )
        for family, rows in ((GaugeMetricFamily, levels), (CounterMetricFamily, counters)):
            for name, text, read in rows:
                metric = family(name, text, labels=["model_name", "engine"])
                for engine, state in engines.items():
                    metric.add_metric([self._labels["model_name"], engine], read(state))
                yield metric

    def _counter(self, name: str, text: str, value: float) -> Any:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _labelled_counter(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Any:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for value, count in values.items():
            family.add_metric([*self._labels.values(), value], count)
        return family

    def _histogram(self, name: str, text: str, histogram: LatencyHistogram) -> Any:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.total)
        return family
