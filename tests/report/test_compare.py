"""Comparing runs: the ratio with its interval, the verdict, what differs."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.config.load_settings import LoadSettings, load_config
from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError
from llmb.events import RequestDone, RunEnded, RunStarted, StepDone
from llmb.report.compare.compare_text import text
from llmb.report.compare.run_pair import compare
from llmb.results.compare.speed_ratio import speed_ratio
from llmb.results.derive import derive


def noisy(mean, count=20, spread=0.01, seed=1):
    chance = random.Random(seed)
    return [mean * (1 + spread * chance.gauss(0, 1)) for _ in range(count)]


def test_a_real_difference_is_seen_and_noise_is_not():
    faster = speed_ratio(noisy(1.0, seed=1), noisy(0.9, seed=2))
    assert faster.words().startswith("B is faster, by 11")
    assert faster.low < 1 / 0.9 < faster.high
    assert speed_ratio(noisy(0.9, seed=3), noisy(1.0, seed=4)).words().startswith("B is slower")
    assert speed_ratio(noisy(1.0, seed=5), noisy(1.0, seed=6)).words() == "no difference seen in steps/s"
    assert "too few" in speed_ratio([1.0, 1.0], [0.5, 0.5]).words()


def test_one_slow_step_does_not_move_the_verdict():
    spoiled = [*noisy(1.0, 19, seed=7), 50.0]
    assert speed_ratio(spoiled, noisy(1.0, seed=8)).ratio == pytest.approx(1.0, abs=0.02)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for seed in range(200):
        verdict = speed_ratio(noisy(1.0, 15, 0.05, 2 * seed), noisy(0.97, 15, 0.05, 2 * seed + 1))
        held += verdict.low <= 1 / 0.97 <= verdict.high
    assert 180 <= held <= 199


def test_the_ratio_is_that_of_the_medians_even_with_a_long_tail():
    a, b = [1.0] * 11 + [1.7] * 10, [1.0] * 10 + [2.9] * 11
    assert speed_ratio(a, b).ratio == pytest.approx(1 / 2.9)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
def test_swapping_the_runs_inverts_the_ratio(a, b):
    forward, backward = speed_ratio(a, b), speed_ratio(b, a)
    assert forward.ratio == pytest.approx(1 / backward.ratio)
    if forward.low is not None:
        assert forward.low <= forward.ratio <= forward.high
        assert forward.low == pytest.approx(1 / backward.high)


@pytest.fixture
def run(recipes):
    def make(seconds, spread=0.01, last=None, start=None, size="8b", **changes):
        overrides = tuple(Setting(field=k, value=v, source="--set") for k, v in changes.items())
        config = resolve(
            recipes["pretrain_llama3.1"], RunRequest(size=size, dtype="fp32", gpus=1, proxy="small", settings=overrides)
        )
        tokens = config.workload.gbs * config.workload.seqlen
        times = noisy(seconds, last or config.workload.steps, spread)
        events = [StepDone(step=n, seconds=s, tokens=tokens) for n, s in enumerate(times, 1)]
        return config, derive(config, [*([start] if start else []), *events, RunEnded(status="ok")])

    return make


def test_batches_of_another_size_are_compared_by_tokens(run):
    """gbs 8 takes 1.95 times as long for twice the tokens: faster, by 2.6 %."""
    compared = compare(run(1.0), run(1.95, gbs="8"))
    assert compared["verdict"] == "B is faster, by 2.6 % in tokens/s"
    assert compared["doubts"] == []
    ratios = {figure["figure"]: figure["ratio"] for figure in compared["figures"]}
    assert ratios["tokens_per_s"] == pytest.approx(compared["speed"]["ratio"], rel=1e-12)
    assert "a step of B has 2 x the tokens of A's" in text(compared)


def test_one_estimate_is_shown_for_noisy_runs(run):
    compared = compare(run(1.0, spread=0.3), run(1.6, spread=0.3))
    assert re.search(r": A has \d+ blocks? of \d+ steps?, B has \d+ blocks? of \d+ steps?; ", text(compared))
    ratio = next(f["ratio"] for f in compared["figures"] if f["figure"] == "tokens_per_s")
    assert ratio == pytest.approx(compared["speed"]["ratio"], rel=1e-12)
    assert compared["speed"]["low"] < ratio < compared["speed"]["high"]


def started(gpu_name):
    return RunStarted(time=1.0, gpu_name=gpu_name)


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"last": 20}, "B is incomplete: 20 of 40 steps are recorded"),
        ({"spread": 0.3}, r"B: step times vary by \d\d %"),
        ({"start": started("other CPU")}, "they ran on other hardware: A on 1 x this CPU, B on 1 x other CPU"),
        ({"model.layers": "2"}, "proxies of different shapes: A has 4 of 32 layers.*; B has .*model.layers=2"),
        ({"seqlen": "512"}, "A has 256 tokens, B 512"),
        ({"steps": "12", "window": "10-12"}, "B: only 3 steps were measured"),
    ],
)
def test_the_verdict_names_what_speaks_against_it(run, changes, doubt):
    compared = compare(run(1.0, start=started("this CPU")), run(1.0, **{"start": started("this CPU"), **changes}))
    assert re.search(f"verdict: .*; but\n- .*{doubt}", text(compared), re.DOTALL)
    assert len(compared["doubts"]) == 1


def test_ranks_that_share_a_cpu_are_not_other_hardware(run):
    (config, result), more = run(1.0), replace(run(1.0)[1], gpus=2)
    assert compare((config, result), (config, more))["doubts"] == [
        "the ranks that share cpu differ in number: A has 1, B has 2"
    ]


def serving(recipes, rate, use_case="chat"):
    settings = (Setting(field="use_case", value=use_case, source="--set"),)
    request = RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small", settings=settings)
    config = resolve(recipes["inference_llama3.1"], request)
    events = [
        RequestDone(request=n, arrival=0.0, first_token=1.0, end=n / rate, input_tokens=32, output_tokens=32)
        for n in range(1, config.workload.num_requests + 1)
    ]
    return config, derive(config, [*events, RunEnded(status="ok")])


def test_totals_without_requests_are_compared_by_output_tokens(recipes):
    compared = compare(serving(recipes, 10), serving(recipes, 11))
    assert compared["verdict"].startswith(
        "B generates 10.0 % more output tokens/s; a run has one figure and no interval"
    )
    assert compared["speed"]["low"] is None
    longer = compare(serving(recipes, 10), serving(recipes, 11, "reasoning"))
    assert "their requests differ: A 32/32 tokens, B 64/64 tokens" in longer["doubts"]


def closed_loop(recipes, speed, seed, concurrency="4", **changes):
    """Run of four requests at a time, 160 of them, and its requests."""
    settings = {"num_requests": "160", "concurrency": concurrency, "max_batch_size": "64", **changes}
    overrides = tuple(Setting(field=k, value=v, source="--set") for k, v in settings.items())
    config = resolve(
        recipes["inference_llama3.1"], RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small", settings=overrides)
    )
    chance, work, requests = random.Random(seed), config.workload, []
    users = [0.0] * int(concurrency)
    for n in range(work.num_requests):
        user = n % len(users)
        first = users[user] + 0.1 / speed * chance.uniform(0.8, 1.2)
        end = first + 0.3 / speed * chance.uniform(0.9, 1.1)
        requests.append(
            RequestDone(
                request=n,
                arrival=users[user],
                first_token=first,
                token_times=(first, end),
                end=end,
                input_tokens=work.isl,
                output_tokens=work.osl,
                requested_tokens=work.osl,
            )
        )
        users[user] = end
    return (config, derive(config, [*requests, RunEnded(status="ok")])), requests


def compare_loops(a, b):
    return compare(a[0], b[0], requests=(a[1], b[1]))


def test_serving_runs_are_judged_by_their_requests(recipes):
    compared = compare_loops(closed_loop(recipes, 1.0, 1), closed_loop(recipes, 1.25, 2))
    assert re.fullmatch(
        r"B generates 2\d\.\d % more output tokens/s; TTFT (19|20|21)\.\d % shorter, TPOT (19|20|21)\.\d % shorter, "
        r"E2E (19|20|21)\.\d % shorter",
        compared["verdict"],
    )
    assert compared["doubts"] == []
    assert compared["speed"]["low"] > 1.15
    printed = text(compared)
    assert "bootstrap over blocks of requests" in printed
    for figure in ("output_tokens_per_s", "ttft_ms (mean)", "ttft_ms (p99)", "tpot_ms (p50)", "e2e_ms (mean)"):
        assert figure in printed


def test_equal_serving_runs_show_no_difference(recipes):
    verdict = compare_loops(closed_loop(recipes, 1.0, 1), closed_loop(recipes, 1.0, 2))["verdict"]
    assert verdict.count("no difference seen in") == 4


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"concurrency": "16"}, "their concurrency differs: A 4, B 16; with more requests at once"),
        ({"use_case": "chat"}, "their requests differ: A 64/64 tokens, B 32/32 tokens"),
    ],
)
def test_serving_runs_under_different_loads_are_doubted(recipes, changes, doubt):
    compared = compare_loops(closed_loop(recipes, 1.0, 1), closed_loop(recipes, 1.0, 2, **changes))
    assert any(line.startswith(doubt) for line in compared["doubts"]), compared["doubts"]


def load_run(**changes):
    """Load on another project's server: 60 requests, one after the other."""
    settings = {
        "base_url": "http://h",
        "model": "m",
        "isl": 8,
        "osl": 8,
        "num_requests": 60,
        "concurrency": 1,
        **changes,
    }
    config = load_config(LoadSettings(**settings))
    requests = [
        RequestDone(
            request=n, arrival=n, first_token=n + 0.1, token_times=(n + 0.1, n + 0.5), end=n + 0.5,
            input_tokens=8, output_tokens=8, requested_tokens=8,
        )
        for n in map(float, range(60))
    ]  # fmt: skip
    requests = [replace(request, request=int(request.request)) for request in requests]
    return (config, derive(config, [*requests, RunEnded(status="ok")])), requests


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({}, None),
        ({"concurrency": 2}, "their concurrency differs: A 1, B 2"),
        ({"arrivals": "poisson", "rate": 2.0, "concurrency": None}, "their rates differ: A no rate, B 2 requests/s"),
        ({"osl": 9}, "their requests differ: A 8/8 tokens, B 8/9 tokens"),
        ({"trace": "t.jsonl"}, "their requests differ: A 8/8 tokens, B t.jsonl"),
        ({"ignore_eos": False}, "their requests differ: A 8/8 tokens, B 8/8 tokens until EOS"),
        ({"prefix_fraction": 0.5}, "their requests differ: A 8/8 tokens, B 8/8 tokens 50 % of them shared by 1 groups"),
        ({"endpoint": "chat", "turns": 2}, "their requests differ: A 8/8 tokens, B 8/8 tokens as chats in 2 turns"),
    ],
)
def test_loads_on_servers_are_compared_like_with_like(changes, doubt):
    doubts = compare_loops(load_run(), load_run(**changes))["doubts"]
    relevant = [line for line in doubts if "differ" in line]
    assert relevant == [] if doubt is None else relevant[0].startswith(doubt)


