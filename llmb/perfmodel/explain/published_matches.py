"""Published results of recipes for the same model, GPU type and dtype, beside a measured figure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmb.config.model import Model
from llmb.config.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PublishedMatch:
    """One published result, per GPU; `ratio`: measured over it, null where lengths or batches differ."""

    metric: str
    value: float
    ratio: float | None
    run: str  # lengths and GPUs of the published run
    source: str


def serving_matches(
    recipes: Iterable[Recipe], model: Model, gpu: str, dtype: str, lengths: tuple[int, int], measured: float
) -> list[PublishedMatch]:
    """Return published output tokens/s/GPU; `measured` is per GPU too."""
    matches = []
    for recipe, row, value in _published(recipes, model, gpu, dtype, "output_tokens_per_s"):
        isl, osl = _lengths(recipe, row)
        ratio = measured / value if (isl, osl) == lengths else None
        run = f"{isl}/{osl}, {row['gpus']} GPUs"
        matches.append(
            PublishedMatch(metric="output tokens/s/GPU", value=value, ratio=ratio, run=run, source=row["source"])
        )
    return sorted(matches, key=lambda match: match.ratio is None)


def training_matches(
    recipes: Iterable[Recipe], model: Model, gpu: str, dtype: str, tokens_per_s_per_gpu: float
) -> list[PublishedMatch]:
    """Return published tokens/s/GPU of the same model; recipes scale weakly, so any number of GPUs compares."""
    return [
        PublishedMatch(
            metric="tokens/s/GPU", value=value, ratio=tokens_per_s_per_gpu / value, run=f"{row['gpus']} GPUs",
            source=row["source"],
        )
        for _, row, value in _published(recipes, model, gpu, dtype, "tokens_per_s")
    ]  # fmt: skip


def _published(
    recipes: Iterable[Recipe], model: Model, gpu: str, dtype: str, rate: str
) -> Iterator[tuple[Recipe, Mapping[str, Any], float]]:
    """Yield the published results that have this rate, each with its recipe and the rate per GPU."""
    for recipe in recipes:
        sizes = {size for size in recipe.sizes if recipe.model(size).name == model.name}
        for row in recipe.references:
            if row["size"] in sizes and row["gpu"] == gpu and row["dtype"] == dtype and row.get(rate):
                yield recipe, row, row[rate] / row["gpus"]


def _lengths(recipe: Recipe, reference: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return ISL and OSL of a published result, which names a use case of its recipe."""
    for row in recipe.rows:
        cases = row["use_case"] if isinstance(row["use_case"], list) else [row["use_case"]]
        if reference.get("use_case") in cases:
            return row["isl"], row["osl"]
    return None, None
