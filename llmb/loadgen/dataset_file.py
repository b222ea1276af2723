"""Datasets: files of requests.

    {"prompt": "Once upon a time", "output_tokens": 128}                              JSONL, one request per line
    {"input_ids": [17, 4, 99], "output_tokens": 128}
    {"messages": [{"role": "user", "content": "Why?"}], "output_tokens": 128}
    [{"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}]      ShareGPT

The JSONL lines are those of trtllm-bench. Of a ShareGPT conversation the first question is the prompt, and the length
of its reply the number of output tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmb.config.serialization import parse_json
from llmb.errors import ConfigError
from llmb.loadgen.lengths import LONGEST, read_text
from llmb.loadgen.prompt_text import TextWriter

Messages = tuple[dict[str, str], ...]
LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DatasetRequest:
    """One request of a dataset: a text, token ids or chat messages."""

    prompt: str | Sequence[int] | Messages
    output_tokens: int

    @property
    def is_ids(self) -> bool:
        return not isinstance(self.prompt, (str, tuple))


def read_dataset_file(path: Path, writer: TextWriter, default_output: int | None = None) -> list[DatasetRequest]:
    """Read all requests of a file; raise a ConfigError that names the first invalid entry.

    `default_output`: output tokens of a request that does not name them.
    """
    requests = []
    for where, entry in dataset_entries(path):
        try:
            request = parse_entry(entry, writer, default_output)
        except ConfigError as error:
            raise ConfigError(f"{path} {where}: {error}") from error
        requests += [request] if request is not None else []
    if not requests:
        raise ConfigError(f"the dataset {path} is empty")
    return requests


def dataset_entries(path: Path) -> list[tuple[str, Any]]:
    """Return the entries of a JSON or JSONL file, each with its place in it."""
    text = read_text(path, "the dataset ")
    if text.lstrip().startswith("["):
        try:
            parsed = parse_json(text)
        except ValueError:
            parsed = None
        if isinstance(parsed, list) and all(isinstance(entry, dict) for entry in parsed):
            return [(f"entry {number}", entry) for number, entry in enumerate(parsed, start=1)]
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                entries.append((f"line {number}", parse_json(line)))
            except ValueError as error:
                raise ConfigError(f"{path} line {number}: {error}") from error
    return entries


def parse_entry(entry: Any, writer: TextWriter, default_output: int | None = None) -> DatasetRequest | None:
    """Return the request of an entry; None for a conversation without a question and a reply."""
    if not isinstance(entry, dict):
        raise ConfigError('expected an object like {"prompt": "...", "output_tokens": 128}')
    if entry.get("lora_request") is not None:
        raise ConfigError("lora_request is not served")
    if "conversations" in entry or "conversation" in entry:
        return _share_gpt(entry.get("conversations") or entry.get("conversation"), writer)
    named = [name for name in ("prompt", "input_ids", "messages") if name in entry]
    if len(named) != 1:
        raise ConfigError("expected one of prompt, input_ids and messages")
    output = entry.get("output_tokens", default_output)
    if type(output) is not int:
        raise ConfigError(f"output_tokens: expected a whole number, got {output!r}")
    if not 1 <= output <= LONGEST:
        raise ConfigError(f"output_tokens={output}: must be at least 1")
    value = entry[named[0]]
    if named[0] == "input_ids":
        if not isinstance(value, list) or any(type(token) is not int for token in value):
            raise ConfigError("input_ids: expected a list of whole numbers")
        if not value:
            raise ConfigError("the prompt is empty")
        if invalid := [token for token in value if not 0 <= token <= LARGEST_ID]:
            raise ConfigError(f"input_ids: {invalid[0]} is not a token id")
        return DatasetRequest(array("i", value), output)
    if named[0] == "messages":
        return DatasetRequest(_messages(value), output)
    if not isinstance(value, str):
        raise ConfigError(f"prompt: expected text, got {value!r:.60}")
    if not value:
        raise ConfigError("the prompt is empty")
    return DatasetRequest(value, output)


def _messages(value: Any) -> Messages:
    valid = isinstance(value, list) and bool(value)
    if not valid or any(not isinstance(m, dict) or not isinstance(m.get("content"), str) for m in value):
        raise ConfigError("messages: expected a list of objects with role and content")
    return tuple({"role": str(m.get("role", "user")), "content": m["content"]} for m in value)


def _share_gpt(turns: Any, writer: TextWriter) -> DatasetRequest | None:
    """Return the first question with the length of its reply; None for a conversation without both."""
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    question, reply = (text if isinstance(text, str) and text.strip() else None for text in texts)
    if question is None or reply is None:
        return None
    return DatasetRequest(question, max(1, writer.count(reply, special=False)))
