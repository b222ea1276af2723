"""Dry runs of recipe rows agree with the closed-form estimates of memory, FLOPs and traffic."""

from dataclasses import replace

import pytest

from llmb.config.overrides import Setting
from llmb.config.recipe import expand_gpus, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import RunConfig
from llmb.launch.torch_process import run_dry_run
from llmb.perfmodel.communication import step_traffic
from llmb.perfmodel.dry_run_summary import DryRunSummary
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.shards import rank_flops, rank_parameters

CLOSE = 0.02
SMALL = 2**20  # bytes per call: the closed form leaves out collectives of counts and scalars
RECIPES = {name: recipe for name, recipe in load_all([shipped()]).items() if recipe.kind == "training"}


def row(workload: str, size: str, dtype: str, gpus: int, gpu: str) -> RunConfig:
    return resolve(RECIPES[workload], RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu))


def every_row() -> list[tuple[str, str, str, int, str]]:
    """Return the arguments of `row` for each row at its smallest and largest scale."""
    keys = []
    for workload, recipe in RECIPES.items():
        for recipe_row in recipe.rows:
            scales = expand_gpus(recipe_row["gpus"])
            for dtype in recipe_row["dtype"] if isinstance(recipe_row["dtype"], list) else [recipe_row["dtype"]]:
                for gpus in dict.fromkeys((scales[0], scales[-1])):
                    keys.append((workload, recipe_row["size"], dtype, gpus, recipe_row["gpu"]))
    return keys


def check(config: RunConfig, summary: DryRunSummary) -> None:
    stage = summary.rank * config.parallel.pp // config.parallel.world_size
    assert summary.parameters == rank_parameters(config, stage)
    assert summary.flops == pytest.approx(rank_flops(config, stage), rel=1e-12)
    assert summary.peak_bytes == pytest.approx(memory_estimate(config).total, rel=CLOSE)
    estimated = {(traffic.kind, traffic.dimension): traffic for traffic in step_traffic(config, stage)}
    for traffic in summary.collectives:
        expected = estimated.pop((traffic.kind, traffic.dimension), None)
        if expected is None:
            assert traffic.bytes < SMALL * traffic.count
        else:
            assert traffic.bytes == pytest.approx(expected.bytes, rel=CLOSE)
    assert not estimated, "the closed form has collectives that are not called"


DAILY = ("pretrain_grok1", "314b", "bf16", 512, "h100")  # tp, pp, cp, vp and ep


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=[] if key == DAILY else [pytest.mark.nightly]) for key in every_row()],
    ids=lambda key: "-".join(map(str, key)),
)
def test_recipe_row_agrees_with_estimates(key: tuple) -> None:
    config = row(*key)
    check(config, run_dry_run(config))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.nightly), "fp8"])
def test_proxy_layer_at_full_width(dtype: str) -> None:
    """The gradient of a single weight is a large part of the peak, as are cached fp8 weights."""
    settings = tuple(
        Setting(field=field, value=value, source="test") for field, value in (("gbs", 2), ("seqlen", 4096))
    )
    request = RunRequest(size="314b", dtype=dtype, gpus=1, gpu="h200", proxy="true-width", settings=settings)
    config = resolve(RECIPES["pretrain_grok1"], request)
    assert config.model.layers == 1
    check(config, run_dry_run(config))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_softcap_and_window_agree_with_estimates(dtype: str) -> None:
    """Layers of Gemma 2 9B, four of them."""
    config = row("pretrain_llama3.1", "8b", dtype, 1, "h200")
    model = replace(
        config.model, name="gemma2", architecture="gemma2", layers=4, hidden=3584, heads=16, head_dim=256, vocab=256000,
        activation="gelu", post_norms=True, tied_embeddings=True, attn_logit_softcap=50.0, logit_softcap=30.0,
        attention_pattern="SF", window=4096,
    )  # fmt: skip
    changed = replace(config, model=model, workload=replace(config.workload, mbs=1, gbs=2, ga=2))
    check(changed, run_dry_run(changed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "gpus", "tp"),
    [pytest.param("rowwise", 1, 1, marks=pytest.mark.nightly), ("blockwise", 1, 1),
     *(pytest.param(recipe, gpus, tp, marks=pytest.mark.nightly) for recipe in ("rowwise", "blockwise")
       for gpus, tp in ((8, 1), (8, 2)))],
)  # fmt: skip
def test_recipes_with_many_scales_agree_with_estimates(recipe: str, gpus: int, tp: int) -> None:
    """Two layers, and with FSDP a micro-batch of one sequence."""
    config = row("pretrain_llama3.1", "8b", "fp8", gpus, "h200" if gpus == 1 else "h100")
    parallel = replace(config.parallel, tp=tp, dp=gpus // tp, fsdp=tp < gpus)
    changed = replace(
        config, model=replace(config.model, layers=2), precision=replace(config.precision, fp8_recipe=recipe),
        parallel=parallel, workload=replace(config.workload, mbs=1, gbs=2 * parallel.dp, ga=2, recompute_layers=0),
    )  # fmt: skip
    check(changed, run_dry_run(changed))


@pytest.mark.nightly
def test_recomputed_and_offloaded_layers_agree_with_estimates() -> None:
    config = row("pretrain_llama3.1", "8b", "fp8", 8, "h100")
    model = replace(config.model, layers=6)
    for fsdp in (True, False):
        work = replace(config.workload, recompute_layers=2, offload_layers=2)
        changed = replace(config, model=model, workload=work, parallel=replace(config.parallel, fsdp=fsdp))
        summary = run_dry_run(changed)
        check(changed, summary)
        assert summary.host_bytes == pytest.approx(memory_estimate(changed).host, rel=CLOSE)
