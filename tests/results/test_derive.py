"""Events to a Result: the window, warm-up, statuses, utilisation, references."""

import json
from dataclasses import replace

import pytest

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import build, to_json
from llmb.config.spec import Parallel
from llmb.events import CollectiveSeen, LogProblem, RequestDone, RunEnded, RunStarted, ServingSummary, StepDone
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.result import Result

OK = RunEnded(status="ok")


def steps(count=50, seconds=15.892, tokens=8192 * 768, slow_until=34, **more):
    return [
        StepDone(
            step=n,
            steps=count,
            seconds=seconds * (3 if n <= slow_until else 1),
            tokens=tokens,
            loss=12.0 - n / 50,
            grad_norm=1.0,
            **more,
        )
        for n in range(1, count + 1)
    ]


@pytest.fixture
def nemotron(recipes):
    return resolve(recipes["pretrain_nemotronh"], RunRequest(size="56b", dtype="fp8", gpus=256, gpu="h100"))


def test_the_published_nemotron_row_comes_out(nemotron):
    result = derive(nemotron, [*steps(slow_until=10), OK])
    assert result.status == "ok"
    assert result.window == (11, 44)
    assert result.step_time_s.n == 34
    assert round(result.tokens_per_s) == 395888
    assert round(100 * result.mfu, 2) == 26.86
    assert (result.mfu_peak_tflops, result.mfu_peak_dtype, result.mfu_convention) == (1979, "fp8", "full")
    assert round(result.days_per_1t_tokens, 2) == 29.24
    assert result.reference.ratio == pytest.approx(1.0)
    assert result.reference.source == "NVIDIA dgxc-benchmarking, Nemotron-H recipe (NeMo 25.04.01)"


def test_warm_up_is_left_out_and_a_slow_run_falls_behind_its_reference(nemotron):
    result = derive(nemotron, [*steps(seconds=2 * 15.892), OK])
    assert result.step_time_s.max > result.step_time_s.min  # steps 11-34 are slow here, and counted
    assert result.reference.ratio < 0.5


@pytest.mark.parametrize(
    ("events", "status", "reason_text"),
    [
        ([], "incomplete", "no end was recorded"),
        (steps(20), "incomplete", "no end was recorded"),
        ([*steps(20), OK], "incomplete", "20 of 50"),
        ([*steps(3), RunEnded(status="diverged", reason="NaN at step 3")], "diverged", "NaN"),
        ([*steps(3), RunEnded(status="incomplete"), RunEnded(status="timeout", reason="5 s")], "timeout", "5 s"),
    ],
)
def test_every_end_has_a_name_and_keeps_what_is_there(nemotron, events, status, reason_text):
    result = derive(nemotron, events)
    assert result.status == status
    assert reason_text in result.reason
    assert result.reference is None
    assert result.steps_done == (len([e for e in events if isinstance(e, StepDone)]) or None)


def test_failed_rank_and_its_last_lines_come_from_the_run_end(nemotron):
    end = RunEnded(status="failed", reason="rank 3: bad", failed_rank=3, last_lines=("Traceback", "bad"))
    other_ends = [RunEnded(rank=rank, status="incomplete", reason="interrupted") for rank in (1, 2)]
    result = derive(nemotron, [*steps(3), OK, end, *other_ends])
    assert (result.status, result.reason, result.failed_rank) == ("failed", "rank 3: bad", 3)
    assert result.last_lines == ("Traceback", "bad")
    assert "last lines of rank 3:\n  Traceback\n  bad\n" in summary(result)
    assert derive(nemotron, [*steps(), OK]).failed_rank is None


def busy(rank, busy_s):
    return [StepDone(step=n, rank=rank, seconds=1.0, tokens=8, busy_s=busy_s) for n in range(1, 51)]


def slow_ranks(config, *seconds):
    """Warnings about slow ranks when each rank works this long in a step of a second."""
    started = [RunStarted(time=1.0, rank=rank, host=f"node{rank // 2}") for rank in range(len(seconds))]
    done = [event for rank, own_seconds in enumerate(seconds) for event in busy(rank, own_seconds)]
    return [warning.text for warning in derive(config, [*started, *done, OK]).warnings if warning.code == "SLOW_RANK"]


def test_a_slow_rank_is_named_with_its_host(nemotron):
    (reason_text,) = slow_ranks(nemotron, 0.4, 0.4, 0.4, 0.9)
    assert reason_text.startswith(
        "rank 3 on node1 holds the others up: 0.9 s of own work a step, 125 % more than the median"
    )


def test_ranks_that_hardly_differ_or_hold_nobody_up_are_not(nemotron):
    assert slow_ranks(nemotron, 0.80, 0.82, 0.85, 0.90) == []
    assert slow_ranks(nemotron, 0.01, 0.01, 0.01, 0.05) == []
    assert slow_ranks(nemotron, None, None) == []


def test_stages_of_a_pipeline_are_not_compared(nemotron):
    stages = replace(nemotron, machine=replace(nemotron.machine, gpus=4), parallel=Parallel(pp=2, dp=2))
    assert slow_ranks(stages, 0.4, 0.4, 0.9, 0.9) == []
    (reason_text,) = slow_ranks(stages, 0.1, 0.5, 0.9, 0.9)
    assert reason_text.startswith("rank 1 on node0 ")


