"""Errors as OpenAI's API returns them: {"error": {"message", "type", "param", "code"}}, one clear line each."""

import json
from collections.abc import Mapping

from aiohttp import web


class ApiError(Exception):
    """A request that gets no output, with the HTTP status of its response."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, headers=self.headers, text=json.dumps(self.body), content_type="application/json"
        )


def engine_failed() -> ApiError:
    return ApiError("the engine failed; the server is shutting down", 500, "server_error", code="engine_failed")


def shutting_down() -> ApiError:
    return ApiError(
        "the server is shutting down",
        503,
        "service_unavailable",
        code="shutting_down",
        headers={"Retry-After": "30", "Connection": "close"},
    )


def queue_full(max_queue: int) -> ApiError:
    return ApiError(
        f"{max_queue} requests are waiting already; try again later",
        429,
        "rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(f"the request took longer than {seconds:g} s", 504, "timeout_error", code="request_timeout")
