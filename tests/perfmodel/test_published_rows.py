"""Rows of published training runs: parsing, and the errors of their predictions in aggregate."""

import math
import os
import statistics
from pathlib import Path

import pytest

from llmb.errors import ConfigError
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.published_rows import engine_of, is_possible, parse_row, read_rows

PUBLISHED = Path(__file__).parent.parent / "golden" / "published_training_rows.csv"


def test_published_rows_are_predicted_within_the_stated_errors():
    rows = read_rows(PUBLISHED)
    assert all(row.setup is not None and row.step_time_s is not None for row in rows), [row.reason for row in rows]
    errors = sorted(abs(predict(row.setup).step_time_s / row.step_time_s - 1) for row in rows)
    assert len(errors) >= 25
    assert statistics.median(errors) < 0.06
    assert errors[math.ceil(0.9 * len(errors)) - 1] < 0.15


def test_rows_without_a_needed_cell_say_which():
    cells = {"model": "llama3.1", "size": "8b", "gpu": "h100", "dtype": "bf16", "gpus": "8", "seqlen": "8192"}
    assert parse_row(cells).reason == "no mbs"
    assert parse_row(cells | {"mbs": "1"}).reason == "no layout"
    assert parse_row(cells | {"mbs": "1", "tp": "two"}).reason == "tp must be a whole number, 1 or more, got 'two'"
    assert parse_row(cells | {"model": "nobody"}).reason == "unknown model 'nobody-8b'"
    row = parse_row(cells | {"mbs": "1", "tp": "1", "gbs": "128", "tokens_per_s": "85459"})
    assert row.step_time_s == pytest.approx(128 * 8192 / 85459)
    assert is_possible(row.setup, row.step_time_s)
    assert not is_possible(row.setup, row.step_time_s / 2)


def test_cells_may_be_spelled_as_other_tables_do():
    cells = {"model": "Llama3.1", "size": "8B", "gpu": "H100", "dtype": "BF16", "gpus": "8", "seqlen": "8192"}
    setup = parse_row(cells | {"mbs": "1", "tp": "1", "vp": "None", "fsdp": "True"}).setup
    assert setup.parallel.fsdp
    assert setup.parallel.vp is None
    assert (setup.gpu, setup.dtype) == ("h100", "bf16")


def test_the_engine_is_read_from_the_source():
    assert engine_of("NVIDIA/dgxc-benchmarking grok1/README_314b.md v25.02..v25.04.02@1", "") == "megatron-2024"
    assert engine_of("NVIDIA/dgxc-benchmarking grok1/README.md v25.05.01@6", "") == "megatron"
    assert engine_of("NVIDIA-NeMo/Megatron-Bridge docs container-26.04@1", "") == "megatron-bridge"
    assert engine_of("pytorch/torchtitan docs", "grade=published; framework=torchtitan; compile") == "torchtitan"
    assert engine_of("", "") == "megatron-bridge"


def test_table_that_is_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.csv")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        read_rows(tmp_path / "rows.csv")
