"""Plain data to dataclasses: unknown names list the valid ones, wrong types are reported with their path."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.config.recipe import load
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import (
    RENAMED_FIELDS,
    RENAMED_VALUES,
    build,
    convert,
    read_json,
    to_json,
    to_plain,
    write_atomic,
)
from llmb.config.spec import Parallel, Precision, RunConfig, Training
from llmb.errors import ConfigError, LaunchError
from llmb.events import TYPES, HangReport, RequestDone, RunEnded, read
from llmb.results.result import Result
from llmb.runtime.checkpoint_folder import ResumePoint, resume_point


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
    outer = build(Outer, {"name": "x", "inner": {"width": 3}, "pair": [4, 5], "share": 1})
    assert outer == Outer(name="x", inner=Inner(width=3), pair=(4, 5), share=1.0)


@pytest.mark.parametrize(
    ("data", "message"),
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
def test_invalid_data_gives_a_one_line_error_with_its_path(data, message):
    with pytest.raises(ConfigError) as caught:
        build(Outer, data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_file_content_raises_only_config_errors(data):
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
    write_atomic(tmp_path / "a.json", to_json({"a": 1}))
    assert read_json(tmp_path / "a.json") == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_config_round_trips_through_json(recipes):
    config = resolve(recipes["pretrain_grok1"], RunRequest(size="314b", dtype="fp8", gpus=128, gpu="gb200"))
    assert build(RunConfig, json.loads(to_json(config))) == config
    assert to_plain(config)["parallel"]["ep"] == 8


def with_old_names(text: str) -> str:
    """Return JSON as older versions wrote it: every renamed field and value under its old name."""
    for names in RENAMED_FIELDS.values():
        for old, new in names.items():
            text = text.replace(f'"{new}":', f'"{old}":')
    for name, values in RENAMED_VALUES.items():
        for old, new in values.items():
            text = text.replace(f'"{name}": "{new}"', f'"{name}": "{old}"')
    return text


def test_renamed_fields_exist_under_their_new_names():
    spec = {cls.__name__: cls for cls in (Training, Precision, RunConfig, Result, *TYPES.values())}
    for cls_name in RENAMED_FIELDS.keys() & spec.keys():
        assert set(RENAMED_FIELDS[cls_name].values()) <= set(spec[cls_name].__dataclass_fields__)


@pytest.mark.parametrize(
    ("workload", "size", "old_names"),
    [
        ("pretrain_llama3.1", "8b", ("fp8_scaling", "masters", "keep_inputs", "fast_sums", "latent", "attention_cap")),
        ("inference_deepseek-r1", "671b", ("fp8_scaling", "latent", "attention_cap")),
        ("outofcore_llama3", "8b", ("home_slots", "latent", "attention_cap")),
    ],
)
def test_config_json_with_old_names_opens(recipes, tmp_path, workload, size, old_names):
    dtype = "fp8" if recipes[workload].kind != "outofcore" else "bf16"
    config = resolve(recipes[workload], RunRequest(size=size, dtype=dtype, gpus=1, gpu=None, proxy="small"))
    path, plain = tmp_path / "config.json", to_plain(config)
    if plain["workload"].get("plan") is not None:
        del plain["workload"]["plan"]["fp8_recipe"]  # newer than the old names
    path.write_text(with_old_names(json.dumps(plain)))
    assert all(f'"{name}":' in path.read_text() for name in old_names)
    assert build(RunConfig, read_json(path)) == config


def test_result_json_with_old_names_opens(tmp_path):
    result = Result(name="run", status="failed", failed_rank=3, mean_concurrency=1.5)
    path = tmp_path / "result.json"
    path.write_text(with_old_names(to_json(result)))
    assert '"guilty_rank": 3' in path.read_text()
    assert build(Result, read_json(path)) == result


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tensor", "tensorwise"), ("channel", "channelwise"), ("block", "blockwise"),
        ("delayed", "tensorwise_delayed"), ("current", "tensorwise_current"), (None, None),
    ],
)  # fmt: skip
def test_fp8_scaling_of_older_files_is_a_recipe(old, new):
    assert build(Precision, {"dtype": "fp8", "fp8_scaling": old}) == Precision(dtype="fp8", fp8_recipe=new)
    formats = {"dtype": "fp8", "fp8_scaling": old, "moments": "fp32"}
    result = build(Result, {"name": "run", "status": "ok", "number_formats": formats})
    assert result.number_formats == {"dtype": "fp8", "fp8_recipe": new, "moments": "fp32"}


def test_value_of_an_older_field_is_not_one_of_the_current_field():
    with pytest.raises(ConfigError, match=r"unknown value for Precision\.fp8_recipe: 'block'"):
        build(Precision, {"dtype": "fp8", "fp8_recipe": "block"})


def test_events_with_old_names_are_read(tmp_path):
    path = tmp_path / "events.rank0.jsonl"
    path.write_text(
        '{"event": "RunEnded", "rank": 1, "status": "failed", "guilty_rank": 2}\n'
        '{"event": "RequestDone", "request": 0, "arrival": 0.0, "end": 1.0, "input_tokens": 4, "output_tokens": 2, '
        '"answer_crc": 7}\n'
        '{"event": "Whereabouts", "time": 1.0, "rank": 0, "collectives": {"tp": 4}, "waiting": true}\n'
    )
    assert list(read(path)) == [
        RunEnded(rank=1, status="failed", failed_rank=2),
        RequestDone(request=0, arrival=0.0, end=1.0, input_tokens=4, output_tokens=2, output_crc=7),
        HangReport(time=1.0, rank=0, collectives={"tp": 4}, waiting=True),
    ]


def test_checkpoint_with_old_names_resumes(tmp_path):
    checkpoint = tmp_path / "old" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    saved = {"format": 2, "step": 3, "model.latent": None, "model.attention_cap": 30.0, "model.layers": 2}
    (checkpoint / "checkpoint.json").write_text(json.dumps(saved))
    work = Training(seqlen=1, mbs=1, gbs=1, ga=1, steps=9, resume=str(tmp_path / "old"))
    identity = {"model.mla": None, "model.attn_logit_softcap": 30.0, "model.layers": 2, "model.norm_eps": 1e-5}
    assert resume_point(work, tmp_path / "new", identity, {"lr": 1.0}, 2) == ResumePoint(checkpoint)  # lr: not recorded
    with pytest.raises(ConfigError, match=r"attn_logit_softcap=30\.0, this run has 20\.0"):
        resume_point(work, tmp_path / "new", identity | {"model.attn_logit_softcap": 20.0}, {}, 2)


def test_recipe_with_old_names_loads(tmp_path, recipes):
    path = tmp_path / "recipe.yaml"
    path.write_text("""
