"""`llmb-run explain`: stored runs, a result.json, figures typed by hand, refusals in one line."""

import json
from datetime import datetime

import pytest

from llmb.cli.stored_runs import write_result
from llmb.config.overrides import from_arguments
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import to_json
from llmb.events import RunEnded, RunStarted, StepDone, TimeSpent, append
from llmb.launch.run_folder import RunFolder
from llmb.perfmodel.explain.run_prediction import with_prediction
from llmb.perfmodel.metrics import summarize
from llmb.results.result import Result

SERVED = ["explain", "--isl", "1000", "--osl", "100", "--model", "llama3.1-8b", "--dtype", "fp8"]
TRAINED = ["explain", "--model", "llama3.1-8b", "--gpu-type", "h200", "--set", "gbs=6", "--set", "seqlen=8192"]


@pytest.fixture
def stored_run(recipes, tmp_path):
    """Stores a run of Llama 8B on one H200 with the given step time, profiled."""

    def store(seconds: float, **request):
        settings = tuple(from_arguments(["steps=7", "window=3-7", "gbs=6", "mbs=2"]))
        fields = {"size": "8b", "dtype": "bf16", "gpus": 1, "gpu": "h200", "settings": settings, **request}
        config = resolve(recipes["pretrain_llama3.1"], RunRequest(**fields))
        run = RunFolder.create(tmp_path / "llmb", config, datetime.now())
        tokens = config.workload.gbs * config.workload.seqlen
        steps = [StepDone(step=n, steps=7, seconds=seconds, tokens=tokens, time=float(n)) for n in range(1, 8)]
        kinds = {"matrix products": 0.75, "attention": 0.2, "idle": 0.05}
        spent = [TimeSpent(kind=kind, seconds_per_step=share * seconds, share=share) for kind, share in kinds.items()]
        for event in (RunStarted(time=0.0, gpu_name="NVIDIA H200"), *steps, *spent, RunEnded(time=9.0, status="ok")):
            append(run.events(0), event)
        write_result(run, config)
        return run

    return store


def test_a_run_is_possible_and_its_breakdown_stands_beside_the_prediction(llmb_run, stored_run):
    run = stored_run(4.2)
    code, out, _ = llmb_run("explain", run.path)
    assert code == 0
    assert "possible: at " in out
    assert "where the time goes" in out
    data = json.loads(llmb_run("explain", run.path, "--json")[1])
    assert data["verdict"] == "possible"
    products = next(pair for pair in data["terms"] if pair["kind"] == "matrix products")
    assert products["measured_s"] == pytest.approx(0.75 * 4.2)
    assert products["predicted_s"] > 2


def test_an_impossible_run_says_so_with_exit_code_0(llmb_run, stored_run):
    run = stored_run(1.5)
    code, out, _ = llmb_run("explain", run.path)
    assert code == 0
    assert "IMPOSSIBLE as described" in out
    assert "one micro-batch, not of a step of 3" in out
    assert json.loads(llmb_run("explain", run.result, "--json")[1])["verdict"] == "impossible"


def test_a_result_json_alone_is_checked_by_its_tflops(llmb_run, stored_run, tmp_path):
    alone = tmp_path / "elsewhere" / "result.json"
    alone.parent.mkdir()
    alone.write_text(stored_run(1.5).result.read_text())
    data = json.loads(llmb_run("explain", alone, "--json")[1])
    assert data["verdict"] == "impossible"
    assert "no config.json" in data["notes"][0]


def test_a_proxy_on_a_cpu_has_no_limit(llmb_run, stored_run):
    settings = tuple(from_arguments(["steps=7", "window=3-7"]))
    run = stored_run(0.5, gpu=None, proxy="small", settings=settings)
    data = json.loads(llmb_run("explain", run.path, "--json")[1])
    assert data["verdict"] == "unknown"
    assert data["terms"][0]["measured_s"] is not None
    assert "the speed of a CPU is not predicted" in data["notes"]
    assert any(note.startswith("note PROXY: ") for note in data["notes"])  # as the run's own summary calls it


def test_a_served_run_is_explained_by_its_figures(llmb_run, recipes, tmp_path):
    request = RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200")
    config = with_prediction(resolve(recipes["inference_llama3.1"], request))
    run = RunFolder.create(tmp_path / "llmb", config, datetime.now())
    figures = {"output_tokens_per_s": 18463.0, "output_tokens_per_s_per_gpu": 18463.0, "requests": 3000}
    run.result.write_text(to_json(Result(name=config.name, status="ok", **figures)))
    data = json.loads(llmb_run("explain", run.path, "--json")[1])
    assert data["verdict"] == "possible"
    assert {limit["name"] for limit in data["limits"]} == {"compute", "HBM bandwidth"}
    assert data["expected"][0]["ratio"] == pytest.approx(18463 / config.predicted.value)
    assert data["published"][0]["ratio"] == pytest.approx(18463 / 17744)
    assert any(pair["kind"].startswith("decode step") for pair in data["terms"])


