"""Event files hold complete lines, even on a full disk."""

import resource

import pytest

from llmb.events import StepDone, append, read


def test_line_that_does_not_fit_on_the_disk_is_removed(tmp_path):
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
