"""A completion from the checked request to the last byte of its response, streamed or whole."""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from llmb.serve.http.chunk_format import (
    ChunkFormat,
    ResponseHead,
    format_choice,
    format_logprobs,
    format_usage,
    usage_event,
)
from llmb.serve.http.completion_request import CompletionRequest
from llmb.serve.http.engine_router import EngineRouter
from llmb.serve.http.openai_error import ApiError, timed_out
from llmb.serve.http.output_text import OutputText
from llmb.serve.http.served_model_info import ServedModelInfo
from llmb.serve.http.server_metrics import ServerMetrics
from llmb.serve.http.sse_writer import SseWriter
from llmb.serve.request import SamplingParams

DONE_EVENT = "data: [DONE]\n\n"


@dataclass(frozen=True)
class CompletionService:
    """Serves requests of one model."""

    model: ServedModelInfo
    router: EngineRouter
    metrics: ServerMetrics
    request_timeout_s: float
    stall_timeout_s: float

    async def respond(self, http_request: web.Request, request: CompletionRequest) -> web.StreamResponse:
        """Serve a request; raise an ApiError if it gets no output."""
        if request.stream and http_request.version < (1, 1):
            raise ApiError("streams need HTTP/1.1")
        arrival = time.perf_counter()
        self.model.check_name(request.model)
        prompts = await self.model.encode_prompts(request)
        max_tokens = [self.model.max_tokens(request, len(prompt)) for prompt in prompts]
        self.router.check_capacity(len(prompts) * request.n)
        completion = Completion(self, request, [len(prompt) for prompt in prompts])
        try:
            completion.submit(prompts, max_tokens, arrival)
            del prompts  # the engine has them now
            if request.stream:
                return await completion.stream(http_request)
            return await completion.collect()
        finally:
            completion.cancel()


class Completion:
    """The outputs of one request on their way."""

    def __init__(self, service: CompletionService, request: CompletionRequest, prompt_tokens: list[int]):
        self._service, self._request, self._prompt_tokens = service, request, prompt_tokens
        self._router, self._metrics, self._model = service.router, service.metrics, service.model
        prefix = "chatcmpl-" if request.is_chat else "cmpl-"
        self._head = ResponseHead(
            prefix + os.urandom(12).hex(), int(time.time()), self._model.name, request.is_chat, request.include_usage
        )
        self._outputs: list[OutputText] = []
        self._request_ids: list[int] = []
        self._formats: list[ChunkFormat] = []
        self._writer: SseWriter | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def submit(self, prompts: list[list[int]], max_tokens: list[int], arrival: float) -> None:
        """Send every output to an engine."""
        request, model = self._request, self._model
        seed = random.getrandbits(63) if request.seed is None else request.seed
        eos = frozenset[int]() if request.ignore_eos else model.eos
        for number in range(len(prompts) * request.n):
            prompt, limit = prompts[number // request.n], max_tokens[number // request.n]
            params = SamplingParams(
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                seed=seed + number,
                logprobs=request.logprobs,
            )
            detokenizer = model.tokenizer.detokenizer()
            output = OutputText(number, detokenizer, request.stop, eos, arrival, self._metrics, self._on_change)
            self._outputs.append(output)
            self._request_ids.append(self._router.submit(prompt, limit, params, request.ignore_eos, output))
            self._metrics.request_prompt_tokens.observe(len(prompt))
            self._metrics.prompt_tokens += len(prompt)

    async def collect(self) -> web.Response:
        """Return the whole response when all outputs have ended."""
        async with _deadline(self._service.request_timeout_s):
            await self._done
        self._raise_error()
        choices = [
            format_choice(
                self._request.is_chat,
                output.index,
                output.take_text(),
                format_logprobs(self._model.tokenizer, self._request.is_chat, output.take_entries()),
                output.finish_reason or "",
            )
            for output in self._outputs
        ]
        body = self._head.fields(stream=False) | {"choices": choices, "usage": self._usage()}
        return web.Response(text=json.dumps(body), content_type="application/json")

    async def stream(self, http_request: web.Request) -> web.StreamResponse:
        """Stream all outputs; an error after the first byte becomes an event."""
        self._formats = [ChunkFormat(self._head, output.index) for output in self._outputs]
        writer = SseWriter(http_request, self._service.stall_timeout_s)
        await writer.open()
        self._writer = writer
        try:
            async with _deadline(self._service.request_timeout_s):
                await self._done
                await self._send_rest(writer)
            self._raise_error()
            if self._head.include_usage:
                writer.write(usage_event(self._head, self._usage()))
        except ApiError as error:
            writer.write(f"data: {json.dumps(error.body)}\n\n")
        except ConnectionError:  # it read nothing for too long, and was disconnected
            return writer.response
        writer.write(DONE_EVENT)
        self._metrics.chunks += writer.chunks
        await writer.close()
        return writer.response

    def cancel(self) -> None:
        """Cancel the outputs that have not ended: the client is gone, or the time is over."""
        for request_id, output in zip(self._request_ids, self._outputs, strict=False):
            if self._router.cancel(request_id):
                output.on_cancel()

    def _on_change(self, output: OutputText) -> None:
        if self._writer is not None and (output.has_text or output.finish_reason) and self._writer.is_writable():
            self._send(self._writer, output)
        if output.is_done and not self._done.done() and all(each.is_done for each in self._outputs):
            self._done.set_result(None)

    def _send(self, writer: SseWriter, output: OutputText) -> None:
        """Write what an output has, in one chunk; its end with its last text."""
        if output.sent_end:
            return
        logprobs: Any = None
        if output.entries:
            logprobs = format_logprobs(self._model.tokenizer, self._request.is_chat, output.take_entries())
        event = self._formats[output.index].event(
            output.take_text(),
            logprobs,
            output.finish_reason,
            self._output_usage(output) if self._request.continuous_usage else None,
            first=output.sent_chunks == 0,
        )
        output.sent_chunks += 1
        output.sent_end = output.finish_reason is not None
        writer.write(event)

    def _output_usage(self, output: OutputText) -> dict[str, Any]:
        prompt_tokens = self._prompt_tokens[output.index // self._request.n]
        return format_usage(prompt_tokens, output.num_tokens, output.cached_tokens)

    async def _send_rest(self, writer: SseWriter) -> None:
        """Write what outputs still hold because the client reads slowly."""
        for output in self._outputs:
            if not output.sent_end and output.error is None:
                await writer.wait_writable()
                self._send(writer, output)

    def _raise_error(self) -> None:
        for output in self._outputs:
            if output.error is not None:
                raise output.error

    def _usage(self) -> dict[str, Any]:
        cached = [output.cached_tokens for output in self._outputs[:: self._request.n]]
        cached_tokens = None if None in cached else sum(tokens or 0 for tokens in cached)
        completion_tokens = sum(output.num_tokens for output in self._outputs)
        return format_usage(sum(self._prompt_tokens), completion_tokens, cached_tokens)


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raise the API's error when so much time is over."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise timed_out(seconds) from None
