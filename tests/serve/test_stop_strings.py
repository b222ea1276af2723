"""Stop strings across token boundaries: text is held back only as long as it may begin one."""

from hypothesis import given
from hypothesis import strategies as st

from llmb.serve.text.stop_strings import StopMatcher

TEXT = st.text("ab-", max_size=12)


def test_text_is_held_back_until_it_is_certain():
    matcher = StopMatcher(["END", "\n\n"])
    assert [matcher.push(text) for text in ("the E", "N", "Ds", "\n", "x")] == ["the ", "", "", "", ""]
    assert matcher.matched
    matcher = StopMatcher(["END", "\n\n"])
    assert [matcher.push(text) for text in ("EN", "T", "\n", "x")] == ["", "ENT", "", "\nx"]
    assert matcher.push("E") == ""
    assert matcher.finish() == "E"


@given(texts=st.lists(TEXT, max_size=8), stops=st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_split_gives_the_text_before_the_first_stop_string(texts, stops):
    matcher, whole = StopMatcher(stops), "".join(texts)
    emitted = [matcher.push(text) for text in texts] + [matcher.finish()]
    positions = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    assert matcher.matched == bool(positions)
    if not positions:
        assert "".join(emitted) == whole
    else:
        # Whichever is complete first ends the output; the split decides among those that one text completes.
        assert whole.startswith("".join(emitted))
        assert len("".join(emitted)) in {start for _, start in positions}
        assert not any(stop in "".join(emitted) for stop in stops)
