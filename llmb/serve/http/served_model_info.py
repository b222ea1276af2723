"""The served model as requests meet it: its name, how their text becomes tokens, and how many fit."""

import asyncio
from dataclasses import dataclass

from llmb.serve.http.completion_request import CompletionRequest
from llmb.serve.http.field_checks import refuse
from llmb.serve.http.openai_error import ApiError
from llmb.serve.text.chat_template import ChatTemplate, TemplateMismatch
from llmb.serve.text.text_tokenizer import TextTokenizer

THREAD_CHARS = 8192  # longer texts are encoded in a thread, as they would delay all streams


@dataclass(frozen=True, kw_only=True)
class ServedModelInfo:
    """Facts of the model by which requests are checked."""

    name: str
    vocab: int
    max_model_len: int
    eos: frozenset[int]
    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None
    created: int

    def check_name(self, name: str | None) -> None:
        """Raise a 404 for another model; a request may leave the name out."""
        if name is not None and name != self.name:
            raise ApiError(
                f"model {name[:80]!r} does not exist; this server has {self.name!r}",
                404,
                param="model",
                code="model_not_found",
            )

    async def encode_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Return the tokens of every prompt of a request."""
        if request.is_chat:
            if self.chat_template is None:
                raise refuse("messages", "need a chat template, and this model has none; use /v1/completions")
            try:
                text = self.chat_template.render(request.messages)
            except TemplateMismatch as error:
                raise refuse("messages", f"do not fit the model's chat template: {error}") from None
            return [await self._encode(text, "messages", add_special_tokens=False)]
        return [
            await self._encode(prompt, "prompt", add_special_tokens=True)
            if isinstance(prompt, str)
            else self._checked_tokens(prompt)
            for prompt in request.prompts
        ]

    async def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise refuse(field, "is not valid Unicode: it holds half of a surrogate pair") from None
        encode = self.tokenizer.encode
        if len(text) > THREAD_CHARS:
            tokens = await asyncio.to_thread(encode, text, add_special_tokens)
        else:
            tokens = encode(text, add_special_tokens)
        if not tokens:
            raise refuse(field, "has no tokens")
        return tokens

    def _checked_tokens(self, tokens: list[int]) -> list[int]:
        if min(tokens) < 0 or max(tokens) >= self.vocab:
            raise refuse("prompt", f"has a token outside the vocabulary, 0 to {self.vocab - 1}")
        return tokens

    def max_tokens(self, request: CompletionRequest, prompt_tokens: int) -> int:
        """Return how many tokens an output may have; raise if they do not fit behind the prompt."""
        space = self.max_model_len - prompt_tokens
        limit = space if request.max_tokens is None else request.max_tokens
        if space < 1 or limit > space:
            requested = "" if request.max_tokens is None else f" and max_tokens={request.max_tokens}"
            raise ApiError(
                f"the prompt has {prompt_tokens} tokens{requested}, the maximum is {self.max_model_len} together",
                param="messages" if request.is_chat else "prompt",
                code="context_length_exceeded",
            )
        return limit
