"""Stand-ins: one for every size, use case and dtype, small, with the structure of the original model."""

import pytest

from llmb import costs
from llmb.recipes.recipe import Recipe, Row, load_all, shipped
from llmb.spec import Model
from llmb.standins import small

RECIPES = load_all([shipped()])
DTYPES = {
    "training": ["bf16", "fp32", "fp8"],
    "inference": ["bf16", "fp8", "nvfp4"],
    "outofcore": ["bf16", "fp32"],
}
STAND_INS = [(recipe, row) for recipe in RECIPES.values() for row in recipe.proxies]


def name(value: object) -> str | None:
    if isinstance(value, Recipe):
        return value.workload
    return (
        "-".join(str(value[k]) for k in ("size", "mode", "use_case") if k in value) if isinstance(value, dict) else None
    )


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=name)
def test_every_size_and_use_case_has_one(recipe: Recipe) -> None:
    listed = {(row["size"], row.get("mode"), row.get("use_case")) for row in recipe.rows}
    wanted = listed or {(size, None, None) for size in recipe.sizes}  # a recipe of stand-ins alone
    found = [(row["size"], row.get("mode"), row.get("use_case")) for row in recipe.proxies]
    assert set(found) == wanted
    assert {size for size, *_ in wanted} == set(recipe.sizes)
    assert len(found) == len(wanted)


@pytest.mark.parametrize(("recipe", "row"), STAND_INS, ids=name)
def test_it_runs_anywhere(recipe: Recipe, row: Row) -> None:
    assert row["gpus"] == 1
    assert row["dtype"] == DTYPES[recipe.kind]
    assert "gpu" not in row
    assert costs.parameters(small(recipe.model(row["size"]))) < 32e6


@pytest.mark.parametrize(("recipe", "row"), STAND_INS, ids=name)
def test_it_keeps_the_structure_of_the_original(recipe: Recipe, row: Row) -> None:
    original = recipe.model(row["size"])
    made = small(original)
    assert structure(made) == structure(original)
    if made.latent is None:
        assert 1 < made.kv_heads < made.heads or made.kv_heads == original.kv_heads
        assert made.heads // made.kv_heads == original.heads // original.kv_heads
        assert made.heads * made.head_dim == made.hidden
    if made.pattern is not None:
        assert len(made.pattern) == made.layers
    if made.mamba is not None:
        assert made.mamba.heads * made.mamba.head_dim == 2 * made.hidden
        assert row["seqlen"] > made.mamba.chunk
    if made.experts is not None:
        per_group = made.experts.count // made.experts.groups
        assert made.experts.top_k <= made.experts.top_groups * per_group
        assert 0 < made.experts.dense_layers < made.layers or original.experts.dense_layers == 0  # type: ignore[union-attr]


def structure(model: Model) -> tuple[object, ...]:
    """What makes a model what it is, whatever its size."""
    moe = model.experts
    return (
        model.architecture,
        {kind for kind, count in model.blocks.items() if count},
        set(model.pattern or ""),
        (model.gated, model.tied_embeddings, model.norm_eps, model.rope),
        moe and (moe.shared, moe.score, moe.groups > 1, moe.top_k > 1, moe.top_k < moe.count),
        model.latent is not None,
    )


@pytest.mark.parametrize("row", RECIPES["inference_deepseek-r1"].proxies, ids=name)
def test_prompts_fit_the_token_budget_unless_they_may_be_cut(row: Row) -> None:
    cut = row.get("chunked_prefill", True)
    assert row["isl"] <= row["max_num_tokens"] or cut
    assert row["max_batch_size"] <= row["max_num_tokens"]


def test_one_use_case_cuts_its_prompts() -> None:
    cut = [r["use_case"] for r in RECIPES["inference_deepseek-r1"].proxies if r["isl"] > r["max_num_tokens"]]
    assert cut == ["summarization"]
