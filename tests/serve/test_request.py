import pytest

from llmb.serve.request import Request, check_stop, has_fixed_length


def request(**changes) -> Request:
    return Request(
        **{"request_id": 0, "prompt": [1, 2], "max_tokens": 4, "eos": frozenset({9}), "stop": ((2, 3),), **changes}
    )


@pytest.mark.parametrize(
    ("output", "finish"),
    [
        ([5], None),
        ([5, 9], "stop"),
        ([9, 5], None),  # only the last token counts
        ([3], None),  # the stop sequence would start in the prompt
        ([2, 3], "stop"),
        ([5, 6, 7, 8], "length"),
        ([5, 6, 7, 9], "stop"),
        ([5, 6, 2, 3], "stop"),
    ],
)
def test_check_stop_uses_the_last_token(output, finish):
    assert check_stop(request(), [1, 2, *output]) == finish


def test_eos_can_be_ignored():
    assert check_stop(request(ignore_eos=True), [1, 2, 9]) is None
    assert check_stop(request(ignore_eos=True), [1, 2, 5, 6, 7, 9]) == "length"
    assert check_stop(request(ignore_eos=True), [1, 2, 2, 3]) == "stop"


def test_has_fixed_length():
    assert not has_fixed_length(request())
    assert not has_fixed_length(request(stop=()))
    assert not has_fixed_length(request(ignore_eos=True))
    assert has_fixed_length(request(stop=(), ignore_eos=True))
    assert has_fixed_length(request(stop=(), eos=frozenset()))