def test_a_result_survives_the_file(nemotron):
    result = derive(nemotron, [RunStarted(time=1.0, gpu_name="NVIDIA H100", versions={"torch": "2"}), *steps(), OK])
    assert build(Result, json.loads(to_json(result))) == result


def test_warnings_say_what_to_do(recipes, nemotron):
    on_another_gpu = derive(nemotron, [RunStarted(time=1.0, gpu_name="NVIDIA H200"), *steps(), OK])
    assert "OTHER_GPU" in {w.code for w in on_another_gpu.warnings}
    assert "NOISY_STEPS" in {w.code for w in on_another_gpu.warnings}
    proxy = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    result = derive(proxy, [*steps(proxy.workload.steps, seconds=0.5, tokens=1024), OK])
    assert {"PROXY", "NO_PEAK"} <= {w.code for w in result.warnings}
    assert result.mfu is None
    assert result.tflops_per_gpu > 0


def test_result_says_a_power_limit_by_itself(nemotron):
    device = {"power_limit_w": 400.0, "power_default_w": 700.0, "driver": "570.133.20", "ecc": None}
    result = derive(nemotron, [RunStarted(time=1.0, gpu_name="NVIDIA H100", device=device), *steps(), OK])
    assert result.device == {"power_limit_w": 400.0, "power_default_w": 700.0, "driver": "570.133.20"}
    assert "warning POWER_LIMIT: power limit 400 W, the part's default is 700 W; " in summary(result)


def test_unlisted_gpu_has_no_peak_and_no_utilization(recipes):
    request = RunRequest(size="8b", dtype="bf16", gpus=1, gpu="rtx-4080")
    config = resolve(recipes["pretrain_llama3.1"], request)
    start = RunStarted(time=1.0, gpu_name="NVIDIA GeForce RTX 4080")
    result = derive(config, [start, *steps(config.workload.steps, seconds=0.5, tokens=1024), OK])
    assert (result.mfu, result.hfu, result.mfu_peak_tflops, result.reference) == (None, None, None, None)
    assert result.tflops_per_gpu > 0
    assert "no published bf16 peak for rtx-4080" in next(w.text for w in result.warnings if w.code == "NO_PEAK")
    assert "OTHER_GPU" not in {w.code for w in result.warnings}
    assert "MFU" not in summary(result).replace("MFU is not given", "")


def test_a_log_without_configuration_keeps_unknowns_null():
    result = derive(None, [*steps(reported_tflops_per_gpu=500.0), OK], name="foreign.out")
    assert (result.tflops_per_gpu, result.tflops_source) == (500.0, "reported by the engine")
    assert (result.mfu, result.gpus, result.window) == (None, None, (35, 44))
    short = derive(None, [*steps(8, slow_until=0), OK])
    assert (short.status, short.window, short.step_time_s.n) == ("ok", (5, 8), 4)


def test_requests_become_latencies(recipes):
    config = resolve(recipes["inference_deepseek-r1"], RunRequest(size="671b", dtype="nvfp4", gpus=4, gpu="gb200"))
    requests = [
        RequestDone(
            request=i,
            arrival=0.0,
            first_token=0.5,
            token_times=(0.5, 0.6, 0.8),
            end=0.8,
            input_tokens=10,
            output_tokens=3,
        )
        for i in range(4)
    ]
    broken = RequestDone(request=9, arrival=0.0, end=9.0, input_tokens=1, output_tokens=0, error="lost")
    result = derive(config, [*requests, broken, OK])
    assert (result.requests, result.requests_failed) == (4, 1)
    assert result.ttft_ms["mean"] == pytest.approx(500)
    assert result.tpot_ms["p50"] == pytest.approx(150)
    assert result.itl_ms["p50"] == pytest.approx(150)
    assert result.output_tokens_per_s == pytest.approx(15)
    assert result.output_tokens_per_s_per_gpu == pytest.approx(15 / 4)


def test_totals_collectives_and_problems_are_kept():
    summary = ServingSummary(
        values={"output_tokens_per_s": 100.0, "ttft_ms.mean": 5.0, "tpot_ms.p99": None, "odd": 1.0}
    )
    seen = CollectiveSeen(operation="AllReduce", calls=3, bytes=12, datatype="float32", ranks=8)
    result = derive(None, [summary, seen, LogProblem(problem="binary", count=2), LogProblem(problem="binary"), OK])
    assert (result.output_tokens_per_s, result.ttft_ms, result.tpot_ms) == (100.0, {"mean": 5.0}, None)
    assert result.collectives[0].ranks == 8
    assert result.log_problems == {"binary": 3}


def test_an_unknown_setting_keeps_a_reference_away(recipes):
    override = (Setting(field="mbs", value="2", source="--set"),)
    config = resolve(
        recipes["pretrain_nemotronh"], RunRequest(size="56b", dtype="fp8", gpus=256, gpu="h100", settings=override)
    )
    assert derive(config, [*steps(), OK]).reference is None
