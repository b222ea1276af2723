"""lanes.json: what is written is read back, and a damaged file is named in one line."""

import json

import pytest
from synthetic_lanes import small

from llmb.errors import ConfigError
from llmb.perfmodel.offload.stream_timeline import Lanes, read_lanes, write_lanes


def test_lanes_are_read_back_as_they_were(tmp_path):
    lanes = small()
    write_lanes(tmp_path / "lanes.json", lanes)
    assert read_lanes(tmp_path / "lanes.json") == lanes


def test_lanes_without_work_memory_or_limits_are_read_back(tmp_path):
    write_lanes(tmp_path / "lanes.json", Lanes(source="predicted", stretches=()))
    assert read_lanes(tmp_path / "lanes.json") == Lanes(source="predicted", stretches=())


def test_text_is_spelt_once_in_the_file(tmp_path):
    write_lanes(tmp_path / "lanes.json", small())
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
    "an unknown lane": lambda plain: plain["stretches"]["lane"]["words"].__setitem__(0, "sideways"),
    "an unknown phase": lambda plain: plain["stretches"]["phase"]["words"].__setitem__(0, "lunch"),
    "a word that is not there": lambda plain: plain["stretches"]["name"]["at"].__setitem__(0, 99),
    "a word from the end": lambda plain: plain["stretches"]["name"]["at"].__setitem__(0, -1),
    "words without places": lambda plain: plain["stretches"].update(name=["forward"]),
    "an end before the start": lambda plain: plain["stretches"]["end"].__setitem__(0, -1.0),
    "an unknown source": lambda plain: plain.update(source="guessed"),
    "one limit of two": lambda plain: plain.update(link_gbs=[50.0]),
    "stretches by rows": lambda plain: plain.update(stretches=[]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_in_one_line(damage, tmp_path):
    path = tmp_path / "lanes.json"
    write_lanes(path, small())
    plain = json.loads(path.read_text())
    damage(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=r"lanes\.json is not a record of lanes: ") as caught:
        read_lanes(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "null", '{"stretches": ', "3"])
def test_what_is_no_record_at_all_is_named(content, tmp_path):
    (tmp_path / "lanes.json").write_text(content)
    with pytest.raises(ConfigError, match=r"lanes\.json is not "):
        read_lanes(tmp_path / "lanes.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_lanes(tmp_path / "lanes.json")
