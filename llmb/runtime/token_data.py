"""Training batches from a memory-mapped token file, instead of synthetic ones (`synthetic_tokens.py`).

Sequence n is the seqlen + 1 tokens from n * seqlen on; the text wraps around at its end. So the batch is the same
however it is split into ranks and micro-batches, every token is a label once per epoch, and a resumed run continues
where it stopped. Unless seqlen divides the text, each epoch splits it at different offsets.
"""

import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmb.config.lr_schedule import LR_FIELDS
from llmb.config.serialization import to_plain
from llmb.config.spec import OutOfCore, Training
from llmb.errors import ConfigError
from llmb.formats.token_file import HEADER, read_header

FINGERPRINT_SAMPLES, SAMPLE_TOKENS = 64, 1 << 14


def open_token_file(workload: Training | OutOfCore, vocab: int) -> "TokenFile | None":
    """Open the token file of a workload, checked against seqlen and the model's vocabulary; None: synthetic data."""
    if workload.data is None:
        return None
    data = TokenFile(Path(workload.data))
    data.check_fits(vocab, workload.seqlen)
    return data


def data_course(workload: Training | OutOfCore, gbs: int, data: "TokenFile | None") -> dict[str, Any]:
    """Return what decides the batches and learning rates of all steps; a file may move."""
    order: dict[str, Any] = {"seqlen": workload.seqlen, "gbs": gbs, "seed": workload.seed}
    order["data"] = None if data is None else to_plain(data.header)
    order["data_fingerprint"] = None if data is None else data.fingerprint
    return order | {name: getattr(workload, name) for name in LR_FIELDS}


class TokenFile:
    """Memory-mapped token file; only the requested sequences are read."""

    def __init__(self, path: Path):
        self.path = path
        self.header = read_header(path)
        if self.header.tokens == 0:
            raise ConfigError(f"{path} holds no tokens")
        dtype = np.dtype(f"<u{self.header.token_bytes}")
        self._tokens = np.memmap(path, dtype, mode="r", offset=HEADER.size, shape=(self.header.tokens,))

    def check_fits(self, vocab: int, seqlen: int) -> None:
        """Raise ConfigError unless a model of this vocabulary can train on this file in sequences of this length."""
        if self.header.vocab > vocab:
            raise ConfigError(f"{self.path} has a vocabulary of {self.header.vocab}, the model one of only {vocab}")
        if self.header.tokens < seqlen + 1:
            raise ConfigError(
                f"{self.path} has {self.header.tokens} tokens, too few for one sequence of {seqlen} and a label"
            )

    @cached_property
    def fingerprint(self) -> int:
        """Checksum of samples from the whole file: another text of the same length has another one."""
        crc32 = 0
        for start in np.linspace(0, max(0, self.header.tokens - SAMPLE_TOKENS), FINGERPRINT_SAMPLES, dtype=np.int64):
            crc32 = zlib.crc32(self._tokens[start : start + SAMPLE_TOKENS].tobytes(), crc32)
        return crc32

    def sequences(self, first: int, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Return sequences `first` and following as int64 [sequences, tokens with the label]."""
        sequences, length = shape
        starts = (first + np.arange(sequences, dtype=np.int64)) * (length - 1)
        indices = (starts[:, None] + np.arange(length)) % self.header.tokens
        tokens = torch.from_numpy(self._tokens[indices].astype(np.int64))
        if tokens.max() >= self.header.vocab:
            raise ConfigError(f"{self.path} is damaged: token {tokens.max()} in a vocabulary of {self.header.vocab}")
        if device.type == "cuda":  # a copy from pinned memory does not block the host
            return tokens.pin_memory().to(device, non_blocking=True)
        return tokens.to(device)
