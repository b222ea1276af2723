"""Proxies: one for every size, use case and dtype, small, with the structure of the original model, at any scale."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmb.config.model import Model
from llmb.config.overrides import Setting
from llmb.config.proxy import small_proxy
from llmb.config.recipe import Recipe, Row, expand_gpus, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Parallel, RunConfig, Training
from llmb.errors import ConfigError
from llmb.ops.gemm.fp8_linear import fits_fp8
from llmb.perfmodel import params

RECIPES = load_all([shipped()])
DTYPES = {
    "training": ["bf16", "fp32", "fp8"],
    "inference": ["bf16", "fp8", "nvfp4"],
    "outofcore": ["bf16", "fp32"],
}
LAYOUTS = sorted(
    {
        (recipe.workload, row["size"], row["gpu"])
        for recipe in RECIPES.values()
        if recipe.kind == "training"
        for row in recipe.rows
        if expand_gpus(row["gpus"])[-1] > 1
    }
)
PROXIES = [(recipe, row) for recipe in RECIPES.values() for row in recipe.proxies]


def name(value: object) -> str | None:
    if isinstance(value, Recipe):
        return value.workload
    return (
        "-".join(str(value[k]) for k in ("size", "mode", "use_case") if k in value) if isinstance(value, dict) else None
    )


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=name)
def test_every_size_and_use_case_has_a_proxy(recipe: Recipe) -> None:
    listed = {(row["size"], row.get("mode"), row.get("use_case")) for row in recipe.rows}
    expected = listed or {(size, None, None) for size in recipe.sizes}  # a recipe with proxies only
    actual = [(row["size"], row.get("mode"), row.get("use_case")) for row in recipe.proxies]
    assert set(actual) == expected
    assert {size for size, *_ in expected} == set(recipe.sizes)
    assert len(actual) == len(expected)


@pytest.mark.parametrize(("recipe", "row"), PROXIES, ids=name)
def test_proxy_runs_on_any_machine(recipe: Recipe, row: Row) -> None:
    assert row["gpus"] == 1
    assert row["dtype"] == DTYPES[recipe.kind]
    assert "gpu" not in row
    assert params.parameters(small_proxy(recipe.model(row["size"]))) < 32e6


@pytest.mark.parametrize(("recipe", "row"), PROXIES, ids=name)
def test_proxy_keeps_the_structure_of_the_model(recipe: Recipe, row: Row) -> None:
    original = recipe.model(row["size"])
    proxy = small_proxy(original)
    assert structure(proxy) == structure(original)
    if proxy.mla is None:
        assert 1 < proxy.kv_heads < proxy.heads or proxy.kv_heads == original.kv_heads
        assert proxy.heads // proxy.kv_heads == original.heads // original.kv_heads
        assert proxy.heads * proxy.head_dim == proxy.hidden
    if proxy.pattern is not None:
        assert len(proxy.pattern) == proxy.layers
    if proxy.mamba is not None:
        assert proxy.mamba.heads * proxy.mamba.head_dim == 2 * proxy.hidden
        assert row["seqlen"] > proxy.mamba.chunk
    if proxy.experts is not None:
        per_group = proxy.experts.count // proxy.experts.groups
        assert proxy.experts.top_k <= proxy.experts.top_groups * per_group
        assert 0 < proxy.experts.dense_layers < proxy.layers or original.experts.dense_layers == 0  # type: ignore[union-attr]


def structure(model: Model) -> tuple[object, ...]:
    """Return the structural features of a model, independent of its size."""
    moe = model.experts
    return (
        model.architecture,
        {kind for kind, count in model.blocks.items() if count},
        set(model.pattern or ""),
        (model.gated, model.tied_embeddings, model.norm_eps, model.rope),
        moe and (moe.shared, moe.score, moe.groups > 1, moe.top_k > 1, moe.top_k < moe.count),
        model.mla is not None,
    )


@pytest.mark.parametrize("row", RECIPES["inference_deepseek-r1"].proxies, ids=name)
def test_prompts_fit_the_token_budget_unless_prefill_is_chunked(row: Row) -> None:
    chunked = row.get("chunked_prefill", True)
    assert row["isl"] <= row["max_num_tokens"] or chunked
    assert row["max_batch_size"] <= row["max_num_tokens"]


def test_one_use_case_needs_chunked_prefill() -> None:
    chunked = [r["use_case"] for r in RECIPES["inference_deepseek-r1"].proxies if r["isl"] > r["max_num_tokens"]]
    assert chunked == ["summarization"]


def proxy_config(workload: str, size: str, gpus: int, layout: str | None = None, **settings: str) -> RunConfig:
    overrides = tuple(Setting(field=field, value=value, source="--set") for field, value in settings.items())
    request = RunRequest(size=size, dtype="fp8", gpus=gpus, proxy="small", layout=layout, settings=overrides)
    return resolve(RECIPES[workload], request)


def gemm_shapes(model: Model, parallel: Parallel) -> Iterator[tuple[int, int]]:
    """Yield K and N of one rank's shard of every split GEMM."""
    tp, hidden = parallel.tp, model.hidden
    if model.mla is None:
        yield hidden, model.heads * model.head_dim // tp
        yield hidden, model.kv_heads * model.head_dim // tp
    if model.blocks.get("mlp"):
        yield hidden, model.ffn // tp
    if model.mamba is not None:
        inner, groups = model.mamba.heads * model.mamba.head_dim, model.mamba.groups * model.mamba.state
        yield hidden, (2 * inner + 2 * groups + model.mamba.heads) // tp
        yield inner // tp, hidden
    if model.experts is not None:
        yield hidden, model.experts.ffn // parallel.etp