workload: mine
kind: training
title: Mine
default_gpu: h100
default_size: tiny
default_dtype: bf16
models:
  tiny: {name: tiny, architecture: llama, layers: 2, hidden: 64, ffn: 128, heads: 4, kv_heads: 4, head_dim: 16,
         vocab: 256}
defaults: {seqlen: 64, mbs: 1, masters: bf16}
rows:
  - {gpu: h100, size: tiny, dtype: bf16, gpus: 1, gbs: 1, keep_inputs: true}
  - {gpu: h100, size: tiny, dtype: fp8, gpus: 1, gbs: 1, fp8_scaling: current}
""")
    recipe = load(path)
    config = resolve(recipe, RunRequest(size="tiny", dtype="bf16", gpus=1, gpu="h100"))
    assert (config.workload.master_weights, config.workload.save_norm_outputs) == ("bf16", True)
    in_fp8 = resolve(recipe, RunRequest(size="tiny", dtype="fp8", gpus=1, gpu="h100"))
    assert in_fp8.precision.fp8_recipe == "tensorwise_current"
    assert recipe.model("tiny", {"latent": None}).mla is None
    assert recipe.model("tiny", {"attention_cap": 30.0}).attn_logit_softcap == 30.0


def test_old_name_next_to_the_new_one_is_rejected():
    with pytest.raises(ConfigError, match="unknown field in Training: 'masters'"):
        build(Training, {"seqlen": 1, "mbs": 1, "gbs": 1, "ga": 1, "masters": "bf16", "master_weights": "bf16"})


def test_planted_link_is_neither_followed_nor_predictable(tmp_path, monkeypatch):
    private = tmp_path / "private"
    private.write_text("mine")
    target = tmp_path / "result.json"
    (tmp_path / f".result.json.{os.getpid()}").symlink_to(private)
    write_atomic(target, "new")
    assert (private.read_text(), target.read_text()) == ("mine", "new")
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))  # even where it is guessed
    (tmp_path / f".result.json.{'00' * 8}").symlink_to(private)
    with pytest.raises(LaunchError):
        write_atomic(target, "newer")
    assert (private.read_text(), target.read_text()) == ("mine", "new")


def test_fifo_and_absurd_nesting_are_errors_of_the_file(tmp_path):
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_json(path)
    path.unlink()
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_json(path)


@dataclass(frozen=True)
class _Nested:
    pairs: tuple[tuple[str, float], ...] = (("a", 1.0), ("b", math.inf))
    numbers: tuple[float, ...] = (0.1, 0.2)
    items: list = field(default_factory=lambda: [1, None, Parallel(tp=2), {"x": [math.nan]}])
    table: dict = field(default_factory=lambda: {1: Parallel(), "y": (1.0, math.nan)})


def test_plain_data_is_that_of_asdict():
    assert repr(to_plain(_Nested())) == repr(asdict(_Nested()))
    assert to_plain([1, _Nested]) == [1, _Nested]
    plain = to_plain(value := _Nested())
    plain["items"].append(3)
    assert len(value.items) == 4


def test_json_has_null_where_a_number_is_not_finite():
    data = json.loads(to_json(_Nested()))
    assert data["pairs"] == [["a", 1.0], ["b", None]]
    assert data["items"][2]["tp"] == 2
    assert (data["items"][3], data["table"]["y"]) == ({"x": [None]}, [1.0, None])
    assert to_json([1e308, 1e308]) == "[1e+308, 1e+308]"  # each is finite, their sum is not


def test_json_that_takes_far_more_memory_than_its_file_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" + "[]," * 4_000_000 + "[]]")
    with pytest.raises(ConfigError, match="it takes about 640,000,256 bytes of memory; at most 536,870,912"):
        read_json(path)
    path.write_text("[" + "0.5123456789012345," * 1_000_000 + "0]")  # as the times of a million steps
    assert len(read_json(path)) == 1_000_001


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_whole_number_that_no_float_holds_is_refused(number):
    with pytest.raises(ConfigError, match=r"lr: .* is too large"):
        convert(float, number, "lr")


def test_json_with_a_hole_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("[1]")
    os.truncate(path, 2**29)
    with pytest.raises(ConfigError, match="nothing is stored from byte"):
        read_json(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_json(path)


def test_message_that_quotes_megabytes_is_cut():
    message = str(ConfigError(f"expected a number, got {'x' * 10**6}; choices are: 1"))
    assert len(message) < 5000
    assert message.startswith("expected a number, got x")
    assert message.endswith("x; choices are: 1")