def test_an_out_of_core_run_shows_the_times_of_its_plan(llmb_run, recipes, tmp_path):
    config = resolve(recipes["outofcore_llama3"], RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small"))
    run = RunFolder.create(tmp_path / "llmb", config, datetime.now())
    times = summarize([2.0, 2.1])
    run.result.write_text(to_json(Result(name=config.name, status="ok", step_time_s=times)))
    data = json.loads(llmb_run("explain", run.path, "--json")[1])
    assert data["verdict"] == "unknown"  # of a CPU
    assert data["published"] == []


def test_a_failed_run_has_nothing_to_explain(llmb_run, stored_run):
    run = stored_run(4.2)
    result = json.loads(run.result.read_text()) | {"status": "oom"}
    run.result.write_text(json.dumps(result))
    code, _, err = llmb_run("explain", run.path)
    assert code == 1
    assert "status oom" in err


def test_the_row_of_vllm_is_caught_as_the_issue_types_it(llmb_run):
    code, out, _ = llmb_run(*SERVED, "--tokens-per-s", "9446", "--gpu", "h200")
    assert code == 0
    assert "IMPOSSIBLE as described" in out
    assert "prefix caching" in out
    assert "1,560 TFLOP/s/GPU" in out
    data = json.loads(
        llmb_run(*SERVED, "--ttft-ms", "71.91", "--tpot-ms", "11.25", "--concurrency", "112", "--gpu-type", "h200",
                 "--json")[1]
    )  # fmt: skip
    assert data["verdict"] == "impossible"
    assert {item["metric"] for item in data["expected"]} == {"output_tokens_per_s", "ttft_ms", "tpot_ms"}


def test_a_published_row_is_named_with_its_ratio(llmb_run):
    arguments = [*SERVED, "--tokens-per-s", "17744", "--gpu-type", "h200", "--json"]
    arguments[arguments.index("100")] = "1000"
    data = json.loads(llmb_run(*arguments)[1])
    assert data["verdict"] == "possible"
    assert data["published"][0]["ratio"] == pytest.approx(1.0)
    assert data["published"][-1]["ratio"] is None  # other lengths


def test_training_figures_in_three_units_agree(llmb_run):
    step = json.loads(llmb_run(*TRAINED, "--step-time-s", "4.188", "--json")[1])
    tokens = json.loads(llmb_run(*TRAINED, "--tokens-per-s", str(6 * 8192 / 4.188), "--json")[1])
    needed = step["limits"][0]["needed"]
    tflops = json.loads(llmb_run(*TRAINED, "--tflops-per-gpu", str(needed), "--json")[1])
    assert tokens["limits"][0]["needed"] == pytest.approx(needed)
    assert tflops["limits"][0]["fraction"] == pytest.approx(step["limits"][0]["fraction"])
    assert "attention in full" in tflops["notes"][-2]
    assert "recomputed forwards too (HFU)" in tflops["notes"][-1]


def test_another_flop_convention_is_a_cause_of_an_impossible_figure(llmb_run):
    """800 TFLOP/s of an H100 in bf16: 472 where half of the attention counts, which is most of 131,072 tokens."""
    long = ["explain", "--model", "llama3.1-8b", "--gpu-type", "h100", "--scale", "8", "--set", "cp=8"]
    causes = {
        tflops: json.loads(llmb_run(*long, "--set", "seqlen=131072", "--tflops-per-gpu", tflops, "--json")[1])["causes"]
        for tflops in ("800", "1100", "1500")
    }
    assert causes["800"][0] == "it counts attention in full, not causal: 472 TFLOP/s/GPU by our convention"
    assert causes["800"][1] == "it counts recomputed forwards too (HFU): 600 TFLOP/s/GPU by our convention"
    assert [cause.split(":")[0] for cause in causes["1100"][:2]] == [
        "it counts attention in full, not causal", "weights are frozen (LoRA)",
    ]  # fmt: skip
    assert not any("convention" in cause for cause in causes["1500"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a run"),
        (
            [
                "--model",
                "llama3.1-8b",
                "--gpu-type",
                "h200",
                "--isl",
                "9",
                "--osl",
                "1",
                "--ttft-ms",
                "9",
                "--tpot-ms",
                "9",
                "--concurrency",
                "4",
            ],
            "one output token has no TPOT",
        ),
        (["L1", "--model", "llama3.1-8b"], "name a run"),
        (["--model", "llama3.1-8b", "--step-time-s", "1"], "need --model"),
        (["--model", "llama3.1-8b", "--gpu-type", "h200"], "give one figure"),
        (["--model", "llama3.1-8b", "--gpu-type", "h2000", "--step-time-s", "1"], "did you mean h200"),
        (
            ["--model", "llama3.1-8b", "--gpu-type", "h200", "--step-time-s", "0"],
            "--step-time-s must be a number above 0",
        ),
        (["--model", "llama3.1-8b", "--gpu-type", "h200", "--isl", "9", "--tokens-per-s", "1"], "both --isl and --osl"),
        (["--model", "llama3.1-8b", "--gpu-type", "h200", "--isl", "9", "--osl", "9", "--tpot-ms", "1"], "need all of"),
        (
            ["--model", "llama3.1-8b", "--gpu-type", "h200", "--isl", "9", "--osl", "9", "--scale", "2"],
            "is for training",
        ),
    ],
)
def test_a_wrong_request_is_one_line(llmb_run, arguments, message):
    code, _, err = llmb_run("explain", *arguments)
    assert code == 1
    assert err.count("\n") == 1
    assert message in err


PROMPT = ["explain", "--model", "llama3.1-8b", "--dtype", "fp8", "--gpu", "h100", "--isl", "8000", "--osl", "100"]


def test_a_first_token_before_its_prompt_can_be_computed_is_impossible(llmb_run):
    """8,000 tokens are 129 TFLOP: 60 ms at the peak of an H100 and its highest clock."""
    latencies = ["--concurrency", "1", "--tpot-ms", "10", "--ttft-ms"]
    cached, computed = (json.loads(llmb_run(*PROMPT, *latencies, ttft, "--json")[1]) for ttft in ("10", "120"))
    assert (cached["verdict"], computed["verdict"]) == ("impossible", "possible")
    exceeded = [limit["name"] for limit in cached["limits"] if limit["fraction"] > 1]
    assert exceeded == ["compute of a prompt before its first token"]
    assert cached["causes"][0].startswith("prefix caching: at least 8")


def test_a_rate_that_its_latencies_do_not_give_is_named(llmb_run):
    figures = ["--concurrency", "4", "--ttft-ms", "200", "--tpot-ms", "11", "--tokens-per-s"]
    agreeing, contradicting = (llmb_run(*PROMPT, *figures, rate)[1] for rate in ("300", "900"))
    assert "not of one run" not in agreeing
    assert "4 requests at once with this TTFT and TPOT give at most 310 output tokens/s" in contradicting


def test_causes_of_requests_with_one_output_token_make_sense(llmb_run):
    single = ["explain", "--model", "llama3.1-8b", "--gpu", "h100", "--isl", "1000", "--osl", "1", "--concurrency", "4"]
    data = json.loads(llmb_run(*single, "--tokens-per-s", "100", "--json")[1])
    assert data["verdict"] == "impossible"
    assert not [cause for cause in data["causes"] if "end early" in cause]
    assert "input and output tokens are counted: then 0.1 tokens/s are output" in data["causes"]


def test_a_model_that_no_gpu_holds_is_impossible_not_refused(llmb_run):
    claim = ["explain", "--model", "llama3.1-405b", "--gpu", "h100", "--isl", "1024", "--osl", "1024"]
    code, out, _ = llmb_run(*claim, "--tokens-per-s", "100", "--json")
    data = json.loads(out)
    assert (code, data["verdict"], data["expected"]) == (0, "impossible", [])
    assert [limit["name"] for limit in data["limits"] if limit["fraction"] > 1] == ["memory"]
    assert data["causes"][0] == "weights split over 10 GPUs or more (tp, pp, ep), not 1"
    assert data["notes"][0].startswith("not predicted: Llama-3.1-405B in bf16")
    split = json.loads(llmb_run(*claim, "--tokens-per-s", "100", "--set", "tp=16", "--json")[1])
    assert (split["verdict"], "memory" in [limit["name"] for limit in split["limits"]]) == ("possible", False)


def test_a_training_layout_that_does_not_fit_is_named(llmb_run):
    claim = ["explain", "--model", "llama3.1-70b", "--gpu", "h100", "--step-time-s", "4", "--json"]
    notes, sharded = (
        json.loads(llmb_run(*claim, *more)[1])["notes"]
        for more in (["--scale", "8"], ["--scale", "64", "--set", "fsdp=true", "--set", "tp=4"])
    )
    assert "the layout does not fit as described: memory estimate 447 of 79 GiB" in notes[0]
    assert not [note for note in sharded if "does not fit" in note]