def test_at_the_same_rate_only_latencies_tell():
    load = load_run(arrivals="poisson", rate=2.0, concurrency=None)
    assert any(line.startswith("both were sent 2 requests/s") for line in compare_loops(load, load)["doubts"])


def test_differing_fields_come_first(run):
    output = text(compare(run(1.0), run(0.8, lr="0.001")))
    assert output.index("workload.lr") < output.index("tokens_per_s") < output.index("verdict: B is faster")
    assert "same configuration" in text(compare(run(1.0), run(1.0)))
    windows = text(compare(run(1.0), run(1.0, window="20-30")))
    assert re.search(r"workload\.window +11-40 +20-30", windows), "a window as it is typed"


def test_runs_that_cannot_be_compared_are_refused(run, recipes):
    config, result = run(1.0)
    with pytest.raises(ConfigError, match="no figures"):
        compare((config, result), (config, derive(config, [])))
    second = resolve(recipes["pretrain_grok1"], RunRequest(size="314b", dtype="fp32", gpus=1, proxy="small"))
    events = [StepDone(step=n, seconds=1.0, tokens=10) for n in range(1, second.workload.steps + 1)]
    grok = second, derive(second, [*events, RunEnded(status="ok")])
    with pytest.raises(ConfigError, match="different workloads"):
        compare((config, result), grok)
    assert compare((config, result), grok, force=True)["differing"]["target"]
