"""Event files hold complete lines, even on a full disk."""

import json
import math
import resource
from contextlib import nullcontext
from dataclasses import MISSING, fields

import pytest

from llmb.events import CollectiveSeen, LogProblem, RequestDone, RunEnded, StepDone, append, event_line, parse, read
from llmb.formats.json_checks import check_range


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


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "StepDone", "step": "7"}',
        '{"event": "StepDone", "step": true}',
        '{"event": "StepDone", "step": 1, "seconds": 1e999}',
        '{"event": "StepDone", "step": 1, "seconds": NaN}',
        '{"event": "StepDone", "step": 1, "tokens": 1.5}',
        '{"event": "StepDone", "step": 1' + "0" * 400 + "}",
        '{"event": "RunEnded", "status": "fine"}',
        '{"event": "RunEnded", "status": "ok", "last_lines": [1]}',
        '{"event": "RequestDone", "request": 1, "arrival": 0, "end": 1, "input_tokens": 1, "output_tokens": 1, '
        '"token_times": [0.5, "1"]}',
        '{"event": "HangReport", "time": 1, "rank": 0, "collectives": {"dp": "1"}, "waiting": true}',
        "[" * 100_000,
    ],
)
def test_wrongly_typed_line_is_counted_and_not_an_event(tmp_path, line):
    path = tmp_path / "events.rank0.jsonl"
    path.write_text(line[:120_000] + "\n")
    assert list(read(path)) == [LogProblem(problem="unreadable event line", count=1)]


@pytest.mark.parametrize(
    ("numbers", "in_range"),
    [
        ([0.0, -3, 2**62], True),
        ([2.0**62.9] * 50, True),  # each is in range, their norm is not
        *(([1.0, number], False) for number in (2**63, -(2.0**63), 10**400, math.inf, -math.inf, math.nan)),
        ([math.inf, math.nan], False),
    ],
)
def test_range_of_numbers(numbers, in_range):
    with nullcontext() if in_range else pytest.raises(ValueError, match=str(numbers[0])):
        check_range(numbers)


def test_line_that_is_too_long_is_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr("llmb.events.MAX_LINE_BYTES", 100)
    step = event_line(StepDone(step=1)).replace("}", " " * 200 + "}")
    path = tmp_path / "events"
    path.write_text(step + "\0" * 100 + "\n" + '{"event": "RunEnded", "status": "ok"}\n')
    assert list(read(path)) == [RunEnded(status="ok"), LogProblem(problem="unreadable event line", count=2)]


def test_line_that_takes_far_more_memory_than_its_bytes_is_no_event():
    assert parse('{"event": "StepDone", "step": 1, "x": [' + "[]," * 4_000_000 + "[]]}") is None


@pytest.mark.parametrize("half", ["\\ud800", "\\uDBFF", "\\uDC00 \\ud83d"])
def test_half_of_a_surrogate_pair_is_refused(half):
    line = '{"event": "RunEnded", "status": "failed", "reason": "%s"}'
    assert parse(line % half) is None
    assert parse(line % "\\ud83d\\ude00").reason == "\U0001f600"


def test_fields_that_are_null_by_default_are_not_written():
    request = RequestDone(request=1, arrival=0.0, end=1.0, input_tokens=1, output_tokens=2, token_times=(0.5, 1.0))
    for event in (request, StepDone(step=3, loss=math.nan), CollectiveSeen(
        operation="AllReduce", calls=1, bytes=None, datatype="bf16", ranks=None)):  # fmt: skip
        line = event_line(event)
        assert set(json.loads(line)) == {"event"} | {
            field.name for field in fields(event) if getattr(event, field.name) is not None or field.default is MISSING
        }
        assert event_line(parse(line)) == line.replace(', "loss": null', "")
