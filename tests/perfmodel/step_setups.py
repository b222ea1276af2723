"""Training runs for tests of the step-time predictor."""

from dataclasses import fields
from typing import Any

from llmb.config.spec import Parallel
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.step_setup import StepSetup

LAYOUT = {field.name for field in fields(Parallel)}


def step_setup(model: str, gpu: str, gpus: int, dtype: str, **options: Any) -> StepSetup:
    """Return a run of 8,192 tokens, by default one sequence at a time; degrees such as `tp` are its layout."""
    layout = Parallel(**{name: options.pop(name) for name in LAYOUT & options.keys()})
    lengths = {"seqlen": 8192, "mbs": 1}
    return StepSetup(shape=find_model(model), gpu=gpu, gpus=gpus, dtype=dtype, parallel=layout, **lengths | options)
