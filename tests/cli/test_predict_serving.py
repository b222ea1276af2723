"""`llmb-run predict --task serve`: any model, recipe rows, curves, files of rows, what-if, refusals in one line."""

import json

import pytest

SERVE = ["predict", "--model", "llama3.1-70b", "--task", "serve", "--engine", "vllm", "--gpu-type", "h200", "--dtype",
         "fp8", "--isl", "1024", "--osl", "1024", "--concurrency", "64", "--set", "tp=2"]  # fmt: skip
METRICS = {"ttft_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s"}


def test_json_carries_every_metric_with_its_interval(llmb_run):
    code, out, err = llmb_run(*SERVE, "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data.keys() >= METRICS | {"output_tokens_per_s_per_gpu", "interval_80", "terms", "memory_gib", "batch"}
    for name in METRICS:
        low, high = data["interval_80"][name]
        assert low < data[name] < high
    assert data["gpus"] == 2


def test_the_text_shows_metrics_terms_and_batch(llmb_run):
    code, out, err = llmb_run(*SERVE)
    assert (code, err) == (0, "")
    for text in ("TTFT", "TPOT", "80 % from", "attention, KV cache", "prefills of other requests", "batch 64 of 64"):
        assert text in out


def test_one_output_token_has_no_tpot(llmb_run, tmp_path):
    serve = [*SERVE, "--osl", "1"]
    data = json.loads(llmb_run(*serve, "--json")[1])
    assert (data["tpot_ms"], data["interval_80"]["tpot_ms"]) == (None, None)
    assert data["e2e_ms"] == data["ttft_ms"]
    assert "TPOT: none of one output token" in llmb_run(*serve)[1]
    assert llmb_run(*serve, "--concurrency", "1..8")[0] == 0
    path = tmp_path / "loads.csv"
    path.write_text("model,backend,system,precision,isl,osl,concurrency\nllama3.1-8b,vllm,h200,fp8,512,1,4\n")
    assert llmb_run("predict", "--rows", path, "--task", "serve")[0] == 0


def test_a_range_of_concurrencies_is_a_curve(llmb_run):
    serve = [*SERVE[: SERVE.index("64")], "1..256", "--set", "tp=2"]
    points = json.loads(llmb_run(*serve, "--json")[1])
    assert [point["concurrency"] for point in points] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    rates = [point["output_tokens_per_s"] for point in points]
    assert rates == sorted(rates)
    table = llmb_run(*serve)[1]
    assert "tokens/s/user" in table
    assert len(table.splitlines()) == 15
    assert table.splitlines()[-1].startswith("ceilings: ")


def test_a_config_json_is_the_model_it_describes(llmb_run, tmp_path):
    config = {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600, "num_attention_heads": 64,
              "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    described, named = (
        json.loads(llmb_run("predict", "--model", model, *SERVE[3:], "--json")[1])
        for model in (tmp_path / "config.json", "Qwen/Qwen3-32B")
    )
    assert described["tpot_ms"] == pytest.approx(named["tpot_ms"])


def test_weights_default_to_the_published_checkpoint(llmb_run):
    args = ["--task", "serve", "--gpu-type", "h100", "--isl", "8", "--osl", "8", "--concurrency", "1", "--json"]
    assert json.loads(llmb_run("predict", "--model", "gpt-oss-20b", *args)[1])["dtype"] == "nvfp4"
    assert json.loads(llmb_run("predict", "--model", "llama3.1-8b", *args)[1])["dtype"] == "bf16"


@pytest.mark.parametrize("workload", ["inference_llama3.1", "inference_deepseek-r1"])
def test_a_recipe_row_of_inference(llmb_run, workload):
    code, out, err = llmb_run("predict", "-w", workload, "--task", "serve", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["engine"] == "native"
    assert data["output_tokens_per_s"] > 0
    curve = json.loads(llmb_run("predict", "-w", workload, "--task", "serve", "--concurrency", "1,8", "--json")[1])
    assert curve[0]["tpot_ms"] < curve[1]["tpot_ms"]


def test_mode_and_use_case_are_those_of_the_environment_as_for_submit(llmb_run, monkeypatch):
    monkeypatch.setenv("MODE", "min_latency")
    monkeypatch.setenv("USE_CASE", "chat:128/128")
    row = ["-w", "inference_llama3.1", "-s", "8b", "--dtype", "fp8", "--scale", "1", "--gpu-type", "h200"]
    data = json.loads(llmb_run("predict", "--task", "serve", *row, "--json")[1])
    tuned = json.loads(llmb_run("tune", "--task", "serve", *row, "--json")[1])["recipe"]
    assert (data["isl"], data["osl"], data["concurrency"]) == (128, 128, 1)
    assert tuned["output_tokens_per_s"] == pytest.approx(data["output_tokens_per_s"])
    assert f"predicted output: {data['output_tokens_per_s']:.4g} tokens/s" in llmb_run("show", *row)[1]


def test_what_if_changes_the_hardware(llmb_run):
    base = json.loads(llmb_run(*SERVE, "--json")[1])
    faster = json.loads(llmb_run(*SERVE, "--what-if", "gpu.hbm_bw=2x", "--json")[1])
    assert faster["tpot_ms"] < base["tpot_ms"]
    assert "without the what-if changes" in llmb_run(*SERVE, "--what-if", "gpu.hbm_bw=2x")[1]


def test_rows_are_predicted_or_say_why_not(llmb_run, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        "model,backend,backend_version,system,precision,isl,osl,concurrency,tp\n"
        "Qwen3-32B,vllm,0.15.1,b200_sxm,fp8,1024,1024,16,2\n"
        "Qwen3-32B,vllm,0.15.1,b200_sxm,fp8,1024,1024,,2\n"
        "Llama-3.1-405B,trtllm,1.2,h100_sxm,bf16,1024,1024,16,1\n"
    )
    code, out, _ = llmb_run("predict", "--rows", path, "--task", "serve", "--json")
    first, second, third = json.loads(out)
    assert code == 0
    assert first["row"] == 2
    assert first.keys() >= METRICS
    assert second == {"row": 3, "error": "no concurrency"}
    assert "use more GPUs" in third["error"]
    code, out, err = llmb_run("predict", "--rows", path, "--task", "serve")
    assert code == 0
    assert "qwen3-32b" in out
    assert err.startswith("row 3: no concurrency\nrow 4: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "llama3.1-8b"], "needs --gpu-type, --isl, --osl, --concurrency; GPU types are: a100, a100-40gb"),
        ([*SERVE[1:], "--scale", "8"], "--scale is for training; the layout gives the GPUs of an engine: --set tp=2"),
        ([*SERVE[1:], "--set", "tp=3"], "tp 3 does not divide 64 attention heads; possible: [1, 2, 4, 8, 16, 32, 64]"),
        ([*SERVE[1:], "--engine", "tgi"], "unknown engine 'tgi'; choices are: vllm, sglang, trtllm, native"),
        ([*SERVE[1:], "--dtype", "int8"], "unknown dtype 'int8'"),
        ([*SERVE[1:], "--concurrency", "no"], "--concurrency: expected clients such as 64"),
        (["-w", "pretrain_grok1", "--task", "serve"], "is not an inference run; leave out --task serve"),
        (
            ["-w", "inference_llama3.1", "--task", "train"],
            "is not predicted as a training step; add --task serve",
        ),
        (["-w", "pretrain_grok1", "--isl", "8", "--task", "train"], "--isl is for serving; add --task serve"),
    ],
)
def test_refusals_are_one_line(llmb_run, args, message):
    code, out, err = llmb_run("predict", *args, *([] if "--task" in args else ["--task", "serve"]))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


NATIVE = ["predict", "--model", "llama3.1-8b", "--task", "serve", "--engine", "native", "--gpu-type", "h200", "--dtype",
          "fp8", "--isl", "128", "--osl", "512", "--concurrency", "256", "--set", "max_batch_size=256", "--set",
          "waves=3"]  # fmt: skip
SPREAD = ["--set", "lengths=uniform", "--set", "osl_spread=256"]


def test_requests_of_varied_lengths_are_followed_one_by_one(llmb_run):
    equal, varied, repeated = (
        json.loads(llmb_run(*command, "--json")[1]) for command in (NATIVE, [*NATIVE, *SPREAD], [*NATIVE, *SPREAD])
    )
    assert varied == repeated
    assert varied["output_tokens_per_s"] == pytest.approx(27_404, rel=0.05)  # bench/RESULTS.md
    assert equal["output_tokens_per_s"] > 1.1 * varied["output_tokens_per_s"]
    assert "isl 128, osl 512 (25" in llmb_run(*NATIVE, *SPREAD)[1]


def test_a_row_with_varied_lengths_is_followed_with_its_own(llmb_run):
    row = ["predict", "-w", "inference_llama3.1", "-s", "8b", "--dtype", "fp8", "--gpu-type", "h200", "--task", "serve",
           "--set", "use_case=chat:128/512", "--json"]  # fmt: skip
    equal, varied, longer = (
        json.loads(llmb_run(*row, *more)[1])["output_tokens_per_s"] for more in ([], SPREAD, [*SPREAD, "--osl", "1024"])
    )
    assert varied != equal
    assert longer != varied
    code, _, err = llmb_run(*row, *SPREAD, "--osl", "200")
    assert (code, err.count("\n")) == (1, 1)
    assert "osl_spread 256 must be less than osl 200" in err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["osl_spread=256"], "set lengths=normal or lengths=uniform"),
        (["lengths=uniform"], "set isl_spread or osl_spread"),
        (["lengths=gamma"], "fixed, normal, uniform"),
        (["lengths=normal", "osl_spread=600"], "must be less than osl 512"),
        (["lengths=normal", "osl_spread=9", "length_ratio=0.9"], "leave one of them out"),
        (["lengths=normal", "osl_spread=-9"], "whole number of tokens"),
    ],
)
def test_lengths_without_effect_are_refused(llmb_run, settings, message):
    code, out, err = llmb_run(*NATIVE, *(part for text in settings for part in ("--set", text)))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


