"""`llmb-run tune`: table, JSON, fixed dimensions, refusals in one line, and measurement through the path of submit."""

import json

import pytest

from llmb.report.tune.measured_table import MeasuredLayout, measured_text

RUN = ["tune", "-w", "pretrain_llama3.1", "-s", "70b", "--dtype", "fp8", "--scale", "64", "--gpu-type", "h100"]


def test_the_table_has_the_pareto_set_the_recipe_and_the_reasons(llmb_run):
    code, out, err = llmb_run(*RUN)
    assert (code, err) == (0, "note: recompute_layers=0, as its release configures it; the printed table has 5\n")
    for text in (
        "1. pareto",
        "recipe  ",
        "tp4 pp8 vp5 dp2",
        "times the best, number",
        "wins:",
        "pp 8 -> 2",
    ):
        assert text in out
    assert "s less" in out


def test_json_carries_best_pareto_recipe_and_why(llmb_run):
    code, out, _ = llmb_run(*RUN, "--json", "--top", "2")
    data = json.loads(out)
    assert code == 0
    assert data["best"] == data["fastest"][0] == data["pareto"][0]
    assert len(data["fastest"]) == 2
    assert data["recipe"]["ratio"] == pytest.approx(data["recipe"]["step_time_s"] / data["best"]["step_time_s"])
    assert data["recipe"]["rank"] > 1
    assert data["recipe"]["ratio"] < 1.08  # its release recomputes nothing, though the table prints five layers
    assert data["best"]["memory_gib"] <= data["limit_gib"]
    assert data["why"]["settings"]["pp"][0] == 8
    assert sum(data["best"]["terms"].values()) == pytest.approx(data["best"]["step_time_s"])


def test_fixed_dimensions_and_settings_of_the_run(llmb_run):
    options = ["--set", "tp=4", "--set", "recompute_layers=0", "--set", "gbs=256", "--set", "engine=megatron", "--json"]
    data = json.loads(llmb_run(*RUN, *options)[1])
    assert {row["tp"] for row in data["pareto"]} == {4}
    assert {row["recompute_layers"] for row in data["pareto"]} == {0}
    assert (data["gbs"], data["engine"]) == (256, "megatron")


FIXED = ["tp=4", "pp=4", "vp=5", "cp=1", "mbs=1", "gbs=128", "seqlen=8192", "offload_layers=0", "recompute_layers=0"]


def test_what_would_fit_keeps_fixed_recompute_and_takes_gpus_with_the_dtype(llmb_run):
    """An A100 of 40 GB would hold the layers if all were recomputed, and has no fp8 GEMMs."""
    run = ["tune", "--model", "llama3.1-70b", "--gpu-type", "h100", "--scale", "64", "--dtype", "fp8"]
    code, out, err = llmb_run(*run, *(part for text in FIXED for part in ("--set", text)))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "needs 68 GiB with 0 layers recomputed" in err
    assert "possible with --scale 128, or --gpu-type h200, or fewer fixed settings than tp=4" in err


def test_what_would_fit_has_a_network_that_is_known(llmb_run):
    _, _, err = llmb_run("tune", "--model", "llama3.1-70b", "--gpu-type", "gh200", "--scale", "1")
    assert "--scale" not in err


def test_memory_of_experts_says_how_it_differs_from_predict(llmb_run):
    run = ["--gpu-type", "b200", "--scale", "8", "--set", "gbs=512"]
    assert "experts get 1.25 times the tokens of even routing" in llmb_run("tune", "--model", "qwen3-30b-a3b", *run)[1]
    assert "even routing" not in llmb_run("tune", "--model", "qwen3-8b", *run)[1]


