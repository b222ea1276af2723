"""What the benchmark asks: synthetic prompts of given lengths, or the requests of a file.

    {"task_id": 0, "input_ids": [17, 4, 99], "output_tokens": 128}
    {"task_id": 1, "prompt": "Once upon a time", "output_tokens": 128}

The lines are those of trtllm-bench. A text needs the tokenizer of the weights' folder. Synthetic ids are uniform over
the vocabulary without what ends an answer; a prompt is never drawn twice as long as there are others of its length, so
that nothing a cache keeps can help. All is checked before anything is built.
"""

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmb.config.serialization import convert, read_json
from llmb.config.spec import Inference, Model
from llmb.errors import ConfigError

DRAWS = 100  # of one prompt, until it counts as impossible to find one that is new


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how many are to follow."""

    tokens: Sequence[int]
    output_tokens: int

    @property
    def total(self) -> int:
        """Tokens of the sequence when it ends."""
        return len(self.tokens) + self.output_tokens


@dataclass(frozen=True)
class Terms:
    """What a model takes: ids below `vocab`, of which `eos` end an answer, at most `context` of them where known."""

    vocab: int
    eos: frozenset[int] = frozenset()
    context: int | None = None
    folder: Path | None = None  # of its weights

    def check(self, prompts: Iterable[Prompt], source: str) -> None:
        """Whether every request fits into the context."""
        for number, prompt in enumerate(prompts, start=1):
            if self.context is not None and prompt.total > self.context:
                raise ConfigError(
                    f"{source}: request {number} has {len(prompt.tokens)} + {prompt.output_tokens} tokens, more than "
                    f"the {self.context} of the model's context (max_position_embeddings in {self.folder})"
                )


def terms_of(model: Model, weights: str | None) -> Terms:
    """From the folder of the weights; random ones have no end and no limit."""
    if weights is None:
        return Terms(model.vocab)
    folder = Path(weights)
    where = f"{folder}/config.json"
    told = convert(dict[str, Any], read_json(folder / "config.json"), where)
    ends = told.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return Terms(
        vocab=model.vocab,
        eos=frozenset(convert(tuple[int, ...], listed, f"{where}.eos_token_id")),
        context=convert(int | None, told.get("max_position_embeddings"), f"{where}.max_position_embeddings"),
        folder=folder,
    )


def measured_prompts(work: Inference, terms: Terms, draw: "Draw") -> list[Prompt]:
    """The requests that are measured: those of the dataset, of which there may be fewer than asked for, or drawn."""
    if work.dataset is not None:
        source = work.dataset
        prompts = read_dataset(Path(work.dataset), terms)[: work.num_requests]
        if not prompts:
            raise ConfigError(f"the dataset {work.dataset} is empty")
    else:
        source = f"isl={work.isl}, osl={work.osl}, lengths={work.lengths}"
        inputs = draw.lengths(work.num_requests, work.isl, work.isl_spread, work.lengths)
        outputs = draw.lengths(work.num_requests, work.osl, work.osl_spread, work.lengths)
        prompts = draw.prompts(zip(inputs, outputs, strict=True))
    terms.check(prompts, source)
    return prompts


class Draw:
    """Random lengths and prompts; equal seeds give equal ones, on every rank."""

    def __init__(self, seed: int, terms: Terms):
        self._random = np.random.default_rng(seed)
        self._ends = sorted(end for end in terms.eos if 0 <= end < terms.vocab)
        self._choices = terms.vocab - len(self._ends)
        self._drawn: set[bytes] = set()

    def lengths(self, count: int, mean: int, spread: float, kind: str) -> list[int]:
        """Around a mean: its standard deviation is the spread (normal), or it goes so far both ways (uniform)."""
        if kind == "normal":
            found = np.rint(self._random.normal(mean, spread, count)).astype(np.int64)
        elif kind == "uniform":
            found = self._random.integers(round(mean - spread), round(mean + spread), count, endpoint=True)
        else:
            found = np.full(count, mean)
        return np.maximum(found, 1).tolist()

    def prompts(self, lengths: Iterable[tuple[int, int]]) -> list[Prompt]:
        """New ones, of these numbers of input and output tokens."""
        return [Prompt(self._tokens(inputs), outputs) for inputs, outputs in lengths]

    def _tokens(self, count: int) -> Sequence[int]:
        for _ in range(DRAWS):
            ids = self._random.integers(self._choices, size=count, dtype=np.int32)
            for end in self._ends:  # in rising order: what is left of the vocabulary moves up past each
                ids += ids >= end
            drawn = ids.tobytes()
            if drawn not in self._drawn:
                break
        self._drawn.add(drawn)
        return array("i", drawn)


def read_dataset(path: Path, terms: Terms) -> list[Prompt]:
    """Every request of a file, or the first line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the dataset {path} is not text: {error.reason} at byte {error.start}") from error
    reader = _Lines(path, terms)
    return [reader.prompt(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


class _Lines:
    """Turns lines of a dataset into prompts."""

    def __init__(self, path: Path, terms: Terms):
        self._path, self._terms = path, terms
        self._tokenizer: Any = None  # opened by the first text

    def prompt(self, number: int, line: str) -> Prompt:
        try:
            return self._read(json.loads(line))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{self._path} line {number}: {error}") from error

    def _read(self, told: Any) -> Prompt:
        if not isinstance(told, dict):
            raise ConfigError('expected an object like {"task_id": 0, "input_ids": [...], "output_tokens": 128}')
        if told.get("lora_request") is not None:
            raise ConfigError("lora_request is not served")
        if ("input_ids" in told) == ("prompt" in told):
            raise ConfigError("expected either input_ids or prompt")
        output = convert(int, told.get("output_tokens"), "output_tokens")
        if output < 1:
            raise ConfigError(f"output_tokens={output}: must be at least 1")
        tokens = self._ids(told["input_ids"]) if "input_ids" in told else self._encoded(told["prompt"])
        if not tokens:
            raise ConfigError("the prompt is empty")
        return Prompt(tokens, output)

    def _ids(self, told: Any) -> Sequence[int]:
        if not isinstance(told, list) or any(type(one) is not int for one in told):
            raise ConfigError("input_ids: expected a list of whole numbers")
        vocab = self._terms.vocab
        if wrong := [one for one in told if not 0 <= one < vocab]:
            raise ConfigError(f"input_ids: {wrong[0]} is not in the model's vocabulary, 0 to {vocab - 1}")
        return array("i", told)

    def _encoded(self, told: Any) -> Sequence[int]:
        text = convert(str, told, "prompt")
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._terms.folder)
        return self._ids(self._tokenizer.encode(text).ids)


def _tokenizer(folder: Path | None) -> Any:
    if folder is None:
        raise ConfigError("a text needs a tokenizer, and random weights have none; set weights or give input_ids")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"a text needs a tokenizer, and {file} does not exist; give input_ids instead")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("a text needs the package tokenizers: pip install tokenizers") from error
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{file} is no tokenizer: {error}") from error
