"""Times of requests, read without their tokens."""

import os
from pathlib import Path

import pytest

from llmb.errors import ConfigError
from llmb.events import RequestDone, append
from llmb.results.request_file import read_request_times


def test_measured_requests_of_all_files_are_read(tmp_path: Path) -> None:
    request = RequestDone(
        request=1, arrival=0.5, first_token=0.7, token_times=(0.7, 0.9), end=0.9, input_tokens=3, output_tokens=2
    )
    append(tmp_path / "a", request)
    (times,) = read_request_times([tmp_path / "a", tmp_path / "missing"])
    assert (times.arrival, times.first_token, times.end, times.output_tokens) == (0.5, 0.7, 0.9, 2)


def test_a_fifo_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_request_times([tmp_path / "events"])
