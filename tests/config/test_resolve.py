"""Resolving a recipe row to a RunConfig: every row resolves, overrides are recorded, errors are one line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.config.overrides import Setting, from_arguments, from_environment
from llmb.config.parallel_layout import check_model, check_serving
from llmb.config.recipe import expand_gpus, load_all, per_gpus, selector_values, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Parallel
from llmb.errors import ConfigError

ALL = load_all([shipped()])
SEARCHED = pytest.mark.nightly  # rows of out-of-core training search a plan, for seconds each
ROWS = [
    pytest.param(recipe, row, dtype, gpus, proxy, marks=[SEARCHED] if recipe.kind == "outofcore" and not proxy else [])
    for recipe in ALL.values()
    for proxy, rows in ((False, recipe.rows), (True, recipe.proxies))
    for row in rows
    for dtype in (row["dtype"] if isinstance(row["dtype"], list) else [row["dtype"]])
    for gpus in expand_gpus(row["gpus"])
]


def overrides(**fields):
    return tuple(Setting(field=k, value=v, source="--set") for k, v in fields.items())


def request(size="8b", dtype="fp8", gpus=8, gpu="h100", **more):
    return RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu, **more)


@pytest.mark.parametrize(("recipe", "row", "dtype", "gpus", "proxy"), ROWS)
def test_every_recipe_row_resolves_to_its_own_values(recipe, row, dtype, gpus, proxy):
    picks = overrides(**{k: row[k] for k in ("mode", "use_case", "seqlen") if k in row})
    if recipe.kind == "outofcore" and not proxy:  # fixed values shorten the search for a plan
        picks += overrides(gbs=1, seqs_per_round=1, chunk_tokens=min(row["seqlen"], 32768))
    proxy_kind = "small" if proxy else None
    for gpu in selector_values(row, "gpu"):
        row_request = RunRequest(size=row["size"], dtype=dtype, gpus=gpus, gpu=gpu, proxy=proxy_kind, settings=picks)
        config = resolve(recipe, row_request)
        assert config.recipe_row == row
        assert config.machine.gpu == (gpu or "cpu")
    assert config.machine.gpus == gpus == config.parallel.world_size
    assert bool(config.proxy) == proxy
    assert config.precision.dtype == dtype
    for cell in ("tp", "pp", "cp", "vp", "ep", "etp", "fsdp"):
        if cell in row:
            assert getattr(config.parallel, cell) == row[cell]
    if "dp" in row:
        assert config.parallel.dp == per_gpus(row["dp"], gpus, "dp")
    if "ga" in row:
        assert config.workload.ga == row["ga"]
    if "layers" in row:
        assert config.model.layers == row["layers"]


def test_overrides_record_the_replaced_values():
    config = resolve(ALL["pretrain_llama3.1"], request(settings=overrides(mbs="2", tp="2")))
    assert (config.parallel.tp, config.parallel.dp, config.workload.ga) == (2, 4, 16)
    assert [(o.field, o.replaced, o.value) for o in config.overrides] == [("mbs", 1, 2), ("tp", 1, 2)]


def test_scale_above_the_range_continues_weak_scaling():
    config = resolve(ALL["pretrain_llama3.1"], request(gpus=256))
    assert config.workload.gbs == 256 * 16
    assert "weak scaling" in config.overrides[0].source


def test_short_run_measures_its_second_half():
    config = resolve(ALL["pretrain_llama3.1"], request(settings=overrides(steps="10")))
    assert config.workload.window == (6, 10)


def test_changed_model_is_a_proxy_without_reference():
    config = resolve(ALL["pretrain_nemotronh"], request("56b", "fp8", 256))
    assert config.reference is not None
    assert config.reference.step_time_s == 15.892
    altered = resolve(ALL["pretrain_llama3.1"], request(settings=overrides(**{"model.layers": "2"})))
    assert (altered.model.layers, altered.proxy, altered.reference) == (2, "model.layers=2", None)


def test_changed_setting_drops_the_reference_but_more_steps_keep_it():
    grok = ALL["pretrain_grok1"]
    assert resolve(grok, request("314b", "bf16", 256, "gb200", settings=overrides(mbs="2"))).reference is None
    assert resolve(grok, request("314b", "bf16", 256, "gb200", settings=overrides(steps="60"))).reference is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "9b"}, "unknown size 8b 70b"),
        ({"dtype": "int8"}, "unknown dtype fp8 bf16"),
        ({"gpu": "h1000"}, "unknown GPU type h100"),
        ({"gpus": 7}, "scale 7 is not listed 8, 16, 32"),
        ({"settings": overrides(tp="3")}, "tp 3 x pp 1 x cp 1 = 3 does not divide 8 GPUs tp could be 1, 2, 4, 8"),
        ({"settings": overrides(gbs="100")}, "gbs 100 is not a multiple of mbs 1 x dp 8 gbs could be 96 or 104"),
        ({"settings": overrides(paralel="3")}, "unknown field 'paralel'"),
        ({"settings": overrides(ep="2")}, "has no experts"),
        ({"settings": overrides(vp="2")}, "without pipeline parallelism"),
        ({"settings": overrides(mbs="two")}, "mbs: expected a whole number, got 'two'"),
        ({"settings": overrides(mbs="0")}, "mbs (--set): 0 is out of range at least 1"),
        ({"settings": overrides(cp="2", seqlen="8190")}, "seqlen 8190 is not a multiple of 2 x cp 2"),
        (
            {"settings": overrides(tp="8", seqlen="4100")},
            "seqlen 4100 is not a multiple of tp 8 = 8; seqlen could be 4096",
        ),
        ({"settings": overrides(pp="8", gbs="4")}, "pp 8 needs at least 8 micro-batches, a step has 4"),
        ({"settings": overrides(pp="4", vp="2", gbs="18")}, "vp 2 takes micro-batches in rounds of pp 4 has 9"),
        ({"gpus": 16, "settings": overrides(tp="16")}, "tp 16 does not divide the 8 key and value heads 1, 2, 4, 8"),
        ({"gpus": 8, "layout": "h100"}, "--layout has no effect here add --proxy"),
        ({"gpus": 8, "layout": "h200", "proxy": "small"}, "unknown layout of pretrain_llama3.1 8b 'h200' gb200"),
        ({"settings": overrides(recompute_layers="99")}, "more than the 32 layers"),
        ({"settings": overrides(gpu_metrics="true")}, "no effect without profiling"),
        ({"settings": overrides(profile="true", nccl_trace="true")}, "exclude each other"),
        ({"settings": overrides(window="40-60")}, "ends after the last step, 50"),
        ({"settings": overrides(dp="4")}, "dp follows from the other settings"),
        ({"settings": overrides(kv_fraction="0.5")}, "unknown field"),
        ({"settings": overrides(lr="nan")}, "out of range"),
        ({"settings": overrides(**{"model.layerz": "2"})}, "did you mean layers"),
        ({"settings": overrides(masters="bf16")}, "unknown field 'masters' (did you mean master_weights?)"),
        ({"settings": overrides(fast_sums="true")}, "(did you mean fp8_fast_accum?)"),
        ({"settings": overrides(keep_inputs="true")}, "(did you mean save_norm_outputs?)"),
        ({"settings": overrides(**{"model.attention_cap": "30"})}, "(did you mean attn_logit_softcap?)"),
    ],
)
def test_invalid_request_gives_a_one_line_error(changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(ALL["pretrain_llama3.1"], request(**changes))
    text = str(caught.value)
    assert "\n" not in text
    for part in message.split("  "):
        assert all(word in text for word in part.split()), text


def test_layout_must_divide_experts_and_not_split_mamba_sequences():
    for workload, size, changes, message in (
        ("pretrain_grok1", "314b", {"ep": "16"}, "ep 16 does not divide 8 experts"),
        ("pretrain_grok1", "314b", {"model.experts": None}, "has no experts"),
        ("pretrain_llama3.1", "8b", {"ep": "3"}, "ep 3 and etp 1 have no effect: .* has no experts"),
        ("pretrain_nemotronh", "56b", {"cp": "2"}, "cp 2: a Mamba layer cannot split its sequence"),
        ("pretrain_nemotronh", "56b", {"tp": "16"}, "tp 16 does not divide the 8 key and value heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(ALL[workload], request(size, "fp8", 512, settings=overrides(**changes)))


@pytest.mark.parametrize(
    ("workload", "split", "change", "message"),
    [
        ("pretrain_grok1", {"etp": 4}, {"experts": {"ffn": 1026}}, "etp 4 does not divide the 1026 channels"),
        ("pretrain_grok1", {"tp": 4}, {"vocab": 1026}, "tp 4 does not divide the 1026 entries of the vocabulary"),
        ("pretrain_nemotronh", {"tp": 4}, {"mamba": {"groups": 6}}, "tp 4 does not divide the 6 Mamba groups"),
        ("pretrain_nemotronh", {"tp": 4}, {"ffn": 1026}, "channels of the MLP of Nemotron-H-56B; tp could be 1, 2$"),
        ("pretrain_llama3.1", {"tp": 3}, {}, "tp 3 does not divide the 128 heads of .*; tp could be 1, 2, 4, 8$"),
        ("pretrain_deepseek-v3", {"tp": 4}, {"experts": {"ffn": 1026}}, "the 1026 channels of the shared experts"),
        ("pretrain_grok1", {"pp": 16, "vp": 8}, {}, "pp 16 x vp 8 needs more layers than the 64"),
    ],
)  # fmt: skip
def test_layout_must_divide_the_model(workload, split, change, message):
    recipe = ALL[workload]
    with pytest.raises(ConfigError, match=message):
        check_model(Parallel(**split), recipe.model(recipe.default_size, change))


def test_proxy_takes_the_layout_of_its_gpu():
    llama = ALL["pretrain_llama3.1"]
    on_h100 = resolve(llama, request("405b", "fp8", 16, "h100", proxy="small"))
    assert (on_h100.machine.gpu, on_h100.parallel.pp) == ("h100", 2)
    on_h200 = resolve(llama, request("405b", "fp8", 16, "h200", proxy="small"))  # not in the table: the recipe's choice
    assert (on_h200.machine.gpu, on_h200.parallel.pp, on_h200.parallel.fsdp) == ("h200", 1, True)


def test_environment_variable_without_effect_is_rejected():
    variables = tuple(from_environment({"MODE": "max_throughput"}))
    with pytest.raises(ConfigError, match="MODE is set but has no effect on pretrain_llama"):
        resolve(ALL["pretrain_llama3.1"], request(settings=variables))


def test_use_case_sets_lengths_and_time_limits_accept_slurm_format():
    variables = tuple(from_environment({"USE_CASE": "chat:64/32", "SBATCH_TIMELIMIT": "1:40:00", "STREAMING": "off"}))
    config = resolve(ALL["inference_deepseek-r1"], request("671b", "nvfp4", 4, "gb200", settings=variables))
    assert (config.workload.isl, config.workload.osl, config.workload.streaming) == (64, 32, False)
    assert config.limits.time_limit_s == 6000
    for bad in ("chat:64", "chat:a/b", "nap", "nap:0/2", "../nap:1/2"):
        with pytest.raises(ConfigError):
            resolve(
                ALL["inference_deepseek-r1"],
                request("671b", "nvfp4", 4, "gb200", settings=tuple(from_environment({"USE_CASE": bad}))),
            )


def serve(workload="inference_llama3.1", size="8b", dtype="fp8", gpus=1, gpu="h200", environ=None, **more):
    fields = tuple(from_environment(environ or {})) + overrides(**more.pop("settings", {}))
    return resolve(ALL[workload], RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu, settings=fields, **more))


def r1(environ=None, gpus=4, dtype="nvfp4", gpu="gb200", **more):
    return serve("inference_deepseek-r1", "671b", dtype, gpus, gpu, environ, **more)


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("MODE", "min_latency", "mode", "min_latency"),
        ("USE_CASE", "chat", "use_case", "chat"),
        ("MAX_BATCH_SIZE", "64", "max_batch_size", 64),
        ("MAX_NUM_TOKENS", "4096", "max_num_tokens", 4096),
        ("CONCURRENCY", "12", "concurrency", 12),
        ("NUM_REQUESTS", "40", "num_requests", 40),
        ("KV_CACHE_FRACTION", "0.5", "kv_fraction", 0.5),
        ("STREAMING", "false", "streaming", False),
        ("ENABLE_CHUNKED_PREFILL", "false", "chunked_prefill", False),
    ],
)
def test_every_documented_variable_has_its_effect(variable, value, field, expected):
    assert getattr(serve(environ={variable: value}).workload, field) == expected


def test_documented_layout_variables():
    config = r1({"TP": "2", "EP": "2", "PP": "2"})
    assert (config.parallel.tp, config.parallel.ep, config.parallel.pp) == (2, 2, 2)
    assert config.name.startswith("DeepSeek-R1_max_throughput_TP2_EP2_PP2_CON")


def test_paths_of_dataset_and_weights_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = serve(environ={"DATASET": "requests.jsonl", "WEIGHTS": "~/r1"}).workload
    assert work.dataset == str(tmp_path / "requests.jsonl")
    assert work.weights.startswith("/")
    assert work.weights.endswith("/r1")


def test_fields_without_a_variable_are_set_with_set():
    config = serve(
        settings={"lengths": "uniform", "isl_spread": "100", "osl_spread": "0", "fp8_scaling": "tensor",
                  "temperature": "0", "top_p": "0.9", "warmup_requests": "0", "block_tokens": "32"}
    )  # fmt: skip
    work = config.workload
    assert (work.lengths, work.isl_spread, work.osl_spread, work.block_tokens) == ("uniform", 100.0, 0.0, 32)
    assert (config.precision.fp8_scaling, work.temperature, work.warmup_requests) == ("tensor", 0.0, 0)


def test_user_defined_use_case_takes_the_row_with_the_nearest_lengths():
    for text, like in (
        ("long:20000/2000", "summarization"),
        ("write:128/2048", "generation"),
        ("x:900/1200", "reasoning"),
    ):
        config = serve(environ={"USE_CASE": text})
        name, _, lengths = text.partition(":")
        assert f"{config.workload.isl}/{config.workload.osl}" == lengths
        assert config.name.endswith(f"_{name}")
        assert config.recipe_row["use_case"] == like
        change = next(o for o in config.overrides if o.field == "use_case")
        assert (change.value, change.replaced) == (name, like)
        assert "nearest" in change.source
        assert config.reference is None


def test_smaller_batch_scales_concurrency_and_requests_as_the_row_does():
    config = r1({"MAX_BATCH_SIZE": "64"})
    assert (config.workload.concurrency, config.workload.num_requests) == (64 * 4, 64 * 4 * 10)
    assert {o.field for o in config.overrides} == {"max_batch_size", "concurrency", "num_requests"}
    fixed = r1({"MAX_BATCH_SIZE": "64", "CONCURRENCY": "100", "NUM_REQUESTS": "7"}).workload
    assert (fixed.concurrency, fixed.num_requests) == (100, 7)
    assert serve(environ={"MAX_BATCH_SIZE": "64"}).workload.concurrency == 3000  # all at once, whatever the batch


def test_proxy_has_reduced_lengths_unless_the_user_sets_them():
    printed = r1({"USE_CASE": "chat:128/128"}, gpus=1, gpu=None, dtype="fp8", proxy="small")
    assert (printed.workload.isl, printed.workload.osl) == (32, 32)
    assert "lengths 32/32 instead of 128/128" in printed.proxy
    user_defined = r1({"USE_CASE": "chat:48/16"}, gpus=1, gpu=None, dtype="fp8", proxy="small")
    assert (user_defined.workload.isl, user_defined.workload.osl) == (48, 16)


def test_true_width_proxy_has_real_lengths_and_as_many_layers_as_fit():
    config = r1({"USE_CASE": "summarization"}, gpus=1, gpu="h200", dtype="fp8", proxy="true-width")
    assert (config.workload.isl, config.workload.max_num_tokens) == (8000, 8192)
    assert 8 <= config.model.layers <= 14
    assert config.model.experts.count == 256
    assert (config.precision.dtype, config.precision.fp8_scaling) == ("fp8", None)


@pytest.mark.parametrize(
    ("environ", "changes", "message"),
    [
        ({"MODE": "fast"}, {}, "unknown mode (environment MODE) 'fast'"),
        ({"USE_CASE": "long"}, {}, "unknown use_case 'long' NAME:INPUT/OUTPUT"),
        ({"MAX_BATCH_SIZE": "0"}, {}, "0 is out of range; it must be at least 1"),
        ({"KV_CACHE_FRACTION": "1.5"}, {}, "1.5 is out of range more than 0 and at most 1"),
        ({"STREAMING": "maybe"}, {}, "unknown value for streaming: 'maybe' true, false"),
        ({"CP": "2"}, {}, "CP is set but has no effect on inference_llama3.1"),
        ({"USE_CASE": "summarization", "ENABLE_CHUNKED_PREFILL": "false", "MAX_NUM_TOKENS": "4000"}, {},
         "prompts of 8000 tokens exceed MAX_NUM_TOKENS=4000 set MAX_NUM_TOKENS=8000 or ENABLE_CHUNKED_PREFILL=true"),
        ({"MAX_NUM_TOKENS": "512"}, {}, "MAX_BATCH_SIZE=896 requests need a token each"),
        ({"MODE": "min_latency", "CONCURRENCY": "2"}, {}, "CONCURRENCY=2: MODE=min_latency has one request at a time"),
        ({"MODE": "min_latency", "MAX_BATCH_SIZE": "2"}, {}, "MAX_BATCH_SIZE=2: MODE=min_latency"),
        ({"MODE": "min_latency", "STREAMING": "false"}, {}, "STREAMING=false: MODE=min_latency measures each token"),
        ({"TP": "2"}, {}, "tp 2 x pp 1 x cp 1 = 2 does not divide 1 GPUs"),
        ({"EP": "2"}, {}, "has no experts"),
        ({}, {"settings": {"isl_spread": "5"}}, "isl_spread has no effect with lengths=fixed"),
        ({}, {"settings": {"lengths": "normal", "osl_spread": "1000"}}, "osl_spread 1000 must be less than osl 1000"),
        ({}, {"settings": {"lengths": "even"}}, "lengths 'even' fixed"),
        ({}, {"settings": {"attention_dp": "true"}}, "attention_dp has no effect on one rank"),
        ({}, {"settings": {"engine": "vllm"}}, "unknown engine 'vllm' native, trtllm"),
        ({}, {"settings": {"engine": "trtllm"}, "proxy": "small"}, "runs published models, not proxies"),
        ({}, {"dtype": "bf16", "settings": {"fp8_scaling": "block"}}, "fp8_scaling has no effect with dtype bf16"),
        ({}, {"gpu": "a100", "proxy": "small"}, "dtype fp8: NVIDIA A100 SXM 80 GB has no fp8 GEMMs"),
    ],
)  # fmt: skip
def test_invalid_serving_request_gives_a_one_line_error(environ, changes, message):
    with pytest.raises(ConfigError) as caught:
        serve(environ=environ, **changes)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in message.split()), text


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TP": "3", "EP": "1"}, "tp 3 x pp 1 x cp 1 = 3 does not divide 4 GPUs"),
        ({"TP": "2", "PP": "2"}, "ep 4 x etp 1 does not divide the 2 ranks of a pipeline stage; ep could be 1, 2"),
        ({"EP": "3"}, "ep 3 x etp 1 does not divide the 4 ranks"),
        ({"TP": "2", "EP": "1"}, "tp 2 x pp 1 = 2 ranks serve, 4 GPUs are requested"),
    ],
)
def test_layout_that_cannot_serve_is_rejected(environ, message):
    with pytest.raises(ConfigError) as caught:
        r1(environ)
    assert all(word in str(caught.value) for word in message.split()), str(caught.value)


def test_block_scaling_needs_widths_that_are_multiples_of_128():
    assert r1(gpus=16, gpu="h100", dtype="fp8", settings={"fp8_scaling": "block"}).precision.fp8_scaling == "block"
    with pytest.raises(ConfigError, match=r"multiples of 32; choose fp8_scaling=channel or tensor"):
        r1(gpus=1, gpu=None, dtype="fp8", proxy="small", settings={"fp8_scaling": "block"})
    narrow = r1(gpus=1, gpu=None, dtype="fp8", proxy="small")
    assert narrow.precision.fp8_scaling == "channel"  # its model is published in blocks
    assert narrow.proxy.endswith("per-channel scales, not per-block")
    assert serve(gpu=None, proxy="small").precision.fp8_scaling is None


def test_kv_heads_are_replicated_on_more_ranks_than_heads():
    llama = ALL["inference_llama3.1"].model("70b")
    check_serving(Parallel(tp=16), llama, attention_dp=False)  # 8 heads of keys and values on 16 ranks
    with pytest.raises(ConfigError, match="tp 12 does not divide"):
        check_serving(Parallel(tp=12), llama, attention_dp=False)
    check_serving(Parallel(tp=12), llama, attention_dp=True)  # nothing is split
    deepseek = ALL["inference_deepseek-r1"].model("671b", {"experts": {"ffn": 2050}})
    with pytest.raises(ConfigError, match="4 ranks share each expert"):
        check_serving(Parallel(tp=4, ep=1), deepseek, attention_dp=True)


def test_reference_throughput_is_that_of_the_newer_engine():
    reference = serve(environ={"USE_CASE": "chat:128/128"}).reference
    assert (reference.output_tokens_per_s, reference.source) == (27911, "TensorRT-LLM 1.0 perf-overview")
    assert serve(environ={"STREAMING": "false"}).reference is None
    assert serve(environ={"WEIGHTS": "/w"}).reference is not None
    assert serve(dtype="bf16").reference is None


def test_set_accepts_section_prefixes_and_rejects_invalid_arguments():
    assert from_arguments(["parallel.tp=2"])[0].field == "tp"
    assert from_arguments(["model.layers=2"])[0].field == "model.layers"
    with pytest.raises(ConfigError, match="expected field=value"):
        from_arguments(["tp"])


field_names = st.sampled_from(
    ["tp", "pp", "cp", "ep", "etp", "vp", "mbs", "gbs", "seqlen", "steps", "window", "profile", "recompute_layers", "x"]
)
values = st.one_of(
    st.integers(-2, 4096).map(str), st.text(max_size=8), st.sampled_from(["none", "true", "1e9", "nan", "8-2"])
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    workload=st.sampled_from(sorted(ALL)),
    gpus=st.integers(-1, 3000),
    dtype=st.sampled_from(["fp8", "bf16", "fp32", "nvfp4", "?"]),
    gpu=st.sampled_from([None, "h100", "gb200", "h200", "cpu", "b200", "tpu"]),
    proxy=st.sampled_from([None, None, "small", "true-width"]),
    force=st.booleans(),
    pairs=st.lists(st.tuples(field_names, values), max_size=4),
)
def test_any_request_gives_a_consistent_config_or_a_one_line_error(workload, gpus, dtype, gpu, proxy, force, pairs):
    recipe = ALL[workload]
    set_fields = tuple(Setting(field=f, value=v, source="--set") for f, v in pairs)
    try:
        config = resolve(
            recipe,
            RunRequest(
                size=recipe.sizes[0], dtype=dtype, gpus=gpus, gpu=gpu, proxy=proxy, force=force, settings=set_fields
            ),
        )
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert config.parallel.world_size == config.machine.gpus == gpus
    if recipe.kind == "training":
        work = config.workload
        assert work.gbs == work.mbs * work.ga * config.parallel.dp
        assert 1 <= work.window[0] <= work.window[1] <= work.steps
    assert (config.proxy is None) == (not (proxy or gpu == "cpu"))


@given(st.integers(1, 4096), st.integers(0, 12))
def test_gpu_ranges_expand_by_doubling(first, doublings):
    counts = expand_gpus(f"{first}-{first * 2**doublings}")
    assert counts == [first * 2**i for i in range(doublings + 1)]


@pytest.mark.parametrize("cell", ["8-", "-8", "16-8", "a-b", None, True, 1.5, ["8"]])
def test_invalid_gpu_range_is_rejected(cell):
    with pytest.raises(ConfigError):
        expand_gpus(cell)
