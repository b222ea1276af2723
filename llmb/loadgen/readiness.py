"""Waits until a server is ready, and reads what it says about itself: its models, its prefix-cache counters.

wait_ready("http://localhost:8000", "llama", api_key=None, timeout_s=60)
"""

import http.client
import json
import re
import ssl
import time
from dataclasses import dataclass

from llmb.errors import LaunchError, UnknownName
from llmb.loadgen.client.http_client import Target

POLL_S = 0.5
REQUEST_S = 5.0
# Of vLLM and those that follow its names: vllm:prefix_cache_hits_total{engine="0",...} 123.0
_COUNTER = re.compile(r"^vllm:(?:gpu_)?prefix_cache_(queries|hits)(?:_total)?(?:\{[^}]*\})?\s+([\d.eE+]+)\s*$", re.M)


@dataclass(frozen=True)
class PrefixCounters:
    """Input tokens looked up in the prefix cache of a server so far, and those found."""

    queries: float
    hits: float


def wait_ready(url: str, model: str, api_key: str | None, timeout_s: float) -> None:
    """Return when the server responds to /health or /v1/models; refuse a model that it does not list."""
    deadline = time.monotonic() + timeout_s
    while True:
        status, body, problem = 0, b"", ""
        for route in ("/v1/models", "/health"):
            try:
                status, body = get(url, route, api_key)
            except (OSError, http.client.HTTPException) as error:
                problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
                continue
            if status == 200:
                if route == "/v1/models":
                    _check_model(url, model, body)
                return
            problem = f"{route} responds with status {status}"
            if status in (401, 403):
                raise LaunchError(f"{url} refuses the key: status {status}; name its variable with --api-key-env")
        if time.monotonic() >= deadline:
            raise LaunchError(f"no server is ready at {url} after {timeout_s:g} s: {problem}")
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def get(url: str, route: str, api_key: str | None) -> tuple[int, bytes]:
    """Return status and body of a GET request."""
    target = Target.from_url(url)
    if target.tls:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            target.host, target.port, timeout=REQUEST_S, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=REQUEST_S)
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("GET", target.path + route, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _check_model(url: str, model: str, body: bytes) -> None:
    try:
        names = [entry["id"] for entry in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return  # a list in another form says nothing
    if names and model not in names:
        raise UnknownName(f"model at {url}:", model, names)


def server_version(url: str, api_key: str | None) -> str | None:
    """Return the version that the server reports at /version, as vLLM does; None: it is not ready, or reports none."""
    try:
        status, body = get(url, "/version", api_key)
        version = json.loads(body)["version"] if status == 200 else None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None


def prefix_counters(url: str, api_key: str | None) -> PrefixCounters | None:
    """Read the prefix-cache counters of /metrics; None where the server has none."""
    try:
        status, body = get(url, "/metrics", api_key)
    except (OSError, http.client.HTTPException):
        return None
    return parse_counters(body.decode(errors="replace")) if status == 200 else None


def parse_counters(text: str) -> PrefixCounters | None:
    """Sum the counters over engines."""
    totals: dict[str, float] = {}
    for name, value in _COUNTER.findall(text):
        totals[name] = totals.get(name, 0.0) + float(value)
    return PrefixCounters(totals["queries"], totals["hits"]) if len(totals) == 2 else None
