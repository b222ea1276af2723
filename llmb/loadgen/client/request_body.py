"""Bodies of OpenAI requests, rendered to bytes.

    RequestRenderer(settings, api_key).payload(request, history=()) -> b"POST /v1/completions HTTP/1.1..."

`ignore_eos` is an extension that vLLM, SGLang, TensorRT-LLM and llmb understand; others ignore or refuse it.
"""

import json
from collections.abc import Sequence
from typing import Any

from llmb.config.load_settings import LoadSettings, extra_fields
from llmb.loadgen.client.http_client import Target
from llmb.loadgen.request_source import LoadRequest

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Turn = tuple[Any, str]  # prompt and output of an earlier turn


class RequestRenderer:
    """Renders the requests of one load."""

    def __init__(self, settings: LoadSettings, api_key: str | None):
        self._settings = settings
        target = Target.from_url(settings.base_url)
        self._head = target.head(ROUTES[settings.endpoint], api_key) + b"Content-Type: application/json\r\n"
        fields: dict[str, Any] = {"model": settings.model, "temperature": settings.temperature}
        if settings.streaming:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if settings.ignore_eos:
            fields["ignore_eos"] = True
        fields = {
            name: value for name, value in (fields | extra_fields(settings.extra_body)).items() if value is not None
        }
        self._limit = "max_completion_tokens" if settings.max_completion_tokens else "max_tokens"
        self._fields = json.dumps(fields, separators=(",", ":")).encode()[:-1]  # the last brace follows the rest

    def payload(self, request: LoadRequest, history: Sequence[Turn] = ()) -> bytes:
        """Return head and body of a request; `history`: earlier turns of its session."""
        fields: dict[str, Any] = {self._limit: request.output_tokens}
        if self._settings.endpoint == "chat":
            fields["messages"] = _messages(request.prompt, history)
        else:
            fields["prompt"] = _prompt(request.prompt, history)
        body = self._fields + b"," + json.dumps(fields, separators=(",", ":")).encode()[1:]
        return b"%sContent-Length: %d\r\n\r\n%s" % (self._head, len(body), body)


def _messages(prompt: Any, history: Sequence[Turn]) -> list[dict[str, str]]:
    messages = []
    for question, reply in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return messages + (list(prompt) if isinstance(prompt, tuple) else [{"role": "user", "content": prompt}])


def _prompt(prompt: Any, history: Sequence[Turn]) -> Any:
    """Return a text with the turns before it; token ids have the earlier ids, as outputs come back as text."""
    if isinstance(prompt, str):
        return " ".join([*(f"{question} {reply}" for question, reply in history), prompt])
    return [*(token for question, _ in history for token in question), *prompt]
