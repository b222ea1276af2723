"""Prompts of the benchmark: synthetic, of given lengths, or from a dataset file.

    {"task_id": 0, "input_ids": [17, 4, 99], "output_tokens": 128}
    {"task_id": 1, "prompt": "Once upon a time", "output_tokens": 128}

The lines are those of trtllm-bench. Texts need the tokenizer of the weights folder. Synthetic tokens are uniform over
the vocabulary without end-of-sequence tokens; no prompt occurs twice while there are others of its length, so that a
prefix cache does not help. Everything is checked before the engine is built.
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

MAX_DRAWS = 100  # of one prompt, until a repeated one is accepted


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of the input, and the number of output tokens."""

    tokens: Sequence[int]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the finished sequence."""
        return len(self.tokens) + self.output_tokens


@dataclass(frozen=True)
class ModelInfo:
    """Vocabulary size, end-of-sequence tokens and context length (if known) of a model."""

    vocab: int
    eos: frozenset[int] = frozenset()
    context: int | None = None
    folder: Path | None = None  # of its weights

    def check(self, prompts: Iterable[Prompt], source: str) -> None:
        """Raise a ConfigError if a request does not fit into the context."""
        for number, prompt in enumerate(prompts, start=1):
            if self.context is not None and prompt.num_tokens > self.context:
                raise ConfigError(
                    f"{source}: request {number} has {len(prompt.tokens)} + {prompt.output_tokens} tokens, more than "
                    f"the {self.context} of the model's context (max_position_embeddings in {self.folder})"
                )


def model_info(model: Model, weights: str | None) -> ModelInfo:
    """Read the info from the weights folder; random weights have no end-of-sequence token and no context limit."""
    if weights is None:
        return ModelInfo(model.vocab)
    folder = Path(weights)
    where = f"{folder}/config.json"
    hf_config = convert(dict[str, Any], read_json(folder / "config.json"), where)
    eos = hf_config.get("eos_token_id")
    eos_list = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return ModelInfo(
        vocab=model.vocab,
        eos=frozenset(convert(tuple[int, ...], eos_list, f"{where}.eos_token_id")),
        context=convert(int | None, hf_config.get("max_position_embeddings"), f"{where}.max_position_embeddings"),
        folder=folder,
    )


def measured_prompts(work: Inference, info: ModelInfo, sampler: "PromptSampler") -> list[Prompt]:
    """Return the measured prompts: from the dataset, possibly fewer than configured, or synthetic."""
    if work.dataset is not None:
        source = work.dataset
        prompts = read_dataset(Path(work.dataset), info)[: work.num_requests]
        if not prompts:
            raise ConfigError(f"the dataset {work.dataset} is empty")
    else:
        source = f"isl={work.isl}, osl={work.osl}, lengths={work.lengths}"
        inputs = sampler.lengths(work.num_requests, work.isl, work.isl_spread, work.lengths)
        outputs = sampler.lengths(work.num_requests, work.osl, work.osl_spread, work.lengths)
        prompts = sampler.prompts(zip(inputs, outputs, strict=True))
    info.check(prompts, source)
    return prompts


class PromptSampler:
    """Random lengths and prompts, equal on every rank for equal seeds."""

    def __init__(self, seed: int, info: ModelInfo):
        self._random = np.random.default_rng(seed)
        self._eos = sorted(token for token in info.eos if 0 <= token < info.vocab)
        self._num_choices = info.vocab - len(self._eos)
        self._seen: set[bytes] = set()

    def lengths(self, count: int, mean: int, spread: float, kind: str) -> list[int]:
        """Sample lengths around a mean; spread is the standard deviation (normal) or the half-width (uniform)."""
        if kind == "normal":
            lengths = np.rint(self._random.normal(mean, spread, count)).astype(np.int64)
        elif kind == "uniform":
            lengths = self._random.integers(round(mean - spread), round(mean + spread), count, endpoint=True)
        else:
            lengths = np.full(count, mean)
        return np.maximum(lengths, 1).tolist()

    def prompts(self, lengths: Iterable[tuple[int, int]]) -> list[Prompt]:
        """Sample new prompts of these (input, output) lengths."""
        return [Prompt(self._tokens(isl), osl) for isl, osl in lengths]

    def _tokens(self, count: int) -> Sequence[int]:
        for _ in range(MAX_DRAWS):
            ids = self._random.integers(self._num_choices, size=count, dtype=np.int32)
            for token in self._eos:  # in rising order: larger ids move up past each
                ids += ids >= token
            content = ids.tobytes()
            if content not in self._seen:
                break
        self._seen.add(content)
        return array("i", content)


def read_dataset(path: Path, info: ModelInfo) -> list[Prompt]:
    """Read all prompts of a file; raise a ConfigError that names the first invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the dataset {path} is not text: {error.reason} at byte {error.start}") from error
    reader = _DatasetReader(path, info)
    return [reader.prompt(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


class _DatasetReader:
    """Parses lines of a dataset into prompts."""

    def __init__(self, path: Path, info: ModelInfo):
        self._path, self._info = path, info
        self._tokenizer: Any = None  # loaded for the first text

    def prompt(self, number: int, line: str) -> Prompt:
        try:
            return self._read(json.loads(line))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{self._path} line {number}: {error}") from error

    def _read(self, entry: Any) -> Prompt:
        if not isinstance(entry, dict):
            raise ConfigError('expected an object like {"task_id": 0, "input_ids": [...], "output_tokens": 128}')
        if entry.get("lora_request") is not None:
            raise ConfigError("lora_request is not served")
        if ("input_ids" in entry) == ("prompt" in entry):
            raise ConfigError("expected either input_ids or prompt")
        output = convert(int, entry.get("output_tokens"), "output_tokens")
        if output < 1:
            raise ConfigError(f"output_tokens={output}: must be at least 1")
        tokens = self._ids(entry["input_ids"]) if "input_ids" in entry else self._encode(entry["prompt"])
        if not tokens:
            raise ConfigError("the prompt is empty")
        return Prompt(tokens, output)

    def _ids(self, ids: Any) -> Sequence[int]:
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise ConfigError("input_ids: expected a list of whole numbers")
        vocab = self._info.vocab
        if invalid := [token for token in ids if not 0 <= token < vocab]:
            raise ConfigError(f"input_ids: {invalid[0]} is not in the model's vocabulary, 0 to {vocab - 1}")
        return array("i", ids)

    def _encode(self, value: Any) -> Sequence[int]:
        text = convert(str, value, "prompt")
        if self._tokenizer is None:
            self._tokenizer = _load_tokenizer(self._info.folder)
        return self._ids(self._tokenizer.encode(text).ids)


def _load_tokenizer(folder: Path | None) -> Any:
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
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
