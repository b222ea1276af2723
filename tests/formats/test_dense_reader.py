"""Holes of sparse files cost neither time nor memory, whatever reads them."""

import os

import pytest

from llmb.events import LogProblem, RunEnded, StepDone, event_line, read
from llmb.formats.dense_reader import DenseReader, open_dense, start_of_stored
from llmb.launch.event_tail import EventTail
from llmb.results.readers.log_lines import file_lines
from llmb.results.readers.nccl_log import tally
from llmb.results.readers.reader_choice import log_formats

HOLE = 2**41  # bytes: reading it would take minutes, and more memory than there is
STEP, END = event_line(StepDone(step=1)).encode(), event_line(RunEnded(status="ok")).encode()


def with_hole(path, before, after, hole=HOLE):
    with path.open("wb") as file:
        file.write(before)
        file.seek(hole, os.SEEK_CUR)
        file.write(after)
        if not after:
            file.truncate()
    return path


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"first\n", b"\nlast\n"), (b"", b"\nlast\n"), (b"first\n", b"")],
    ids=["middle", "begin", "end"],
)
def test_a_hole_is_one_zero_byte(tmp_path, before, after):
    path = with_hole(tmp_path / "file", before.ljust(4096, b" ") if before else b"", after)
    with open_dense(path) as file:
        content = file.read()
        assert file.tell() == path.stat().st_size
    stored = content.replace(b"\0", b"").replace(b" ", b"")
    assert stored == before + after
    assert len(content) < 3 * 65536  # a hole begins at the end of a block of the file system


def test_positions_are_those_of_the_file(tmp_path):
    path = with_hole(tmp_path / "file", b"first\n", b"last\n")
    with DenseReader(path.open("rb", buffering=0)) as file:
        file.seek(-5, os.SEEK_END)
        assert file.read(100) == b"last\n"
        assert file.tell() == path.stat().st_size
    with path.open("rb") as plain:
        start = start_of_stored(plain.fileno(), 5)
    assert path.stat().st_size - 5 <= start + 5 <= path.stat().st_size


def test_events_around_a_hole_are_read(tmp_path):
    path = with_hole(tmp_path / "events.rank0.jsonl", STEP, b"\n" + END)
    assert list(read(path)) == [
        StepDone(step=1), RunEnded(status="ok"), LogProblem(problem="unreadable event line", count=1)
    ]  # fmt: skip
    assert EventTail(path).new() == [StepDone(step=1), RunEnded(status="ok")]


def test_event_written_into_a_hole_is_damaged(tmp_path):
    path = with_hole(tmp_path / "events.rank0.jsonl", STEP + END[:20], END[20:] + STEP)
    assert list(read(path)) == [StepDone(step=1)] * 2 + [LogProblem(problem="unreadable event line", count=1)]
    assert EventTail(path).new() == [StepDone(step=1)] * 2


def test_endless_line_of_events_is_passed_over_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("llmb.events.MAX_LINE_BYTES", 5000)
    monkeypatch.setattr("llmb.launch.event_tail.READ_BYTES", 1000)
    path = tmp_path / "events.rank0.jsonl"
    path.write_bytes(STEP + b"x" * 3_000_000 + b"\n" + END + b"x" * 20_000)
    assert list(read(path)) == [
        StepDone(step=1), RunEnded(status="ok"), LogProblem(problem="unreadable event line", count=2)
    ]  # fmt: skip
    tail = EventTail(path)
    assert tail.new(finished=True) == [StepDone(step=1), RunEnded(status="ok")]
    path.open("ab").write(b"\n" + END)
    assert tail.new() == [RunEnded(status="ok")]


def test_log_around_a_hole_is_read(tmp_path):
    path = with_hole(tmp_path / "log", b"a line\n", b"\nanother line\n")
    assert list(file_lines(path)) == [b"a line", b"", b"another line"]
    assert log_formats(path) == []
    call = (
        b"AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 8 datatype 7 op 0 root 0 comm 0x3 [nranks=4] stream 0x4"
    )
    trace = b"host:1:2 [0] NCCL INFO " + call + b"\n"
    path = with_hole(tmp_path / "trace", trace, b"\n" + trace)
    assert sum(tally(path).calls.values()) == 2
