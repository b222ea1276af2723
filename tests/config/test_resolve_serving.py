"""Resolving a recipe row of serving: documented variables, use cases, layouts that cannot serve."""

import json
import re
from dataclasses import replace

import pytest
from recipe_requests import ALL, overrides

from llmb.config.native.departures import departures, is_departure
from llmb.config.overrides import from_environment
from llmb.config.parallel_layout import check_serving
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import build, to_plain
from llmb.config.spec import Parallel, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.serving_capacity import token_bytes, weight_bytes
from llmb.perfmodel.serving_time.serving_fields import serving_setup_of
from llmb.perfmodel.serving_time.serving_predictor import predict_serving, running_requests


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
        settings={"lengths": "uniform", "isl_spread": "100", "osl_spread": "0", "fp8_recipe": "tensorwise",
                  "temperature": "0", "top_p": "0.9", "warmup_requests": "0", "block_tokens": "32"}
    )  # fmt: skip
    work = config.workload
    assert (work.lengths, work.isl_spread, work.osl_spread, work.block_tokens) == ("uniform", 100.0, 0.0, 32)
    assert (config.precision.fp8_recipe, work.temperature, work.warmup_requests) == ("tensorwise", 0.0, 0)


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
    changes = {o.field for o in config.overrides if not is_departure(o)}
    assert changes == {"max_batch_size", "concurrency", "num_requests"}
    fixed = r1({"MAX_BATCH_SIZE": "64", "CONCURRENCY": "100", "NUM_REQUESTS": "7"}).workload
    assert (fixed.concurrency, fixed.num_requests) == (100, 7)
    assert serve(environ={"MAX_BATCH_SIZE": "64"}).workload.concurrency == 3000  # all at once, whatever the batch


@pytest.mark.parametrize(
    ("use_case", "lengths", "description"),
    [
        ("chat", (32, 32), "lengths 32/32 instead of 128/128"),
        ("chat:128/128", (128, 128), "lengths 128/128"),
        ("chat:77/99", (77, 99), "lengths 77/99 instead of 128/128"),
        ("mine:48/16", (48, 16), "lengths 48/16"),
    ],
)
def test_proxy_has_reduced_lengths_unless_the_user_names_them(use_case, lengths, description):
    config = r1({"USE_CASE": use_case}, gpus=1, gpu=None, dtype="fp8", proxy="small")
    assert (config.workload.isl, config.workload.osl) == lengths
    assert description in re.split(", |; ", config.proxy)


def test_true_width_proxy_has_real_lengths_and_as_many_layers_as_fit():
    config = r1({"USE_CASE": "summarization"}, gpus=1, gpu="h200", dtype="fp8", proxy="true-width")
    assert (config.workload.isl, config.workload.max_num_tokens) == (8000, 8192)
    assert 8 <= config.model.layers <= 14
    assert config.model.experts.count == 256
    assert (config.precision.dtype, config.precision.fp8_recipe) == ("fp8", "blockwise")


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
        ({}, {"dtype": "bf16", "settings": {"fp8_recipe": "blockwise"}}, "fp8_recipe has no effect with dtype bf16"),
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
    assert (
        r1(gpus=16, gpu="h100", dtype="fp8", settings={"fp8_recipe": "blockwise"}).precision.fp8_recipe == "blockwise"
    )
    with pytest.raises(ConfigError, match=r"multiples of 32; choose fp8_recipe=channelwise or tensorwise"):
        r1(gpus=1, gpu=None, dtype="fp8", proxy="small", settings={"fp8_recipe": "blockwise"})
    narrow = r1(gpus=1, gpu=None, dtype="fp8", proxy="small")
    assert narrow.precision.fp8_recipe == "channelwise"  # its model is published in blocks
    assert narrow.proxy.endswith("per-channel scales, not per-block")
    assert serve(gpu=None, proxy="small").proxy.count("scales") == 0


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


def test_few_requests_beyond_the_batch_join_it_on_record():
    config = serve(settings={"num_requests": "900"})
    assert config.workload.max_batch_size == 900
    (line,) = departures(config)
    change = "max_batch_size=900 instead of the recipe's 896"
    assert line == f"{change} (native engine: a last wave of 4 of 900 requests would run alone)"
    assert running_requests(serving_setup_of(config)) == 900
    assert serve(settings={"num_requests": "1800"}).workload.max_batch_size == 900  # two waves
    proxy = serve(gpu=None, dtype="bf16", proxy="small", settings={"num_requests": "17", "concurrency": "17"})
    assert (proxy.workload.max_batch_size, proxy.recipe_row["max_batch_size"]) == (17, 16)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_requests": "896"},
        {"num_requests": "1200"},  # not few
        {"num_requests": "940"},  # the cache holds 930
        {"num_requests": "900", "concurrency": "898"},  # a limit of the load stays one
        {"num_requests": "900", "max_batch_size": "896"},  # and one of the user
        {"num_requests": "900", "max_num_tokens": "898"},
    ],
)
def test_batch_stays_that_of_the_row(settings):
    config = serve(settings=settings)
    assert config.workload.max_batch_size == 896
    assert not [override for override in config.overrides if override.source.startswith("native")]


