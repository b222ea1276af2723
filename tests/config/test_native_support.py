"""Every shipped recipe row is one that the native engine runs, as printed or with recorded departures."""

import json
from dataclasses import replace
from typing import Any

import pytest
from published_models import GPT_OSS_20B

from llmb.config.native.departures import check_engine_support, departure_lines, departures
from llmb.config.native.number_formats import number_formats
from llmb.config.native.serving_support import supported_serving
from llmb.config.overrides import Setting
from llmb.config.recipe import Recipe, expand_gpus, selector_values
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.explain.run_prediction import predict_run
from llmb.report.setting_text import precision_text

SERVING = "cuda_graphs=false instead of the recipe's true (native engine: CUDA graphs of serving do not capture "
BATCH = "max_batch_size=3334 instead of the recipe's 3328 (native engine: a last wave of 48 of 30000 requests would "
PIPELINE = "cuda_graphs=false instead of the recipe's true (native engine: the pipeline schedule launches from the host"


def rows(recipe: Recipe) -> list[RunConfig]:
    """Resolve every row of a recipe, at every scale, for every GPU type and dtype that it lists."""
    return [
        resolve(recipe, RunRequest(size=row["size"], dtype=dtype, gpus=gpus, gpu=gpu, settings=_selectors(row)))
        for row in recipe.rows
        for gpu in selector_values(row, "gpu")
        for dtype in selector_values(row, "dtype")
        for gpus in expand_gpus(row.get("gpus", 1))
    ]


def _selectors(row: dict[str, Any]) -> tuple[Setting, ...]:
    names = [name for name in ("mode", "use_case") if name in row]
    return tuple(Setting(field=n, value=selector_values(row, n)[0], source="--set") for n in names)


@pytest.mark.parametrize("workload", ["pretrain_llama3.1", "pretrain_nemotronh", "pretrain_grok1"])
def test_every_training_row_runs_or_departs_on_record(recipes, workload):
    for config in rows(recipes[workload]):
        check_engine_support(config)
        work = config.workload
        for name in ("cuda_graphs", "fp8_experts"):
            printed = config.recipe_row.get(name, False if name == "cuda_graphs" else None)
            recorded = [o for o in config.overrides if o.field == name]
            assert getattr(work, name) == printed or printed is None or len(recorded) == 1, config.name


def test_every_serving_row_runs_or_departs_on_record(recipes):
    for workload in ("inference_llama3.1", "inference_deepseek-r1"):
        for config in rows(recipes[workload]):
            check_engine_support(config)
            several = config.machine.gpus > 1
            assert config.workload.cuda_graphs is not several
            lines = [line for line in departures(config) if not line.startswith(BATCH)]
            assert [line.startswith(SERVING) for line in lines] == [True] * several


@pytest.mark.nightly  # each plan takes seconds
def test_every_outofcore_row_runs(recipes):
    for config in rows(recipes["outofcore_llama3"]):
        assert departures(config) == []


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_every_training_proxy_runs(recipes, gpus):
    for workload in ("pretrain_llama3.1", "pretrain_nemotronh", "pretrain_grok1", "pretrain_deepseek-v3"):
        for size in recipes[workload].models:
            for row in recipes[workload].matching(True, size=size):
                for dtype in selector_values(row, "dtype"):
                    request = RunRequest(size=size, dtype=dtype, gpus=gpus, proxy="small")
                    assert departures(resolve(recipes[workload], request)) == []


def test_true_width_proxy_has_no_more_recomputed_layers_than_layers(recipes):
    request = RunRequest(size="8b", dtype="fp32", gpus=1, gpu="h200", proxy="true-width")
    config = resolve(recipes["pretrain_nemotronh"], request)
    assert config.model.layers < 52
    assert config.workload.recompute_layers == config.model.layers


def llama(recipes, gpu: str, gpus: int, dtype: str = "fp8", size: str = "8b", **settings: str) -> RunConfig:
    pairs = tuple(Setting(field=name, value=value, source="--set") for name, value in settings.items())
    request = RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu, settings=pairs)
    return resolve(recipes["pretrain_llama3.1"], request)


@pytest.mark.parametrize(("gpu", "gpus"), [("gb300", 8), ("gb200", 16), ("b200", 128), ("h100", 64)])
def test_llama_8b_rows_run_with_graphs_on_several_gpus(recipes, gpu, gpus):
    config = llama(recipes, gpu, gpus)
    assert config.recipe_row["cuda_graphs"] is True
    assert config.workload.cuda_graphs is True
    assert departures(config) == []


@pytest.mark.parametrize("layout", [{"tp": "2"}, {"cp": "2"}, {"fsdp": "true"}])
def test_graphs_run_in_every_layout_without_pipeline(recipes, layout):
    assert llama(recipes, "gb200", 16, cuda_graphs="true", **layout).workload.cuda_graphs is True


