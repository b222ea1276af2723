"""Counters of other servers, URLs, and what the pacer promises."""

import asyncio
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from time import perf_counter
from typing import ClassVar

import pytest

from llmb.config.load_settings import LoadSettings, check_load, check_url, without_credentials
from llmb.errors import ConfigError, LaunchError
from llmb.loadgen.client.http_client import Target
from llmb.loadgen.client.request_body import ROUTES
from llmb.loadgen.event_loop import run_loop
from llmb.loadgen.pacer import Pacer
from llmb.loadgen.readiness import PrefixCounters, parse_counters, wait_ready

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


def test_settings_never_hold_a_password():
    with pytest.raises(ConfigError, match=r"write it as http://h:1, without a password or /v1$"):
        check_load(LoadSettings(base_url="http://user:secret@h:1/v1", model="m", concurrency=1, num_requests=1))


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


class ScriptedServer(BaseHTTPRequestHandler):
    """Server with a status and headers for each method and path; 404 without a body for others."""

    responses: ClassVar[dict[str, tuple[int, dict[str, str]]]] = {}

    def do_GET(self) -> None:
        status, headers = self.responses.get(f"{self.command} {self.path}", (404, {}))
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def scripted():
    """Start a server with some responses; return its URL."""
    servers = []

    def start(responses: dict[str, tuple[int, dict[str, str]]]) -> str:
        handler = type("Handler", (ScriptedServer,), {"responses": responses})
        server = HTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_gateway_without_models_and_health_is_ready_if_it_has_the_route(scripted):
    url = scripted({"POST /v1/chat/completions": (400, {})})
    wait_ready(url, "m", None, 0.0, ROUTES["chat"])
    with pytest.raises(LaunchError, match=r"after 0 s: /v1/completions responds with status 404$"):
        wait_ready(url, "m", None, 0.0, ROUTES["completions"])


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            (307, {"Location": "http://other/v1/models"}),
            "redirects /v1/models to http://other/v1/models; give the addr",
        ),
        ((401, {}), "refuses the key: status 401"),
    ],
)
def test_what_waiting_does_not_mend_ends_the_wait(scripted, response, message):
    url = scripted({"GET /v1/models": response})
    start = perf_counter()
    with pytest.raises(LaunchError, match=message):
        wait_ready(url, "m", None, 30.0)
    assert perf_counter() - start < 10
