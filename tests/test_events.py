"""Event files hold whole lines, whatever the disk does."""

import resource

import pytest

from llmb.events import StepDone, append, read


def test_what_a_full_disk_takes_half_of_is_taken_back(tmp_path):
    path = tmp_path / "events.rank0.jsonl"
    append(path, StepDone(step=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))  # as a disk with 10 bytes left
    try:
        with pytest.raises(OSError, match="No space left"):
            append(path, StepDone(step=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append(path, StepDone(step=2))
    assert [event.step for event in read(path)] == [1, 2]
