"""One output of a request: its tokens become text, stop strings end it, its times are measured."""

import time
from collections.abc import Callable

from llmb.serve.http.chunk_format import TokenEntry
from llmb.serve.http.openai_error import ApiError
from llmb.serve.http.server_metrics import ServerMetrics
from llmb.serve.request import FinishReason, TokenLogprobs
from llmb.serve.text.detokenizer import Detokenizer
from llmb.serve.text.stop_strings import StopMatcher

OnChange = Callable[["OutputText"], None]


class OutputText:
    """Receives the tokens of one output (engine_router.OutputReceiver) and holds what was not sent yet.

    `on_change` is called after a step that brought text, or the end.
    """

    __slots__ = (
        "_arrival", "_detokenizer", "_eos", "_first_token_at", "_last_token_at",
        "_matcher", "_metrics", "_offset", "_on_change", "_parts",
        "cached_tokens", "entries", "error", "finish_reason", "index", "num_tokens", "sent_chunks", "sent_end",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: list[str],
        eos: frozenset[int],
        arrival: float,
        metrics: ServerMetrics,
        on_change: OnChange,
    ):
        self.index = index
        self.num_tokens = 0
        self.cached_tokens: int | None = None
        self.entries: list[TokenEntry] = []
        self.finish_reason: str | None = None
        self.error: ApiError | None = None
        self.sent_chunks = 0
        self.sent_end = False
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._eos = eos  # tokens that end the output, and have no text
        self._metrics = metrics
        self._on_change = on_change
        self._parts: list[str] = []
        self._offset = 0  # characters so far
        self._arrival = arrival  # by time.perf_counter, of the HTTP request
        self._first_token_at = self._last_token_at = 0.0

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def has_text(self) -> bool:
        return bool(self._parts)

    def take_text(self) -> str:
        """Return the text that was not taken yet."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else "".join(parts)

    def take_entries(self) -> list[TokenEntry]:
        entries, self.entries = self.entries, []
        return entries

    def on_start(self, cached_tokens: int, now: float) -> None:
        self.cached_tokens = cached_tokens
        self._metrics.queue_time.observe(now - self._arrival)

    def on_token(self, token: int, logprobs: TokenLogprobs | None, now: float) -> bool:
        if self.num_tokens:
            self._metrics.inter_token_latency.observe(now - self._last_token_at)
        else:
            self._first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last_token_at = now
        self.num_tokens += 1
        if logprobs is not None:
            self.entries.append(TokenEntry(token, logprobs, self._offset))
        text = "" if token in self._eos else self._detokenizer.push(token)
        if not text:
            return False
        self._offset += len(text)
        if self._matcher is not None:
            text = self._matcher.push(text)
        if text:
            self._parts.append(text)
        if self._matcher is not None and self._matcher.matched:
            self._finish("stop")
            return True
        return False

    def on_end(self, finish_reason: FinishReason, now: float) -> None:
        text = self._detokenizer.finish()
        reason: str = finish_reason
        if self._matcher is not None:
            text = self._matcher.push(text) + self._matcher.finish()
            reason = "stop" if self._matcher.matched else reason
        if text:
            self._parts.append(text)
        self._finish(reason)

    def on_error(self, error: ApiError) -> None:
        self.error = error
        self._count("error")
        self._on_change(self)

    def on_cancel(self) -> None:
        """Count an output that was ended from outside: by its client, a timeout or the shutdown."""
        self.finish_reason = "abort"
        self._count("abort")

    def flush(self) -> None:
        self._on_change(self)

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._count(reason)
        if self.num_tokens > 1:
            seconds = self._last_token_at - self._first_token_at
            self._metrics.time_per_output_token.observe(seconds / (self.num_tokens - 1))

    def _count(self, reason: str) -> None:
        self._metrics.finished[reason] += 1
        self._metrics.request_latency.observe(time.perf_counter() - self._arrival)
        self._metrics.request_generation_tokens.observe(self.num_tokens)
