"""Comparison at a resume: fields that a checkpoint's version did not know have their defaults, tuples are lists."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_models import llama_model

from llmb.config.model import Model, RopeConfig
from llmb.config.serialization import to_plain
from llmb.config.spec import Training
from llmb.errors import ConfigError
from llmb.runtime.checkpoint_folder import checkpoint_path, commit, create_partial, resume_point
from llmb.runtime.checksums.checkpoint_checksums import checksums

MODEL = replace(llama_model(), rope=RopeConfig(scaling="longrope", short_factors=(1.0, 2.0), long_factors=(3.0, 4.0)))


def shape(model: Model) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in to_plain(model).items()}


def resume(folder: Path, saved: dict[str, Any], required: dict[str, Any]) -> int:
    """Return the step at which a run continues from a checkpoint that identifies itself so."""
    final = checkpoint_path(folder, 2)
    file = create_partial(final) / "shard"
    file.write_bytes(b"abc")
    commit(final, saved, 1, checksums([file]))
    point = resume_point(Training(seqlen=8, mbs=1, gbs=1, ga=1, resume=str(folder)), folder, required, {}, 1)
    assert point is not None
    return point.step


def test_tuples_of_a_model_are_the_lists_of_its_checkpoint(tmp_path: Path) -> None:
    assert resume(tmp_path, shape(MODEL), shape(MODEL)) == 2


def test_fields_inside_a_model_that_a_checkpoint_lacks_have_their_defaults(tmp_path: Path) -> None:
    saved = shape(MODEL)
    del saved["model.rope"]["attention_factor"], saved["model.qk_norm"]
    assert resume(tmp_path, saved, shape(MODEL)) == 2


def test_other_factors_are_refused_by_name(tmp_path: Path) -> None:
    other = replace(MODEL, rope=replace(MODEL.rope, short_factors=(1.0, 2.5)))  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"model.rope.short_factors=\[1.0, 2.0\], this run has \[1.0, 2.5\]"):
        resume(tmp_path, shape(MODEL), shape(other))
