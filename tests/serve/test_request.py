import pytest

from llmb.serve.request import Request
from llmb.serve.stop_criteria import certain, ending


def request(**changes) -> Request:
    return Request(
        **{"number": 0, "prompt": [1, 2], "max_tokens": 4, "eos": frozenset({9}), "stop": ((2, 3),), **changes}
    )


@pytest.mark.parametrize(
    ("answer", "finish"),
    [
        ([5], None),
        ([5, 9], "stop"),
        ([9, 5], None),  # only the newest token counts: an earlier one was judged when it came
        ([3], None),  # the stop sequence would begin in the prompt
        ([2, 3], "stop"),
        ([5, 6, 7, 8], "length"),
        ([5, 6, 7, 9], "stop"),
        ([5, 6, 2, 3], "stop"),
    ],
)
def test_an_answer_ends_by_its_newest_token(answer, finish):
    assert ending(request(), [1, 2, *answer]) == finish


def test_eos_can_be_ignored():
    assert ending(request(ignore_eos=True), [1, 2, 9]) is None
    assert ending(request(ignore_eos=True), [1, 2, 5, 6, 7, 9]) == "length"
    assert ending(request(ignore_eos=True), [1, 2, 2, 3]) == "stop"


def test_a_length_is_certain_where_no_token_can_stop_it():
    assert not certain(request())
    assert not certain(request(stop=()))
    assert not certain(request(ignore_eos=True))
    assert certain(request(stop=(), ignore_eos=True))
    assert certain(request(stop=(), eos=frozenset()))
