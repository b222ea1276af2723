"""Stand-ins: one for every size, use case and dtype, small, with the structure of the original model, at any scale."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmb.config.overrides import Setting
from llmb.config.proxy import small
from llmb.config.recipe import Recipe, Row, expand_gpus, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import Request
from llmb.config.spec import Model, Parallel, RunConfig, Training
from llmb.errors import ConfigError
from llmb.ops.gemm.fp8_linear import fits_fp8
from llmb.perfmodel import flops

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
    assert flops.parameters(small(recipe.model(row["size"]))) < 32e6


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


def stand_in(workload: str, size: str, gpus: int, layout: str | None = None, **settings: str) -> RunConfig:
    wishes = tuple(Setting(field=field, value=value, source="--set") for field, value in settings.items())
    asked = Request(size=size, dtype="fp8", gpus=gpus, proxy="small", layout=layout, settings=wishes)
    return resolve(RECIPES[workload], asked)


def shares(model: Model, parallel: Parallel) -> Iterator[tuple[int, int]]:
    """Inputs and outputs of one rank's part of every split product."""
    tp, wide = parallel.tp, model.hidden
    if model.latent is None:
        yield wide, model.heads * model.head_dim // tp
        yield wide, model.kv_heads * model.head_dim // tp
    if model.blocks.get("mlp"):
        yield wide, model.ffn // tp
    if model.mamba is not None:
        inner, groups = model.mamba.heads * model.mamba.head_dim, model.mamba.groups * model.mamba.state
        yield wide, (2 * inner + 2 * groups + model.mamba.heads) // tp
        yield inner // tp, wide
    if model.experts is not None:
        yield wide, model.experts.ffn // parallel.etp


@pytest.mark.parametrize("gpus", [2, 4, 6, 8, 16, 64])
@pytest.mark.parametrize(("workload", "size", "gpu"), LAYOUTS)
def test_at_scale_it_has_the_structure_of_the_original_and_computes_in_8_bits(
    workload: str, size: str, gpu: str, gpus: int
) -> None:
    config = stand_in(workload, size, gpus, gpu)
    work, parallel = config.workload, config.parallel
    assert isinstance(work, Training)
    assert structure(config.model) == structure(RECIPES[workload].model(size))
    assert flops.parameters(config.model) < 64e6
    assert config.model.layers % (parallel.pp * (parallel.vp or 1)) == 0
    tokens = work.mbs * work.seqlen // parallel.cp // parallel.tp
    for inputs, outputs in shares(config.model, parallel):
        assert fits_fp8(tokens, inputs, outputs)
    assert work.ga == 2 * parallel.pp
    assert (config.machine.gpu, config.machine.nodes, config.machine.gpus) == ("cpu", 1, gpus)
    assert f"x {gpu} as" in (config.proxy or "")


@pytest.mark.parametrize(
    ("workload", "size", "gpus", "gpu", "spelled"),
    [
        ("pretrain_llama3.1", "405b", 16, None, "layout fsdp tp2 dp64 of 128 x gb200 as fsdp tp2 dp8"),
        ("pretrain_llama3.1", "405b", 16, "h100", "layout tp8 pp8 cp2 vp8 dp8 of 1024 x h100 as tp2 pp2 cp2 vp2 dp2"),
        ("pretrain_grok1", "314b", 16, None, "layout tp4 ep8 etp4 dp32 of 128 x gb200 as tp2 ep4 etp2 dp8"),
        ("pretrain_grok1", "314b", 16, "h100", "tp4 pp8 cp2 vp8 ep8 dp8 of 512 x h100 as tp2 pp2 cp2 vp2 ep4 dp2"),
        ("pretrain_nemotronh", "56b", 8, None, "layout tp8 dp4 of 32 x h100 as tp4 dp2"),
        ("pretrain_llama3.1", "1b", 4, None, "no layout for several GPUs is published, here dp4"),
    ],
)  # fmt: skip
def test_it_says_whose_layout_it_scales_down(
    workload: str, size: str, gpus: int, gpu: str | None, spelled: str
) -> None:
    assert (stand_in(workload, size, gpus, gpu).proxy or "").endswith(spelled)


def test_the_page_on_layouts_prints_what_the_rule_gives() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    for workload, size, gpu in LAYOUTS:
        if size in ("405b", "314b", "56b") and gpu in ("gb200", "h100"):
            said = (stand_in(workload, size, 16, gpu).proxy or "").partition("layout ")[2]
            row, here = said.split(" of ")[0], said.split(" as ")[1]
            assert f"{gpu.upper()} | {row} | {here} |" in page


@pytest.mark.parametrize("recipe", [r for r in RECIPES.values() if r.kind == "training"], ids=name)
def test_any_scale_from_1_to_64_is_possible(recipe: Recipe) -> None:
    for size in recipe.sizes:
        for gpus in range(1, 65):
            assert stand_in(recipe.workload, size, gpus).parallel.world_size == gpus


def test_at_scale_1_it_is_the_row_as_printed() -> None:
    config = stand_in("pretrain_llama3.1", "405b", 1, "h100")
    assert config.parallel == Parallel()
    assert (config.workload.steps, config.workload.window) == (40, (11, 40))  # type: ignore[union-attr]
    assert "layout" not in (config.proxy or "")
    assert config.model == small(RECIPES["pretrain_llama3.1"].model("405b"))


def test_settings_come_on_top_and_the_model_grows_with_them() -> None:
    config = stand_in("pretrain_llama3.1", "405b", 16, "h100", tp="4", pp="4", cp="1", vp="none", mbs="2")
    assert config.parallel == Parallel(tp=4, pp=4)
    assert (config.model.kv_heads, config.workload.ga, config.workload.gbs) == (4, 8, 16)  # type: ignore[union-attr]
    assert (config.proxy or "").endswith("as tp4 pp4")
    deepseek = stand_in("pretrain_deepseek-v3", "671b", 8, tp="2", ep="4", pp="2")
    assert deepseek.parallel == Parallel(tp=2, pp=2, ep=4, dp=2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tp": "16"}, "tp 16 does not divide the 8 key and value heads of Llama-3.1-405B; tp could be 1, 2, 4, 8"),
        ({"tp": "3"}, "does not divide 16 GPUs"),
        ({"gbs": "4", "pp": "8"}, "pp 8 needs at least 8 micro-batches"),
        ({"seqlen": "100", "cp": "2"}, "seqlen 100 is not a multiple of 2 x cp 2 x tp 2 = 8; seqlen could be 96"),
    ],
)
def test_what_the_model_cannot_do_its_stand_in_is_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stand_in("pretrain_llama3.1", "405b", 16, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
