"""Summary that ends a run: what it says of proxies, of windows that are not full, and how to measure more."""

import pytest

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RequestDone, RunEnded, StepDone
from llmb.report.serving_overview import overview
from llmb.report.summary import summary
from llmb.results.derive import derive


def proxy(recipes, workload, size, **changes):
    settings = tuple(Setting(field=k, value=v, source="--set") for k, v in changes.items())
    request = RunRequest(size=size, dtype="bf16", gpus=1, proxy="small", settings=settings)
    return resolve(recipes[workload], request)


def trained(config, steps, seconds=(0.5,)):
    tokens = config.workload.gbs * config.workload.seqlen
    events = [StepDone(step=n, seconds=seconds[n % len(seconds)], tokens=tokens) for n in range(1, steps + 1)]
    return derive(config, [*events, RunEnded(status="ok")])


def test_a_serving_run_names_its_proxy_as_a_training_run_does(recipes):
    config = proxy(recipes, "inference_llama3.1", "8b", use_case="chat")
    events = [
        RequestDone(request=n, arrival=0.0, first_token=1.0, end=2.0, input_tokens=32, output_tokens=32)
        for n in range(config.workload.num_requests)
    ]
    result = derive(config, [*events, RunEnded(status="ok")])
    description = "4 of 32 layers, width 256 of 4096, vocabulary 4096 of 128256, lengths 32/32 instead of 128/128"
    assert f"none: a proxy ({description})" in summary(result)
    assert f"Proxy:{description:>{len(description) + 44}}" in overview(result, config)


def test_a_window_that_is_not_full_says_how_many_of_its_steps_count(recipes):
    config = proxy(recipes, "pretrain_llama3.1", "8b")
    assert "median of 30 steps (11-40)" in summary(trained(config, 40))
    stopped = summary(trained(config, 13))
    assert "median of 3 of the 30 steps 11-40" in stopped
    assert "only 3 steps were measured; let it run to step 40" in stopped


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"steps": "4"}, "run more steps (--set steps=8)"),
        ({"window": "20-22"}, "measure more of its steps (--set window=20-40)"),
    ],
)
def test_the_advice_adds_samples(recipes, changes, advice):
    config = proxy(recipes, "pretrain_llama3.1", "8b", **changes)
    result = trained(config, config.workload.steps)
    assert f"steps were measured; {advice}" in summary(result)
    field, value = advice.split("--set ")[1].rstrip(")").split("=")
    followed = proxy(recipes, "pretrain_llama3.1", "8b", **{**changes, field: value})
    assert trained(followed, followed.workload.steps).step_time_s.n > result.step_time_s.n


def test_the_advice_for_a_profiled_run_takes_no_traced_steps(recipes):
    """More steps do not lengthen its window, which ends before those that are traced."""
    profiled = {"profile": "true", "steps": "60", "profile_start": "50", "profile_stop": "53"}
    config = proxy(recipes, "pretrain_llama3.1", "8b", **profiled)
    assert config.workload.window == (11, 49)
    assert "or run it without profiling" in summary(trained(config, 60, seconds=(0.3, 0.5, 0.9)))
    shorter = proxy(recipes, "pretrain_llama3.1", "8b", **profiled, window="11-12")
    assert "(--set window=11-49)" in summary(trained(shorter, 60))


def test_noisy_steps_are_told_to_run_longer_and_then_count(recipes):
    noisy = proxy(recipes, "pretrain_llama3.1", "8b")
    result = trained(noisy, 40, seconds=(0.3, 0.5, 0.9))
    assert "or run more steps (--set steps=80)" in summary(result)
    longer = proxy(recipes, "pretrain_llama3.1", "8b", steps="80")
    assert trained(longer, 80).step_time_s.n == 70


def test_tables_fit_the_terminal(recipes, monkeypatch):
    result = trained(proxy(recipes, "pretrain_llama3.1", "8b"), 40)
    monkeypatch.setenv("COLUMNS", "80")
    table = summary(result).split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 80
    assert "sequences of 256" in " ".join(table.split())


def test_source_of_tflops_is_a_phrase():
    step = StepDone(step=1, seconds=1.0, reported_tflops_per_gpu=500.0)
    assert "per device, reported by the engine" in summary(derive(None, [step, RunEnded(status="ok")]))
