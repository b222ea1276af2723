"""Plain data to dataclasses: wrong names list the right ones, wrong types say where they stand."""

import json
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.config.serialization import build, read_json, to_json, to_plain, write_whole
from llmb.config.spec import Parallel, RunConfig, Training
from llmb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    share: float = 0.5
    mode: Literal["a", "b"] = "a"
    inner: Inner | None = None
    pair: tuple[int, int] = (1, 2)


def test_builds_nested_data():
    made = build(Outer, {"name": "x", "inner": {"width": 3}, "pair": [4, 5], "share": 1})
    assert made == Outer(name="x", inner=Inner(width=3), pair=(4, 5), share=1.0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"nme": "x"}, "did you mean name"),
        ({}, "'name' is missing"),
        ({"name": 3}, "Outer.name: expected text, got 3"),
        ({"name": "x", "share": "much"}, "Outer.share: expected a number"),
        ({"name": "x", "mode": "c"}, "choices are: a, b"),
        ({"name": "x", "inner": {"width": True}}, "Outer.inner.width: expected a whole number, got True"),
        ({"name": "x", "pair": [1]}, "expected 2 values"),
        ([], "expected a mapping"),
    ],
)
def test_a_mistake_is_one_line_that_says_where(data, said):
    with pytest.raises(ConfigError) as caught:
        build(Outer, data)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_nothing_a_file_may_hold_escapes_as_another_error(data):
    for kind in (Outer, RunConfig, Parallel, Training):
        with pytest.raises(ConfigError):
            build(
                kind,
                {"name": data, "unknown": data}
                if kind is Outer
                else data
                if not isinstance(data, dict)
                else {**data, "?": 1},
            )


def test_json_is_valid_even_for_nan(tmp_path):
    assert json.loads(to_json({"loss": float("nan"), "x": [float("inf"), 1.5]})) == {"loss": None, "x": [None, 1.5]}
    write_whole(tmp_path / "a.json", to_json({"a": 1}))
    assert read_json(tmp_path / "a.json") == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_config_survives_the_file(recipes):
    from llmb.config.resolve import resolve
    from llmb.config.row_selection import Request

    config = resolve(recipes["pretrain_grok1"], Request(size="314b", dtype="fp8", gpus=128, gpu="gb200"))
    assert build(RunConfig, json.loads(to_json(config))) == config
    assert to_plain(config)["parallel"]["ep"] == 8