def test_row_with_a_pipeline_departs_from_graphs(recipes):
    config = llama(recipes, "gb200", 16, pp="2")
    assert config.workload.cuda_graphs is False
    (line,) = departures(config)
    assert line.startswith(PIPELINE)
    assert departure_lines([config, config]) == [f"{config.name} and 1 more: {line}"]
    assert departures(llama(recipes, "gb200", 16, pp="2", cuda_graphs="false")) == []


def test_explicit_setting_that_cannot_be_had_is_refused_at_the_desk(recipes):
    with pytest.raises(ConfigError, match="cuda_graphs=true on 16 x gb200: native engine: the pipeline schedule"):
        llama(recipes, "gb200", 16, pp="2", cuda_graphs="true")
    with pytest.raises(ConfigError, match="does not run cuda_graphs=true with offload_layers=1"):
        llama(recipes, "gb200", 16, offload_layers="1", cuda_graphs="true")
    assert llama(recipes, "h200", 1, cuda_graphs="true").workload.cuda_graphs is True


def test_serving_on_a_cpu_has_no_graphs_and_refuses_them(recipes):
    def serve(**settings: str) -> RunConfig:
        pairs = tuple(Setting(field=name, value=value, source="--set") for name, value in settings.items())
        request = RunRequest(size="8b", dtype="bf16", gpus=2, proxy="small", settings=pairs)
        return resolve(recipes["inference_llama3.1"], request)

    assert serve().workload.cuda_graphs is False
    assert departures(serve()) == []
    with pytest.raises(ConfigError, match="cuda_graphs=true needs a CUDA GPU"):
        serve(cuda_graphs="true")


def test_submit_says_what_departs(llmb_run, monkeypatch):
    monkeypatch.setattr("llmb.cli.submit_slurm.run_location", lambda options, environ: "slurm")
    monkeypatch.setattr("llmb.cli.submit_slurm.submit_all", lambda resolved, options, recipes: 0)
    line = "submit -w pretrain_llama3.1 -s 8b --dtype fp8 --scale 16 --gpu-type gb200 --set pp=2"
    code, out, _ = llmb_run(*line.split())
    assert code == 0
    assert out.startswith("departs from the recipe: pretrain_llama3.1_8b_fp8_gpus16")
    assert PIPELINE in out
    code, out, err = llmb_run(*line.split(), "--set", "cuda_graphs=true")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1


