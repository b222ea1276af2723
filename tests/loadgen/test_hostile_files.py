"""Traces, datasets and lengths that no one should write are refused in one line."""

import os

import pytest

from llmb.errors import ConfigError
from llmb.loadgen.dataset_file import read_dataset_file
from llmb.loadgen.lengths import read_length_pairs
from llmb.loadgen.prompt_text import TextWriter
from llmb.loadgen.traces import read_trace

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        '{"timestamp": 0, "input_length": 1e999, "output_length": 5}',
        '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1e999]}',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,²,44\n",
    ],
)
def test_traces(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"line [12]: expected"):
        read_trace(path)


def test_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for read in (read_trace, read_length_pairs, lambda path: read_dataset_file(path, TextWriter())):
        with pytest.raises(ConfigError, match="it is not a regular file"):
            read(tmp_path / "fifo")


@pytest.mark.parametrize("text", [DEEP, "[1e999, 5]", "[5, Infinity]"])
def test_lengths(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1: expected an input and an output length"):
        read_length_pairs(path)


@pytest.mark.parametrize("text", [DEEP, '{"prompt": "a", "output_tokens": 1}\n' + DEEP])
def test_datasets(tmp_path, text):
    path = tmp_path / "dataset"
    path.write_text(text)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_dataset_file(path, TextWriter())
