"""Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics; every error is OpenAI's JSON.

Prompts and outputs are never logged.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Middleware

from llmb.serve.http.api_key import check_authorization
from llmb.serve.http.completion_request import CompletionRequest, parse_chat, parse_completion
from llmb.serve.http.completion_service import CompletionService
from llmb.serve.http.openai_error import ApiError, shutting_down

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY_TIMEOUT_S = 60.0  # for a client to send its body
ENGINE_STALL_S = 60.0  # without a step although there are requests
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class ApiRoutes:
    """Handlers of all endpoints."""

    service: CompletionService
    api_key: str | None = field(repr=False)
    draining: bool = False
    num_active: int = 0  # requests whose response is not complete

    def build_app(self, max_body_bytes: int) -> web.Application:
        app = web.Application(middlewares=[self._middleware()], client_max_size=max_body_bytes)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _completions(self, http_request: web.Request) -> web.StreamResponse:
        return await self._complete(http_request, parse_completion)

    async def _chat_completions(self, http_request: web.Request) -> web.StreamResponse:
        return await self._complete(http_request, parse_chat)

    async def _complete(
        self, http_request: web.Request, parse: Callable[[bytes], CompletionRequest]
    ) -> web.StreamResponse:
        if self.draining:
            raise shutting_down()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await http_request.read()
        except TimeoutError:
            raise ApiError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", 408) from None
        self.num_active += 1
        try:
            return await self.service.respond(http_request, parse(body))
        finally:
            self.num_active -= 1

    async def _models(self, http_request: web.Request) -> web.Response:
        model = self.service.model
        card = {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "llmb",
            "max_model_len": model.max_model_len,
            "tokenizer": "byte-level fallback" if model.tokenizer.is_fallback else "tokenizer.json",
        }
        name = http_request.match_info.get("name")
        if name is None:
            return web.json_response({"object": "list", "data": [card]})
        if name != model.name:
            raise ApiError(f"model {name[:80]!r} does not exist", 404, param="model", code="model_not_found")
        return web.json_response(card)

    async def _health(self, _: web.Request) -> web.Response:
        router, status = self.service.router, "ok"
        if router.failed or self.draining:
            status = "failed" if router.failed else "draining"
        elif router.is_stalled(ENGINE_STALL_S):
            status = "stalled"
        return web.json_response({"status": status}, status=200 if status == "ok" else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        try:
            body = self.service.metrics.render()
        except ImportError:
            raise ApiError("metrics need the package prometheus-client on the server", 501, "server_error") from None
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    def _middleware(self) -> Middleware:
        @web.middleware
        async def api_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_api = request.path.startswith("/v1/")
            response = await self._guarded(request, handler, is_api)
            if is_api:
                self.service.metrics.responses[str(response.status)] += 1
            return response

        return api_errors

    async def _guarded(self, http_request: web.Request, handler: Handler, is_api: bool) -> web.StreamResponse:
        """Call a handler; whatever it raises becomes a response, without a word of the request in the log."""
        try:
            if is_api:
                check_authorization(self.api_key, http_request.headers.get("Authorization", ""))
            return await handler(http_request)
        except ApiError as error:
            return error.response()
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is larger than {http_request.client_max_size} bytes"
            return ApiError(message, 413, code="body_too_large").response()
        except web.HTTPException as error:
            endpoints = "/v1/completions, /v1/chat/completions, /v1/models, /health and /metrics"
            return ApiError(
                f"{http_request.method} is not possible here: {error.reason}; there are {endpoints}", error.status
            ).response()
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
            print(f"internal error: {type(error).__name__} at {where}", flush=True)  # its text may quote a prompt
            return ApiError("internal error; the server's log says where", 500, "server_error").response()
