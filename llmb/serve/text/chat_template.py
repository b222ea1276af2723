"""Chat template of a weights folder: messages to the text that the model was trained to continue.

    template = load_chat_template(folder)
    template.render([{"role": "user", "content": "Hello"}])

It is Jinja2 from chat_template.jinja or tokenizer_config.json, rendered in a sandbox, as it comes with the weights.
Random weights without a tokenizer have a plain one, `role: content` on a line each.
"""

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.config.serialization import convert, read_json
from llmb.errors import ConfigError

PLAIN_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


class TemplateMismatch(Exception):
    """Messages that the template refuses."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may insert."""

    template: Any
    special_tokens: dict[str, str] = field(default_factory=dict)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the prompt of a conversation, ready for the assistant's turn, or raise TemplateMismatch."""
        try:
            text: str = self.template.render(messages=messages, add_generation_prompt=True, **self.special_tokens)
        except Exception as error:  # whatever its own code raises
            raise TemplateMismatch(str(error)) from error
        return text


def load_chat_template(weights: str | None, has_tokenizer: bool) -> ChatTemplate | None:
    """Return the template of a weights folder; None: it has none, so that a chat must be refused."""
    if weights is None:
        return ChatTemplate(_compile(PLAIN_TEMPLATE, "the plain template"))
    folder = Path(weights)
    config: dict[str, Any] = {}
    if (folder / CONFIG_FILE).is_file():
        config = convert(dict[str, Any], read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
    text, where = _template_text(folder, config)
    if text is None:
        return None if has_tokenizer else ChatTemplate(_compile(PLAIN_TEMPLATE, "the plain template"))
    tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return ChatTemplate(_compile(text, where), {name: text for name, text in tokens.items() if text is not None})


def _template_text(folder: Path, config: dict[str, Any]) -> tuple[str | None, str]:
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8"), str(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template, f"{folder / CONFIG_FILE}.chat_template"


def _token_text(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _compile(text: str, where: str) -> Any:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError("chat templates need the package Jinja2: pip install Jinja2") from error

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise ConfigError(f"{where} is not a chat template: {error}") from error
