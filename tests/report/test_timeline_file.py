"""lanes.json: what is written is read back, and a damaged file is named in one line."""

import json

import pytest
from synthetic_timeline import small

from llmb.errors import ConfigError
from llmb.perfmodel.offload.stream_timeline import StreamTimeline, read_timeline, write_timeline


def test_timeline_survives_a_round_trip(tmp_path):
    streams = small()
    write_timeline(tmp_path / "lanes.json", streams)
    assert read_timeline(tmp_path / "lanes.json") == streams


def test_empty_timeline_survives_a_round_trip(tmp_path):
    write_timeline(tmp_path / "lanes.json", StreamTimeline(source="predicted", events=()))
    assert read_timeline(tmp_path / "lanes.json") == StreamTimeline(source="predicted", events=())


def test_text_occurs_once_in_the_file(tmp_path):
    write_timeline(tmp_path / "lanes.json", small())
    assert (tmp_path / "lanes.json").read_text().count("recompute") == 1


DAMAGES = {
    "a field is gone": lambda plain: plain.pop("memory"),
    "a field is unknown": lambda plain: plain.update(colour="red"),
    "a column is gone": lambda plain: plain["stretches"].pop("layer"),
    "a column is shorter": lambda plain: plain["stretches"]["end"].pop(),
    "text among numbers": lambda plain: plain["stretches"]["start"].__setitem__(0, "soon"),
    "a truth among numbers": lambda plain: plain["stretches"]["step"].__setitem__(0, True),
    "null where a number must be": lambda plain: plain["stretches"]["flops"].__setitem__(0, None),
    "no number": lambda plain: plain["stretches"]["start"].__setitem__(0, float("nan")),
    "an unknown stream": lambda plain: plain["stretches"]["lane"]["words"].__setitem__(0, "sideways"),
    "an unknown phase": lambda plain: plain["stretches"]["phase"]["words"].__setitem__(0, "lunch"),
    "a word that is not there": lambda plain: plain["stretches"]["name"]["at"].__setitem__(0, 99),
    "a word from the end": lambda plain: plain["stretches"]["name"]["at"].__setitem__(0, -1),
    "words without indices": lambda plain: plain["stretches"].update(name=["forward"]),
    "an end before the start": lambda plain: plain["stretches"]["end"].__setitem__(0, -1.0),
    "an unknown source": lambda plain: plain.update(source="guessed"),
    "one limit of two": lambda plain: plain.update(link_gbs=[50.0]),
    "events by rows": lambda plain: plain.update(stretches=[]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_timeline_is_named_in_one_line(damage, tmp_path):
    path = tmp_path / "lanes.json"
    write_timeline(path, small())
    plain = json.loads(path.read_text())
    damage(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=r"lanes\.json is not a stream timeline: ") as caught:
        read_timeline(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "null", '{"stretches": ', "3"])
def test_other_json_is_refused(content, tmp_path):
    (tmp_path / "lanes.json").write_text(content)
    with pytest.raises(ConfigError, match=r"lanes\.json is not "):
        read_timeline(tmp_path / "lanes.json")


def test_missing_timeline_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_timeline(tmp_path / "lanes.json")
