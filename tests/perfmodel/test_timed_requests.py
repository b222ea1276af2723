"""Columns of requests are what each request alone gives, whether all values are known or not."""

import math
import random
from array import array

import pytest

from llmb.events import RequestDone
from llmb.perfmodel import load_metrics, metrics
from llmb.perfmodel.samples import order_statistics
from llmb.perfmodel.samples.timed_requests import TimedRequests


def request(arrival: float, first: float | None, times: tuple[float, ...], end: float, out: int) -> RequestDone:
    return RequestDone(
        request=0, arrival=arrival, first_token=first, token_times=times, end=end, input_tokens=100, output_tokens=out
    )


def _plain(count: int) -> list[RequestDone]:
    chance = random.Random(1)
    requests = []
    for n in range(count):
        times = [n / 10 + 0.02]
        for _ in range(chance.randrange(1, 5)):
            times.append(times[-1] + chance.random())
        requests.append(request(n / 10, times[0], tuple(times), times[-1], len(times)))
    return requests


ODD = {
    "none": [],
    "not streamed": [request(3.0, None, (), 4.0, 5)],
    "one token": [request(3.0, 3.5, (3.5,), 3.5, 1)],
    "no token": [request(3.0, 3.5, (), 3.5, 0)],
    "backwards": [request(3.0, 2.5, (), 2.0, 5)],
    "first token at the end": [request(3.0, 3.5, (3.5,), 3.5, 9)],
    "not finite": [request(math.nan, 3.5, (3.5, math.inf), 4.0, 5)],
    "tokens out of order": [request(3.0, 3.4, (3.5, 3.3, 3.6), 3.6, 5)],
    "out of range together": [request(0.0, 1e305, (1e305,), 1e305, 2)] * 3,
}


@pytest.mark.parametrize("kind", ODD)
def test_columns_are_those_of_each_request(kind):
    requests = _plain(40) + ODD[kind]
    columns = TimedRequests(requests)
    assert list(columns.ttft_ms) == [metrics.ttft_ms(each) for each in requests]
    assert list(columns.e2e_ms) == [metrics.e2e_ms(each) for each in requests]
    assert list(columns.tpot_ms) == [metrics.tpot_ms(each) for each in requests]
    assert list(metrics.pooled_itl_ms(requests)) == [gap for each in requests for gap in metrics.itl_ms(each)]
    speeds = [each.output_tokens * 1000.0 / ms if (ms := metrics.e2e_ms(each)) else None for each in requests]
    assert list(metrics.user_throughputs(requests)) == [speed for speed in speeds if speed]
    assert isinstance(columns.tpot_ms, array) is (kind in ("none", "first token at the end", "tokens out of order"))


@pytest.mark.parametrize("disorder", [False, True])
def test_steady_rate_counts_every_token_of_the_window(disorder):
    requests = _plain(60)
    if disorder:
        requests[30].token_times = tuple(reversed(requests[30].token_times))
    steady = metrics.steady_state(requests)
    start, end = steady.start_s, steady.end_s
    tokens = sum(start < time <= end for each in requests for time in each.token_times)
    assert TimedRequests(requests).has_ordered_token_times is not disorder
    assert steady.output_tokens_per_s == pytest.approx(tokens / (end - start))


def test_columns_are_shared():
    columns = TimedRequests.of(_plain(3))
    assert TimedRequests.of(columns) is columns
    assert columns.e2e_ms is columns.e2e_ms
    assert [each.end for each in columns] == list(columns.ends)


def test_intervals_of_many_samples_are_those_of_sorted_ones(monkeypatch):
    samples = [random.Random(2).paretovariate(2) for _ in range(3001)]
    exact = load_metrics.latency_intervals(samples)
    monkeypatch.setattr(order_statistics, "MOST_SORTED", 100)
    assert load_metrics.latency_intervals(samples) == exact
