"""The training batch from a token file, memory-mapped, in place of the synthetic one (`synthetic_tokens.py`).

Sequence number n is the tokens from n * seqlen on, and the one after them, of a text that begins again when it ends.
So the batch is the same however it is cut into ranks and micro-batches, every token is a label once an epoch, and a run
that is resumed goes on where it was. Unless seqlen divides the text, each epoch cuts it at other places.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from llmb.errors import ConfigError
from llmb.formats.token_file import HEADER, read_header


class Reading(Protocol):
    """What a workload says of its text; see the fields of spec.Training."""

    @property
    def data(self) -> str | None: ...
    @property
    def seqlen(self) -> int: ...


def open_data(work: Reading, vocab: int) -> "TokenFile | None":
    """The token file a workload names, checked against it and the model's vocabulary; none: it trains without one."""
    if work.data is None:
        return None
    data = TokenFile(Path(work.data))
    data.check_fits(vocab, work.seqlen)
    return data


class TokenFile:
    """A token file, of which only what is asked for is read."""

    def __init__(self, path: Path):
        self.path = path
        self.header = read_header(path)
        if self.header.tokens == 0:
            raise ConfigError(f"{path} holds no tokens")
        kind = np.dtype(f"<u{self.header.token_bytes}")
        self._tokens = np.memmap(path, kind, mode="r", offset=HEADER.size, shape=(self.header.tokens,))

    def check_fits(self, vocab: int, seqlen: int) -> None:
        """A model of this vocabulary can train on this file in sequences of this length, or a ConfigError."""
        if self.header.vocab > vocab:
            raise ConfigError(f"{self.path} has a vocabulary of {self.header.vocab}, the model one of only {vocab}")
        if self.header.tokens < seqlen + 1:
            raise ConfigError(
                f"{self.path} has {self.header.tokens} tokens, too few for one sequence of {seqlen} and a label"
            )

    def sequences(self, first: int, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Sequences number `first` and following as int64, in the shape (sequences, tokens of each with the label)."""
        sequences, length = shape
        starts = (first + np.arange(sequences, dtype=np.int64)) * (length - 1)
        places = (starts[:, None] + np.arange(length)) % self.header.tokens
        tokens = torch.from_numpy(self._tokens[places].astype(np.int64))
        if tokens.max() >= self.header.vocab:
            raise ConfigError(f"{self.path} is damaged: token {tokens.max()} in a vocabulary of {self.header.vocab}")
        if device.type == "cuda":  # the copy from pinned memory does not make the host wait for the device
            return tokens.pin_memory().to(device, non_blocking=True)
        return tokens.to(device)
