"""Inference recipes: models shared with training, published figures that have a row, proxies on any layout."""

import pytest

from llmb.config.overrides import Setting
from llmb.config.recipe import Recipe, Row, load_all, selector_values, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError

RECIPES = load_all([shipped()])
SERVING = [recipe for recipe in RECIPES.values() if recipe.kind == "inference"]
LLAMA, R1 = RECIPES["inference_llama3.1"], RECIPES["inference_deepseek-r1"]
CASES = {"reasoning": (1000, 1000), "chat": (128, 128), "summarization": (8000, 512), "generation": (512, 8000)}


def proxy_config(recipe: Recipe, size: str, gpus: int, layout: str | None = None, **fields: str) -> RunConfig:
    overrides = tuple(Setting(field=name, value=value, source="--set") for name, value in fields.items())
    request = RunRequest(size=size, dtype="fp8", gpus=gpus, proxy="small", layout=layout, settings=overrides)
    return resolve(recipe, request)


def work_of(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload


@pytest.mark.parametrize("size", LLAMA.sizes)
def test_llama_models_are_those_of_pretraining(size: str) -> None:
    assert LLAMA.models[size] == RECIPES["pretrain_llama3.1"].models[size]


def test_deepseek_has_the_same_shape_in_training_and_inference() -> None:
    trained, served = RECIPES["pretrain_deepseek-v3"].model("671b"), R1.model("671b")
    assert [getattr(trained, f) for f in ("layers", "hidden", "experts", "mla", "rope")] == [
        getattr(served, f) for f in ("layers", "hidden", "experts", "mla", "rope")
    ]


@pytest.mark.parametrize("recipe", SERVING, ids=lambda r: r.workload)
def test_use_cases_have_the_same_lengths_in_all_recipes(recipe: Recipe) -> None:
    assert {row["use_case"]: (row["isl"], row["osl"]) for row in recipe.rows} == CASES
    for row in recipe.proxies:
        isl, osl = CASES[row["use_case"]]
        assert (row["true_width"]["isl"], row["true_width"]["osl"]) == (isl, osl)


@pytest.mark.parametrize("gpu", ["h200", "h100", "b200", "gb200"])
def test_llama_has_each_mode_and_use_case_for_each_gpu_and_dtype(gpu: str) -> None:
    actual = sorted(
        (row["size"], dtype, row["mode"], row["use_case"])
        for row in LLAMA.rows
        if gpu in selector_values(row, "gpu")
        for dtype in selector_values(row, "dtype")
    )
    formats = [("8b", "bf16"), ("8b", "fp8"), ("70b", "bf16"), ("70b", "fp8"), ("70b", "nvfp4")]
    modes = ("max_throughput", "min_latency")
    assert actual == sorted((*size_dtype, mode, case) for size_dtype in formats for mode in modes for case in CASES)


@pytest.mark.parametrize("row", LLAMA.references, ids=lambda r: f"{r['gpu']}-{r['size']}-{r['use_case']}-{r['source']}")
def test_published_figures_match_rows_and_the_newest_is_the_reference(row: Row) -> None:
    picks = {name: row[name] for name in ("mode", "use_case")}
    overrides = tuple(Setting(field=name, value=value, source="--set") for name, value in picks.items())
    request = RunRequest(size=row["size"], dtype=row["dtype"], gpus=row["gpus"], gpu=row["gpu"], settings=overrides)
    config = resolve(LLAMA, request)
    assert config.reference is not None
    assert config.reference.source.startswith("TensorRT-LLM 1.0")
    assert (config.precision.kv_dtype, work_of(config).concurrency) == ("fp8", work_of(config).num_requests)


@pytest.mark.parametrize(
    ("gpus", "layout", "layout_text", "batch"),
    [
        (4, None, "layout tp4 ep4 of 4 x gb200 with attention data parallelism as tp4 ep4", 4),
        (2, None, "layout tp4 ep4 of 4 x gb200 with attention data parallelism as tp2 ep2", 8),
        (16, None, "layout tp8 pp2 ep8 of 16 x h100 with attention data parallelism as tp8 pp2 ep8", 2),
        (4, "h100", "layout tp8 pp2 ep8 of 16 x h100 with attention data parallelism as tp2 pp2 ep2", 8),
    ],
)
def test_multi_rank_proxy_has_the_layout_of_a_row(gpus: int, layout: str | None, layout_text: str, batch: int) -> None:
    config = proxy_config(R1, "671b", gpus, layout)
    assert layout_text in (config.proxy or "")
    work = work_of(config)
    assert work.attention_dp
    assert (work.max_batch_size, work.concurrency, work.num_requests) == (batch, 16, 32)


def test_min_latency_uses_tensor_parallelism() -> None:
    config = proxy_config(R1, "671b", 4, mode="min_latency")
    assert (config.parallel.tp, config.parallel.ep, work_of(config).attention_dp) == (4, 1, False)


@pytest.mark.parametrize(("size", "gpus"), [("8b", 2), ("70b", 2), ("70b", 4)])
def test_llama_splits_its_heads(size: str, gpus: int) -> None:
    assert proxy_config(LLAMA, size, gpus).parallel.tp == gpus


def test_without_a_published_layout_tensor_parallelism_is_used() -> None:
    assert (proxy_config(LLAMA, "8b", 4).proxy or "").endswith("no layout for several GPUs is published, here tp4")
    with pytest.raises(ConfigError, match="tp 3 does not divide the 32 heads"):
        proxy_config(LLAMA, "8b", 3)
