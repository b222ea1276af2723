"""Events grouped by type are those that a pass over all of them finds."""

from llmb.events import LogProblem, RequestDone, RunEnded, StepDone
from llmb.results.recorded_events import RecordedEvents, completed_requests, events_of, measured_requests


def _request(**changes):
    return RequestDone(request=1, arrival=0.0, end=1.0, input_tokens=1, output_tokens=1, **changes)


def test_grouped_events_are_those_of_a_list():
    warmup, failed, done = _request(warmup=True), _request(error="timeout"), _request()
    plain = [StepDone(step=1), warmup, RunEnded(status="ok"), failed, done, StepDone(step=2)]
    grouped = RecordedEvents(iter(plain))
    assert list(grouped) == plain
    for kind in (StepDone, RequestDone, RunEnded, LogProblem):
        assert events_of(grouped, kind) == events_of(plain, kind) == [e for e in plain if isinstance(e, kind)]
    for events in (grouped, plain):
        assert list(measured_requests(events)) == [failed, done]
        assert list(completed_requests(events)) == [done]
    assert RecordedEvents.of(grouped) is grouped
    assert completed_requests(RecordedEvents([warmup, done])) is not None


def test_columns_are_read_once_where_no_request_failed():
    events = RecordedEvents([_request(), _request()])
    assert completed_requests(events) is measured_requests(events)
