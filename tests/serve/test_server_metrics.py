"""Prometheus figures: histograms, names, labels."""

from types import SimpleNamespace

from live_server import read_metrics

from llmb.serve.http.engine_messages import EngineState
from llmb.serve.http.server_metrics import LatencyHistogram, ServerMetrics


def test_histogram_counts_up_to_and_including_a_bound():
    histogram = LatencyHistogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 7.65


def test_names_are_those_of_vllm():
    state = EngineState(waiting=1, running=2, blocks_used=3, blocks=12, prefix_queries=9, prefix_hits=4)
    router = SimpleNamespace(states=lambda: {"0": state, "1": EngineState()}, generation_tokens=5)
    metrics = ServerMetrics("m", router)
    metrics.time_to_first_token.observe(0.3)
    metrics.finished["stop"] += 1
    text = metrics.render().decode()
    figures = read_metrics(text)
    assert "# TYPE vllm:generation_tokens_total counter" in text
    assert figures['vllm:num_requests_running{engine="0"}'] == 2
    assert figures['vllm:num_requests_waiting{engine="0"}'] == 1
    assert figures['vllm:kv_cache_usage_perc{engine="0"}'] == 0.25
    assert figures['vllm:kv_cache_usage_perc{engine="1"}'] == 0
    assert figures['vllm:prefix_cache_hits_total{engine="0"}'] == 4
    assert figures["vllm:generation_tokens_total"] == 5
    assert figures['vllm:request_success_total{finished_reason="stop"}'] == 1
    assert figures['vllm:time_to_first_token_seconds_bucket{le="0.5"}'] == 1
    assert figures['vllm:time_to_first_token_seconds_bucket{le="0.25"}'] == 0