def test_predicted_run_of_few_requests_beyond_the_batch_is_within_5_percent_of_its_steady_speed():
    loads = {"num_requests": "8960"}, {"num_requests": "900", "max_batch_size": "896"}, {"num_requests": "900"}
    setups = [serving_setup_of(serve(settings=settings)) for settings in loads]
    steady, with_last_wave, balanced = (predict_serving(setup).output_tokens_per_s for setup in setups)
    assert with_last_wave < 0.93 * steady
    assert balanced > 0.96 * steady


DRAFTS = {"speculative_tokens": "3", "draft": "llama3.2-1b", "max_batch_size": "64", "concurrency": "64"}


def test_draft_model_and_stated_acceptance_are_part_of_the_run(tmp_path):
    file = tmp_path / "acceptance.yaml"
    file.write_text("[0.9, 0.8, 0]")
    config = serve(settings={**DRAFTS, "draft_acceptance": str(file)})
    work = config.workload
    assert work.draft_acceptance == (0.9, 0.8, 0.0)
    assert (work.draft_model.layers, work.draft_model.vocab) == (16, config.model.vocab)
    assert build(RunConfig, json.loads(json.dumps(to_plain(config)))) == config
    plain = serve(settings={name: DRAFTS[name] for name in ("max_batch_size", "concurrency")})
    assert weight_bytes(config) - weight_bytes(plain) > 1e9  # in fp8, embedding and head in bf16
    assert token_bytes(config) == token_bytes(plain) * (32 * 8 * 128 + 16 * 8 * 64) / (32 * 8 * 128)
    first = serve(gpu=None, dtype="bf16", proxy="small", settings={"speculative_tokens": "2", "draft": "layers:1"})
    assert first.workload.draft_model == replace(first.model, layers=1, name=first.workload.draft_model.name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": "none"}, "speculative_tokens=3 needs a draft model; set draft: layers:N for its first N layers"),
        ({"speculative_tokens": "0"}, "draft has no effect without drafts; set speculative_tokens=N"),
        ({"speculative_tokens": "17"}, "speculative_tokens=17: at most 16"),
        ({"draft": "layers:32"}, "draft=layers:32: Llama-3.1-8B has 32 layers; choose layers:N with N below that"),
        ({"draft": "layers:x"}, "draft=layers:x: Llama-3.1-8B has 32 layers"),
        ({"draft": "no/folder"}, "draft=no/folder is no weights folder: it holds no config.json"),
        ({"draft": "llama"}, "unknown draft 'llama' (did you mean llama2-7b?); choices are: layers:N, "),
        ({"draft": "qwen3-8b"}, "draft=qwen3-8b: its vocabulary has 151936 tokens and that of Llama-3.1-8B 128256"),
        ({"draft": "deepseek-r1"}, "draft=deepseek-r1: a published draft is a dense model"),
        (
            {"draft": "nemotron-h-8b"},
            "speculative_tokens: Nemotron-H-8B has Mamba layers, whose state is not rolled back",
        ),
        ({"draft": "gpt-oss-20b"}, "draft=gpt-oss-20b: a published draft is a dense model without sliding windows"),
        ({"temperature": "0.5"}, "temperature=0.5: drafts are verified by greedy equality, not by rejection sampling"),
        ({"max_num_tokens": "255"}, "set MAX_NUM_TOKENS=256 or MAX_BATCH_SIZE=63"),
        ({"engine": "trtllm"}, "speculative_tokens has no effect with the engine trtllm"),
        ({"draft_acceptance": "[0.5, 0.5]"}, "draft_acceptance has 2 positions and speculative_tokens is 3"),
        ({"draft_acceptance": "[0.5, 1.5, 0.5]"}, "position 2 has 1.5; it must be 0 to 1"),
        ({"draft_acceptance": "a: 1"}, "must hold one probability for each draft position, such as [0.8, 0.7, 0.6]"),
        ({"draft_acceptance": "[0.5, true, 0.5]"}, "must hold one probability for each draft position"),
    ],
)
def test_speculation_that_cannot_be_had_is_refused(tmp_path, changes, message):
    if "draft_acceptance" in changes:
        (tmp_path / "file.json").write_text(changes["draft_acceptance"])
        changes = {"draft_acceptance": str(tmp_path / "file.json")}
    with pytest.raises(ConfigError) as refusal:
        serve(settings={**DRAFTS, **changes})
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_speculation_on_several_gpus_is_refused():
    with pytest.raises(ConfigError, match="speculative_tokens on 2 GPUs: it runs on one"):
        serve(size="70b", dtype="bf16", gpus=2, settings=DRAFTS)
