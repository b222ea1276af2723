"""Models of the recipes at full width, with fewer layers or other fields changed.

recipe_model("pretrain_grok1", "314b", layers=1, experts={"count": 4})
"""

from dataclasses import replace
from functools import cache
from typing import Any

from llmb.config.model import Model
from llmb.config.recipe import Recipe, load_all, shipped


def recipe_model(workload: str, size: str, experts: dict[str, Any] | None = None, **changes: Any) -> Model:
    model = _recipes()[workload].model(size)
    if experts is not None:
        changes["experts"] = replace(model.experts, **experts)
    return replace(model, **changes)


@cache
def _recipes() -> dict[str, Recipe]:
    return load_all([shipped()])
