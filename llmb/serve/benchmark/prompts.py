"""Prompts of the benchmark: synthetic, of given lengths, or from a dataset file.

    {"task_id": 0, "input_ids": [17, 4, 99], "output_tokens": 128}
    {"task_id": 1, "prompt": "Once upon a time", "output_tokens": 128}

The lines are those of trtllm-bench. Texts need the tokenizer of the weights folder. Synthetic tokens are uniform over
the vocabulary without end-of-sequence tokens; no prompt occurs twice while there are others of its length, so that a
prefix cache does not help. Everything is checked before the engine is built.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmb.config.model import Model
from llmb.config.serialization import convert, read_json
from llmb.config.spec import Inference
from llmb.errors import ConfigError
from llmb.loadgen.dataset_file import Messages, dataset_entries, parse_entry
from llmb.loadgen.prompt_sampler import Prompt, TokenSampler
from llmb.loadgen.prompt_text import TextWriter, load_tokenizer


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
        prompts = sampler.prompts(sampler.lengths(work))
    info.check(prompts, source)
    return prompts


class PromptSampler(TokenSampler):
    """Random lengths and prompts for a model, equal on every rank for equal seeds."""

    def __init__(self, seed: int, info: ModelInfo):
        super().__init__(seed, info.vocab, info.eos)


def read_dataset(path: Path, info: ModelInfo) -> list[Prompt]:
    """Read all prompts of a file; raise a ConfigError that names the first invalid line."""
    encoder = _Encoder(info)
    prompts = []
    for where, entry in dataset_entries(path):
        try:
            request = parse_entry(entry, TextWriter())
            if request is not None:
                prompts.append(Prompt(encoder.tokens(request.prompt), request.output_tokens))
        except ConfigError as error:
            raise ConfigError(f"{path} {where}: {error}") from error
    return prompts


class _Encoder:
    """Turns prompts of a dataset into token ids of the model."""

    def __init__(self, info: ModelInfo):
        self._info = info
        self._tokenizer: Any = None  # loaded for the first text

    def tokens(self, prompt: str | Sequence[int] | Messages) -> Sequence[int]:
        if isinstance(prompt, tuple):
            raise ConfigError("messages need the chat template of a server; give prompt or input_ids")
        ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        vocab = self._info.vocab
        if invalid := [token for token in ids if not 0 <= token < vocab]:
            raise ConfigError(f"input_ids: {invalid[0]} is not in the model's vocabulary, 0 to {vocab - 1}")
        if not ids:
            raise ConfigError("the prompt is empty")
        return ids

    def _encode(self, text: str) -> Sequence[int]:
        if self._tokenizer is None:
            folder = self._info.folder
            if folder is None:
                raise ConfigError(
                    "a text needs a tokenizer, and random weights have none; set weights or give input_ids"
                )
            if not (folder / "tokenizer.json").is_file():
                raise ConfigError(
                    f"a text needs a tokenizer, and {folder / 'tokenizer.json'} does not exist; give input_ids instead"
                )
            self._tokenizer = load_tokenizer(folder)
        return array("i", self._tokenizer.encode(text).ids)