def test_engines_that_are_predicted_by_means_say_how_to_state_them(llmb_run):
    code, _, err = llmb_run(*SERVE, *SPREAD)
    assert code == 1
    assert "length_ratio" in err
    assert "--engine native" in err


def test_a_served_model_without_an_engine_names_both(llmb_run):
    unnamed = [*SERVE[: SERVE.index("--engine")], *SERVE[SERVE.index("--engine") + 2 :]]
    native = json.loads(llmb_run(*unnamed, "--engine", "native", "--json")[1])
    last = llmb_run(*unnamed)[1].splitlines()[-1]
    assert last.startswith("engine vllm, as none is named")
    assert f"E2E {native['e2e_ms']:,.1f} ms at concurrency 64" in last
    assert "as none is named" not in llmb_run(*SERVE)[1]


def test_a_release_without_a_number_is_refused(llmb_run):
    code, out, err = llmb_run(*SERVE, "--set", "engine_version=newest")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "engine_version must be a release such as 0.13.0" in err
    assert llmb_run(*SERVE, "--set", "engine_version=v0.9.1")[0] == 0


def test_a_curve_over_concurrency_has_the_cost_where_prices_are_given(llmb_run):
    curve = [*SERVE[: SERVE.index("64")], "8,64", "--set", "tp=2", "--cost-per-kwh", "0.2"]
    costs = [point["energy"]["cost_per_million_tokens"] for point in json.loads(llmb_run(*curve, "--json")[1])]
    lines = [line.split() for line in llmb_run(*curve)[1].splitlines() if line.strip()[:1].isdigit()]
    assert [float(line[-1]) for line in lines] == pytest.approx(costs, rel=1e-3)


def test_lengths_beyond_the_context_are_named(llmb_run):
    long = [*SERVE, "--isl", "131072"]
    assert "132096 tokens are more than the 131072 of Llama-3.1-70B's context" in llmb_run(*long)[1]
    assert json.loads(llmb_run(*long, "--json")[1])["note"].startswith("132096 tokens")
    assert json.loads(llmb_run(*SERVE, "--json")[1])["note"] is None


def test_mxfp8_weights_are_of_eight_bits(llmb_run):
    serve = [word if word != "fp8" else "mxfp8" for word in SERVE]
    assert json.loads(llmb_run(*serve, "--json")[1])["dtype"] == "fp8"