@pytest.mark.parametrize("gpus", [2, 4, 6, 8, 16, 64])
@pytest.mark.parametrize(("workload", "size", "gpu"), LAYOUTS)
def test_multi_rank_proxy_has_the_structure_of_the_model_and_fp8_shapes(
    workload: str, size: str, gpu: str, gpus: int
) -> None:
    config = proxy_config(workload, size, gpus, gpu)
    work, parallel = config.workload, config.parallel
    assert isinstance(work, Training)
    assert structure(config.model) == structure(RECIPES[workload].model(size))
    assert params.parameters(config.model) < 64e6
    assert config.model.layers % (parallel.pp * (parallel.vp or 1)) == 0
    tokens = work.mbs * work.seqlen // parallel.cp // parallel.tp
    for inputs, outputs in gemm_shapes(config.model, parallel):
        assert fits_fp8(tokens, inputs, outputs)
    assert work.ga == 2 * parallel.pp
    assert (config.machine.gpu, config.machine.nodes, config.machine.gpus) == ("cpu", 1, gpus)
    assert f"x {gpu} as" in (config.proxy or "")


@pytest.mark.parametrize(
    ("workload", "size", "gpus", "gpu", "description"),
    [
        ("pretrain_llama3.1", "405b", 16, None, "layout fsdp tp2 dp64 of 128 x gb200 as fsdp tp2 dp8"),
        ("pretrain_llama3.1", "405b", 16, "h100", "layout tp8 pp8 cp2 vp8 dp8 of 1024 x h100 as tp2 pp2 cp2 vp2 dp2"),
        ("pretrain_grok1", "314b", 16, None, "layout tp4 ep8 etp4 dp32 of 128 x gb200 as tp2 ep4 etp2 dp8"),
        ("pretrain_grok1", "314b", 16, "h100", "tp4 pp8 cp2 vp8 ep8 dp8 of 512 x h100 as tp2 pp2 cp2 vp2 ep4 dp2"),
        ("pretrain_nemotronh", "56b", 8, None, "layout tp8 dp4 of 32 x h100 as tp4 dp2"),
        ("pretrain_llama3.1", "1b", 4, None, "layout dp2 of 2 x h200 as dp4"),
        ("pretrain_deepseek-v3", "671b", 4, None, "no layout for several GPUs is published, here dp4"),
    ],
)  # fmt: skip
def test_proxy_names_the_row_whose_layout_it_scales_down(
    workload: str, size: str, gpus: int, gpu: str | None, description: str
) -> None:
    assert (proxy_config(workload, size, gpus, gpu).proxy or "").endswith(description)


def test_documented_layouts_follow_the_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    for workload, size, gpu in LAYOUTS:
        if size in ("405b", "314b", "56b") and gpu in ("gb200", "h100"):
            description = (proxy_config(workload, size, 16, gpu).proxy or "").partition("layout ")[2]
            row, scaled = description.split(" of ")[0], description.split(" as ")[1]
            assert f"{gpu.upper()} | {row} | {scaled} |" in page


@pytest.mark.parametrize("recipe", [r for r in RECIPES.values() if r.kind == "training"], ids=name)
def test_any_scale_from_1_to_64_resolves(recipe: Recipe) -> None:
    for size in recipe.sizes:
        for gpus in range(1, 65):
            assert proxy_config(recipe.workload, size, gpus).parallel.world_size == gpus


def test_single_rank_proxy_is_the_recipe_row() -> None:
    config = proxy_config("pretrain_llama3.1", "405b", 1, "h100")
    assert config.parallel == Parallel()
    assert (config.workload.steps, config.workload.window) == (40, (11, 40))  # type: ignore[union-attr]
    assert "layout" not in (config.proxy or "")
    assert config.model == small_proxy(RECIPES["pretrain_llama3.1"].model("405b"))


def test_settings_override_the_layout_and_enlarge_the_model() -> None:
    config = proxy_config("pretrain_llama3.1", "405b", 16, "h100", tp="4", pp="4", cp="1", vp="none", mbs="2")
    assert config.parallel == Parallel(tp=4, pp=4)
    assert (config.model.kv_heads, config.workload.ga, config.workload.gbs) == (4, 8, 16)  # type: ignore[union-attr]
    described = "layout changed from tp8 pp8 cp2 vp8 dp8 of 1024 x h100 to tp4 pp4"  # not the row's, scaled down
    assert (config.proxy or "").endswith(described)
    deepseek = proxy_config("pretrain_deepseek-v3", "671b", 8, tp="2", ep="4", pp="2")
    assert deepseek.parallel == Parallel(tp=2, pp=2, ep=4, dp=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": "16"}, "tp 16 does not divide the 8 key and value heads of Llama-3.1-405B; tp could be 1, 2, 4, 8"),
        ({"tp": "3"}, "does not divide 16 GPUs"),
        ({"gbs": "4", "pp": "8"}, "pp 8 needs at least 8 micro-batches"),
        ({"seqlen": "100", "cp": "2"}, "seqlen 100 is not a multiple of 2 x cp 2 x tp 2 = 8; seqlen could be 96"),
    ],
)
def test_layout_invalid_for_the_model_is_rejected_for_its_proxy(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        proxy_config("pretrain_llama3.1", "405b", 16, **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
