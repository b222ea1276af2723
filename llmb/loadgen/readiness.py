"""Waits until a server is ready, and reads what it says about itself: its models, its prefix-cache counters.

wait_ready("http://localhost:8000", "llama", api_key=None, timeout_s=60)
"""

import http.client
import json
import re
import ssl
import time
from dataclasses import dataclass
from typing import Any

from llmb.errors import LaunchError, UnknownName
from llmb.loadgen.client.http_client import Target
from llmb.loadgen.client.request_body import ROUTES

POLL_S = 0.5
REQUEST_S = 5.0
NO_SUCH_ROUTE = (404, 405, 501)
# Of vLLM and those that follow its names: vllm:prefix_cache_hits_total{engine="0",...} 123.0
_COUNTER = re.compile(r"^vllm:(?:gpu_)?prefix_cache_(queries|hits)(?:_total)?(?:\{[^}]*\})?\s+([\d.eE+]+)\s*$", re.M)


@dataclass(frozen=True)
class PrefixCounters:
    """Input tokens looked up in the prefix cache of a server so far, and those found."""

    queries: float
    hits: float


def wait_ready(url: str, model: str, api_key: str | None, timeout_s: float, route: str = ROUTES["completions"]) -> None:
    """Return when the server responds to /v1/models, /health, or without these to requests of the load's route.

    Refuses a model that it does not list, and at once what waiting does not mend: a key, a redirect, a certificate.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        problem, statuses = "", []
        for path in ("/v1/models", "/health"):
            status, body, trouble = _try(url, path, api_key)
            if status == 200:
                if path == "/v1/models":
                    _check_model(url, model, body)
                return
            statuses.append(status)
            problem = trouble
        if all(status in NO_SUCH_ROUTE for status in statuses):  # a gateway may have nothing but the load's route
            status, _, problem = _try(url, route, api_key, {"model": model, "max_tokens": 1})
            if status and status < 500 and status not in NO_SUCH_ROUTE:
                return
        if time.monotonic() >= deadline:
            raise LaunchError(f"no server is ready at {url} after {timeout_s:g} s: {problem}")
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def _try(url: str, path: str, api_key: str | None, content: Any = None) -> tuple[int, bytes, str]:
    """Return status, body and what is wrong with them; raise on what stays wrong. Status 0: there was no response."""
    try:
        response, body = _request(url, path, api_key, content)
    except ssl.SSLCertVerificationError as error:
        remedy = "trust it by SSL_CERT_FILE=FILE in the environment"
        raise LaunchError(f"{url}: certificate verify failed: {error.verify_message}; {remedy}") from error
    except (OSError, http.client.HTTPException) as error:
        if getattr(error, "reason", None) == "WRONG_VERSION_NUMBER":
            raise LaunchError(f"{url} does not speak https; write http://") from error
        return 0, b"", getattr(error, "strerror", None) or str(error) or type(error).__name__
    status, location = response.status, response.getheader("Location")
    if status in (401, 403):
        raise LaunchError(f"{url} refuses the key: status {status}; name its variable with --api-key-env")
    if 300 <= status < 400 and location:
        raise LaunchError(f"{url} redirects {path} to {location}; give the address behind it as base URL")
    return status, body, f"{path} responds with status {status}"


def get(url: str, route: str, api_key: str | None) -> tuple[int, bytes]:
    """Return status and body of a GET request."""
    response, body = _request(url, route, api_key)
    return response.status, body


def _request(url: str, path: str, api_key: str | None, content: Any = None) -> tuple[http.client.HTTPResponse, bytes]:
    """Send a request, with content a POST request, and return its response."""
    target = Target.from_url(url)
    if target.tls:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            target.host, target.port, timeout=REQUEST_S, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=REQUEST_S)
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        body = None if content is None else json.dumps(content)
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request("GET" if body is None else "POST", target.path + path, body, headers)
        response = connection.getresponse()
        return response, response.read()
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
