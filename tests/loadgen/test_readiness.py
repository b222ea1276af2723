"""Counters of other servers, URLs, and what the pacer promises."""

import asyncio
from time import perf_counter

import pytest

from llmb.config.load_settings import check_url, without_credentials
from llmb.errors import ConfigError
from llmb.loadgen.client.http_client import Target
from llmb.loadgen.event_loop import run_loop
from llmb.loadgen.pacer import Pacer
from llmb.loadgen.readiness import PrefixCounters, parse_counters

METRICS = """# HELP vllm:prefix_cache_queries_total Number of queried tokens
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1.5e2
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0
"""


def test_prefix_counters_are_summed_over_engines():
    assert parse_counters(METRICS) == PrefixCounters(250.0, 30.0)
    assert parse_counters("vllm:prefix_cache_queries_total 1\n") is None


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://h:8000/", "http://h:8000"),
        ("https://h/v1", "https://h"),
        ("http://[::1]:80/proxy/v1/", "http://[::1]:80/proxy"),
        ("http://user:pw@h:1", "http://h:1"),
    ],
)
def test_base_urls_have_one_form(url, normal):
    assert check_url(url) == normal


@pytest.mark.parametrize("url", ["", "h:80", "file:///x", "http://", "http://h?x=1", "http://u:pw@"])
def test_what_is_no_base_url_is_refused_without_its_password(url):
    with pytest.raises(ConfigError) as caught:
        check_url(url)
    assert "pw" not in str(caught.value)
    assert without_credentials("https://a:b@h/p") == "https://h/p"


def test_targets_and_heads():
    target = Target.from_url("https://h:444/x")
    assert (target.host, target.port, target.tls) == ("h", 444, True)
    head = target.head("/v1/models", "key", "GET")
    assert head.startswith(b"GET /x/v1/models HTTP/1.1\r\nHost: h:444\r\n")
    assert b"Authorization: Bearer key\r\n" in head


def test_the_pacer_is_never_early():
    async def fire() -> list[float]:
        errors: list[float] = []
        done = asyncio.Event()
        deadline = 0.0

        def expired() -> None:
            nonlocal deadline
            errors.append(perf_counter() - deadline)
            if len(errors) == 5:
                done.set()
            else:
                deadline = perf_counter() + 0.003
                pacer.set(deadline)

        pacer = Pacer(asyncio.get_running_loop(), expired)
        deadline = perf_counter() + 0.003
        pacer.set(deadline)
        await done.wait()
        pacer.close()
        return errors

    assert all(error > -1e-4 for error in run_loop(fire()))