def test_any_model_has_no_recipe_row(llmb_run):
    code, out, _ = llmb_run("tune", "--model", "qwen3-8b", "--gpu-type", "gb200", "--scale", "8", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["recipe"] is None
    assert data["gbs"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama3.1-405b", "--gpu-type", "h100", "--scale", "8"], "possible with --scale 128"),
        (["--model", "llama3.1-8b"], "--model needs --gpu-type"),
        (["--model", "qwen3-8b", "--gpu-type", "h100", "--scale", "8", "--set", "tp=3"], "tp could be 1, 2, 4, 8"),
        (["--model", "qwen3-8b", "--gpu-type", "h100", "--scale", "8", "--set", "tq=2"], "unknown field of --set"),
        (["--model", "qwen3-8b", "--gpu-type", "h100", "--scale", "8,16"], "one number of GPUs"),
        (["--model", "qwen3-8b", "--gpu-type", "h100", "--scale", "8", "--measure", "1"], "--measure runs recipes"),
        (["--model", "qwen3-8b", "--gpu-type", "h100", "--scale", "8", "--set", "engine=x"], "value of engine"),
        (["--model", "qwen3-8b", "--gpu-type", "h100", "--scale", "8", "--top", "-1"], "--top -1"),
        (
            ["--model", "qwen3-8b", "--gpu-type", "h100", "--scale", "8", "--set", "mbs=3"],
            "no layout divides",
        ),
        (["-w", "pretrain_grok1", "--model", "qwen3-8b"], "one of -w WORKLOAD or --model"),
        (
            ["-w", "inference_llama3.1", "-s", "8b", "--gpu-type", "h200"],
            "is not a training workload; add --task serve",
        ),
        (
            ["-w", "pretrain_llama3.1", "-s", "70b", "--dtype", "bf16", "--gpu-type", "h100"],
            "dtype of pretrain_llama3.1",
        ),
        (["-w", "pretrain_llama3.1", "-s", "9b", "--gpu-type", "h100"], "size of pretrain_llama3.1"),
        (["--task", "sing"], "value of --task"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(llmb_run, options, message):
    code, out, err = llmb_run("tune", *options)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert message in err


class Launched:
    """Stands in for `submit`: records the configurations and invents a throughput for each."""

    def __init__(self, result):
        self.configs, self.result = [], result

    def run_one(self, config, environment, as_json, location):
        self.configs.append(config)
        print("a run's own output")
        return 0, False, self.result(1000.0 * len(self.configs))


@pytest.fixture
def launched(monkeypatch):
    from llmb.cli import submit
    from llmb.perfmodel.metrics import summarize
    from llmb.results.result import Result

    def result(rate):
        return Result(
            name="run", status="ok", tokens_per_s=rate, output_tokens_per_s=rate, step_time_s=summarize([1.0])
        )

    recorder = Launched(result)
    monkeypatch.setattr(submit, "run_one", recorder.run_one)
    return recorder


def test_measured_candidates_are_proxies_where_the_gpus_are_missing(llmb_run, launched):
    code, out, _ = llmb_run(*RUN, "--measure", "2", "--ranks", "4", "--set", "gbs=256")
    assert code == 0
    runs = {repr((config.parallel, config.workload)) for config in launched.configs}
    assert (
        2 <= len(runs) == len(launched.configs) <= 3
    )  # the recipe, and the best two: once if their proxies are the same
    assert all(config.machine.gpus == 4 and config.machine.gpu == "cpu" and config.proxy for config in launched.configs)
    recipe = launched.configs[-1]
    assert (recipe.parallel.tp, recipe.parallel.pp, recipe.parallel.vp) == (2, 2, 2)
    assert recipe.workload.recompute_layers == 1  # half of the layers of a rank
    assert recipe.workload.gbs != 256
    for text in (
        "the speed of this machine is not predicted",
        "pairs are measured in the predicted order",
        "fastest measured: recipe",
    ):
        assert text in out


def test_measured_json_stays_json(llmb_run, launched):
    code, out, err = llmb_run(*RUN, "--measure", "1", "--json")
    data = json.loads(out)
    assert code == 0
    assert "a run's own output" in err
    assert [run["predicted_s"] for run in data["measured"]] == [None] * len(launched.configs)
    assert data["measured"][0]["tokens_per_s"] == 1000.0
    assert len(launched.configs) <= 2


def test_candidates_run_in_full_where_the_gpus_are(llmb_run, launched, monkeypatch):
    from llmb.cli.tune import measured_layouts

    monkeypatch.setattr(measured_layouts, "gpu_here", lambda: "h200")
    monkeypatch.setattr(measured_layouts, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr("llmb.cli.local_check.check_runs_here", lambda config: None)
    monkeypatch.setattr("llmb.cli.memory_check.check_memory", lambda *args, **options: None)
    code, out, _ = llmb_run("tune", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1",
                            "--gpu-type", "h200", "--measure", "2", "--set", "steps=8")  # fmt: skip
    assert code == 0
    assert all(config.proxy is None and config.workload.steps == 8 for config in launched.configs)
    assert {config.engine for config in launched.configs} == {"native"}
    assert 2 in {config.workload.mbs for config in launched.configs}  # the recipe's own
    assert "times the recipe's own" in out
    assert "not predicted" not in out


def test_a_failed_run_has_no_rate(launched):
    from llmb.results.result import Result

    config = _small_config()
    failed = MeasuredLayout(
        names=("1. dp1",), config=config, predicted_s=None, result=Result(name="x", status="failed")
    )
    assert "no run was measured" in measured_text([failed])


def _small_config():
    from llmb.config.recipe import load_all, shipped
    from llmb.config.resolve import resolve
    from llmb.config.row_selection import RunRequest

    return resolve(
        load_all([shipped()])["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small")
    )


SERVE = ["tune", "--task", "serve"]
MODEL = [*SERVE, "--model", "llama3.1-70b", "--gpu-type", "h200", "--dtype", "fp8", "--isl", "1024", "--osl", "1024"]
INFERENCE = [*SERVE, "-w", "inference_llama3.1", "-s", "8b", "--dtype", "fp8", "--gpu-type", "h200"]


def test_serving_settings_within_an_slo(llmb_run):
    code, out, err = llmb_run(*MODEL, "--scale", "8", "--slo", "ttft=500ms,tpot=50ms")
    assert (code, err) == (0, "")
    for text in (
        "SLO of means: ttft <= 500 ms, tpot <= 50 ms",
        "1. pareto",
        "tokens/s/user",
        "the next: per output token",
    ):
        assert text in out


def test_a_serving_recipe_is_tuned_at_its_own_load(llmb_run):
    code, out, _ = llmb_run(*INFERENCE, "--json", "--set", "max_num_tokens=8192")
    data = json.loads(out)
    assert code == 0
    assert data["best"]["concurrency"] == data["recipe"]["concurrency"] == 3000
    assert data["best"]["output_tokens_per_s_per_gpu"] >= 0.99 * data["recipe"]["output_tokens_per_s_per_gpu"]
    assert {row["max_num_tokens"] for row in data["pareto"]} == {8192}
    assert "max_num_tokens" not in data["why"]["settings"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*MODEL, "--scale", "1", "--slo", "tpot=1ms"], "the least predicted are tpot"),
        ([*MODEL[:5], "--gpu-type", "h100", "--scale", "1", "--isl", "10", "--osl", "10"], "possible with --scale 2"),
        ([*SERVE, "--model", "llama3.1-8b"], "needs --gpu-type, --scale, --isl, --osl"),
        ([*MODEL, "--scale", "8", "--slo", "itl=5ms"], "itl"),
        ([*MODEL, "--scale", "8", "--osl", "1", "--slo", "tpot=5ms"], "one output token has no TPOT"),
        ([*MODEL, "--scale", "8", "--set", "tp=no"], "tp must be a whole number"),
        ([*MODEL, "--scale", "8", "--set", "tp=3"], "no layout divides"),
        ([*INFERENCE, "--engine", "vllm", "--measure", "1"], "--measure runs the native engine"),
        ([*SERVE, "-w", "pretrain_grok1"], "is not an inference workload"),
        (
            ["tune", "--model", "qwen3-8b", "--gpu-type", "h100", "--scale", "8", "--isl", "9"],
            "--isl is for --task serve",
        ),
    ],
)
def test_wrong_serving_requests_are_refused_in_one_line(llmb_run, options, message):
    code, out, err = llmb_run(*options)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert message in err


def test_measured_serving_settings_are_scaled_to_the_proxy(llmb_run, launched):
    code, out, _ = llmb_run(*INFERENCE, "--measure", "1", "--ranks", "1")
    assert code == 0
    best, recipe = launched.configs
    assert (recipe.workload.max_batch_size, recipe.workload.max_num_tokens) == (16, 256)  # of the proxy's row
    assert best.workload.max_num_tokens >= recipe.workload.max_num_tokens
    assert "the speed of this machine is not predicted" in out


@pytest.mark.nightly  # the launch itself is that of submit; a cheap sibling above has everything else
def test_proxies_are_really_measured(llmb_run):
    code, out, _ = llmb_run(*RUN, "--measure", "1", "--set", "steps=4", "--json")
    data = json.loads(out)
    assert code == 0
    assert all(run["status"] == "ok" and run["tokens_per_s"] > 0 for run in data["measured"])


def test_an_engine_is_named_alike_for_training_and_serving(llmb_run):
    model = ["tune", "--model", "llama3.1-8b", "--gpu-type", "h100", "--scale", "8"]
    option, setting = (
        json.loads(llmb_run(*model, *engine, "--json")[1])
        for engine in (["--engine", "native"], ["--set", "engine=native"])
    )
    assert option["best"] == setting["best"]
    assert option["engine"] == "native"
    assert llmb_run(*model)[1].splitlines()[-1].startswith("engine megatron-bridge, as none is named")
    assert "as none is named" not in llmb_run(*model, "--engine", "native")[1]


def test_served_weights_have_the_dtype_of_their_checkpoint(llmb_run):
    load = ["--task", "serve", "--model", "gpt-oss-120b", "--engine", "vllm", "--gpu-type", "h100", "--isl", "512"]
    tuned = json.loads(llmb_run("tune", *load, "--osl", "64", "--scale", "1", "--json")[1])
    predicted = json.loads(llmb_run("predict", *load, "--osl", "64", "--concurrency", "1", "--json")[1])
    assert tuned["dtype"] == predicted["dtype"] == "nvfp4"