def test_another_engine_keeps_the_row(recipes):
    config = llama(recipes, "gb200", 16, engine="megatron_bridge")
    assert config.workload.cuda_graphs is True
    assert departures(config) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_decay_steps": "10", "lr_warmup_steps": "10"}, "lr_decay_steps=10: must be more than lr_warmup_steps=10"),
        ({"fp8_fast_accum": "true"}, "does not run fp8_fast_accum=true with dtype=bf16"),
        ({"save_norm_outputs": "true", "offload_layers": "1"}, "save_norm_outputs=true with offload_layers=1"),
        ({"balanced_experts": "true"}, "balanced_experts=true: model Llama-3.1-8B has no experts"),
        ({"recompute_layers": "20", "offload_layers": "20"}, "offload_layers=20: 12 of the 32 layers"),
        ({"fp8_experts": "false"}, "fp8_experts=False with Llama-3.1-8B in bf16"),
    ],
)
def test_what_the_engine_refuses_is_refused_at_the_desk(recipes, settings, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        llama(recipes, "h200", 1, "bf16", **settings)


def test_experts_are_in_bf16_where_the_gpu_has_no_fp8_grouped_gemm(recipes):
    def grok(gpu: str, gpus: int, dtype: str = "fp8") -> RunConfig:
        return resolve(recipes["pretrain_grok1"], RunRequest(size="314b", dtype=dtype, gpus=gpus, gpu=gpu))

    config = grok("gb200", 128)
    assert isinstance(config.workload, Training)
    assert config.workload.fp8_experts is False
    assert departures(config)[0].startswith("fp8_experts=false instead of the recipe's true (native engine: fp8 GEMMs")
    assert grok("h100", 512).workload.fp8_experts is True
    assert grok("gb200", 128, "bf16").workload.fp8_experts is None


def test_fp8_recipe_is_what_the_engine_uses_at_every_scale(recipes):
    assert llama(recipes, "h200", 1).precision.fp8_recipe == "tensorwise_delayed"
    assert llama(recipes, "h100", 8).precision.fp8_recipe == "tensorwise_delayed"
    assert llama(recipes, "h200", 1, "bf16").precision.fp8_recipe is None
    nemotron = RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200")
    assert resolve(recipes["pretrain_nemotronh"], nemotron).precision.fp8_recipe == "tensorwise_delayed"
    serving = RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200")
    assert resolve(recipes["inference_llama3.1"], serving).precision.fp8_recipe == "channelwise"
    deepseek = RunRequest(size="671b", dtype="fp8", gpus=16, gpu="h100")
    assert resolve(recipes["inference_deepseek-r1"], deepseek).precision.fp8_recipe == "blockwise"


@pytest.mark.parametrize(
    ("workload", "size", "gpu", "gpus"),
    [
        ("pretrain_llama3.1", "8b", "h200", 1),
        ("pretrain_llama3.1", "8b", "h100", 8),
        ("pretrain_llama3.1", "405b", "h100", 1024),
        ("pretrain_nemotronh", "56b", "h100", 32),
        ("pretrain_grok1", "314b", "h100", 512),
    ],
)
def test_precision_can_be_set_at_every_scale(recipes, workload, size, gpu, gpus):
    formats = dict.fromkeys(("master_weights", "gradients", "moments", "reduce_dtype"), "bf16")
    values = formats | {"fp8_recipe": "tensorwise_current"}
    values |= {"save_norm_outputs": "true"} if workload == "pretrain_llama3.1" else {}
    settings = tuple(Setting(field=name, value=value, source="--set") for name, value in values.items())
    config = resolve(recipes[workload], RunRequest(size=size, dtype="fp8", gpus=gpus, gpu=gpu, settings=settings))
    assert config.precision.fp8_recipe == "tensorwise_current"
    assert formats.items() <= number_formats(config).items()


@pytest.mark.parametrize("name", ["master_weights", "gradients", "moments", "reduce_dtype"])
def test_fp32_run_has_no_bf16_state(recipes, name):
    settings = (Setting(field=name, value="bf16", source="--set"),)
    request = RunRequest(size="8b", dtype="fp32", gpus=2, proxy="small", settings=settings)
    with pytest.raises(ConfigError, match=f"does not run {name}=bf16 with dtype=fp32"):
        resolve(recipes["pretrain_llama3.1"], request)


def test_save_norm_outputs_is_for_llama(recipes):
    settings = (Setting(field="save_norm_outputs", value="true", source="--set"),)
    request = RunRequest(size="8b", dtype="bf16", gpus=8, gpu="h200", settings=settings)
    with pytest.raises(ConfigError, match="save_norm_outputs=true with nemotron_h in bf16"):
        resolve(recipes["pretrain_nemotronh"], request)


def test_block_scales_of_widths_without_whole_blocks_are_refused(recipes):
    request = RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200")
    config = replace(resolve(recipes["inference_llama3.1"], request), model=GPT_OSS_20B)
    for recipe in ("tensorwise", "channelwise"):
        supported_serving(replace(config, precision=replace(config.precision, fp8_recipe=recipe)))
    blockwise = replace(config, precision=replace(config.precision, fp8_recipe="blockwise"))
    with pytest.raises(ConfigError, match="the width of gpt-oss 20b is 2880; choose channelwise or tensorwise"):
        supported_serving(blockwise)


def test_out_of_core_training_keeps_no_current_scaling(recipes):
    settings = (Setting(field="fp8_recipe", value="tensorwise_current", source="--set"),)
    request = RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200", force=True, settings=settings)
    choices = "tensorwise_delayed, rowwise, blockwise"
    with pytest.raises(ConfigError, match=rf"fp8_recipe of outofcore: 'tensorwise_current'.*: {choices}$"):
        resolve(recipes["outofcore_llama3"], request)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_recipes_with_many_scales_run_at_every_scale(recipes, recipe):
    assert llama(recipes, "h200", 1, fp8_recipe=recipe).precision.fp8_recipe == recipe
    assert llama(recipes, "h100", 8, fp8_recipe=recipe).precision.fp8_recipe == recipe
    settings = (Setting(field="fp8_recipe", value=recipe, source="--set"),)
    small = RunRequest(size="8b", dtype="fp8", gpus=1, gpu="cpu", proxy="small", settings=settings)
    check_engine_support(resolve(recipes["pretrain_llama3.1"], small))  # whose proxy is wide enough


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_predictions_know_the_casts_and_gemms_of_recipes_with_many_scales(recipes, recipe):
    fast = {"fp8_fast_accum": "true"}  # which blockwise has not: it always adds its blocks in fp32
    one_scale, many = (
        predict_run(llama(recipes, "h200", 1, fp8_recipe=name, **(fast if name != "blockwise" else {})))
        for name in ("tensorwise_delayed", recipe)
    )
    assert many.source == one_scale.source
    slower = many.terms["gemm"] / one_scale.terms["gemm"]
    assert slower == pytest.approx(1.0, abs=0.01) if recipe == "rowwise" else 1.2 < slower < 1.3
    assert many.terms["quantization"] > one_scale.terms["quantization"]


@pytest.mark.parametrize(
    ("gpu", "gpus", "settings", "message"),
    [
        ("gb200", 16, {"fp8_recipe": "blockwise"}, "on Hopper only, not on NVIDIA GB200; choose rowwise"),
        ("h200", 1, {"fp8_recipe": "blockwise", "fp8_fast_accum": "true"}, "fp8_fast_accum=true has no effect with"),
        ("h200", 1, {"fp8_recipe": "blockwise", "model.ffn": "1040"}, "ffn is 1040; choose rowwise or tensorwise_del"),
        ("h200", 1, {"fp8_recipe": "rowwise", "model.ffn": "1000"}, "multiples of 16: .* ffn is 1000; choose tensorw"),
        ("h100", 8, {"fp8_recipe": "blockwise", "cp": "2", "seqlen": "4224"},
         "cp=2 takes sequences in multiples of 512 tokens, .* got seqlen=4224"),
    ],
)  # fmt: skip
def test_shapes_that_many_scales_do_not_fit_are_named(recipes, gpu, gpus, settings, message):
    with pytest.raises(ConfigError, match=message):
        llama(recipes, gpu, gpus, **settings)


def test_models_without_explicit_layers_have_one_scale_per_tensor(recipes):
    settings = (Setting(field="fp8_recipe", value="rowwise", source="--set"),)
    request = RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200", settings=settings)
    with pytest.raises(ConfigError, match=r"fp8_recipe=rowwise is one of layers with explicit backward, which Nemo"):
        resolve(recipes["pretrain_nemotronh"], request)


def test_rank_refuses_a_recipe_of_another_kind_of_run(recipes):
    config = llama(recipes, "h200", 1)
    other = replace(config, precision=replace(config.precision, fp8_recipe="channelwise"))
    with pytest.raises(ConfigError, match=r"fp8_recipe of training: 'channelwise'; choices are: tensorwise_delayed, "):
        check_engine_support(other)


# Fields that follow from the number of GPUs: dp, and by weak scaling the batch, which the peak learning rate and names
# depend on; also the prediction, under `predicted`.
LAYOUT = {"name", "machine.gpus", "parallel.dp", "workload.gbs", "workload.lr"}


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("workload", "size"),
    [
        ("pretrain_llama3.1", "1b"),
        ("pretrain_llama3.1", "3b"),
        ("pretrain_llama3.1", "8b"),
        ("pretrain_nemotronh", "8b"),
    ],
)
def test_one_and_eight_gpus_differ_in_nothing_but_the_layout(llmb_run, workload, size, dtype):
    def show(gpus: int, *options: str) -> str:
        line = f"show -w {workload} -s {size} --dtype {dtype} --scale {gpus} --gpu-type h200"
        code, out, err = llmb_run(*line.split(), *options)
        assert (code, err) == (0, "")
        return out

    on_one, on_eight = (_flat(json.loads(show(gpus, "--json"))) for gpus in (1, 8))
    names = {name for name in on_one.keys() | on_eight.keys() if not name.startswith("predicted.")}
    assert {name for name in names if on_one.get(name) != on_eight.get(name)} <= LAYOUT
    precision = [next(line for line in show(gpus).splitlines() if line.startswith("precision")) for gpus in (1, 8)]
    assert precision[0] == precision[1]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted path."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for name, inner in value.items() for k, v in _flat(inner, f"{path}.{name}".lstrip(".")).items()}


def test_fp8_attention_needs_an_fp8_cache_and_heads_that_it_takes(recipes):
    config = resolve(recipes["inference_llama3.1"], RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200"))
    with_fp8 = replace(config, precision=replace(config.precision, kv_dtype="fp8", attention_dtype="fp8"))
    supported_serving(with_fp8)
    assert number_formats(with_fp8)["attention_dtype"] == "fp8"
    assert "prefill attention fp8" in precision_text(number_formats(with_fp8))
    refused = {
        "kv_dtype is bf16; set kv_dtype=fp8 too": {"precision": replace(with_fp8.precision, kv_dtype="bf16")},
        "has heads of 96": {"model": replace(config.model, head_dim=96)},
        "has a logit softcap": {"model": replace(config.model, attn_logit_softcap=30.0)},
        "has attention sinks": {"model": replace(config.model, attention_sinks=True)},
    }
    for cause, changes in refused.items():
        with pytest.raises(ConfigError, match=f"^attention_dtype=fp8.* {cause}"):
            supported_serving(replace(with_fp8, **changes))
