"""Loads and configurations of single points: seeds, ramps, limits, overrides; settings that vary."""

import pytest

from llmb.cli.sweep.in_process_points import point_config
from llmb.cli.sweep.plan_builder import serve_arguments, split_settings, sweep_name
from llmb.cli.sweep.url_points import goodput_limits, point_settings
from llmb.config.load_settings import LoadSettings, SloLimits, check_load
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError
from llmb.loadgen.sweep.sweep_plan import PointLoad
from llmb.results.run_settings import run_settings
from llmb.results.sweep.sweep_points import PointKey

BASE = LoadSettings(base_url="http://h", model="m", concurrency=1, num_requests=1, timeout_s=100.0)


def key(load, kind="concurrency", repeat=1):
    return PointKey(load_kind=kind, load=load, repeat=repeat)


def test_a_point_of_a_concurrency():
    settings = point_settings(BASE, key(8), PointLoad(requests=16, limit_s=50.0, ramp_s=0.5), 2)
    check_load(settings)
    assert (settings.arrivals, settings.concurrency, settings.num_requests) == ("concurrency", 8, 16)
    assert (settings.ramp_s, settings.duration_s, settings.warmup_requests) == (0.5, 50.0, 2)
    counted = point_settings(BASE, key(1), PointLoad(requests=4, limit_s=50.0, for_s=5.0), 0)
    check_load(counted)
    assert (counted.num_requests, counted.duration_s) == (None, 5.0)


def test_a_point_of_a_rate():
    settings = point_settings(BASE, key(2.5, "rate"), PointLoad(requests=16, limit_s=50.0, timeout_s=60.0), 0)
    check_load(settings)
    assert (settings.arrivals, settings.rate, settings.concurrency, settings.timeout_s) == ("poisson", 2.5, None, 60.0)
    patient = point_settings(BASE, key(2.5, "rate"), PointLoad(requests=16, limit_s=50.0, timeout_s=600.0), 0)
    assert patient.timeout_s == 100.0


def test_points_and_repeats_have_prompts_of_their_own():
    load = PointLoad(requests=4, limit_s=10.0)
    points = [key(c, repeat=r) for c in (1, 2, 4) for r in (1, 2, 3)] + [key(0.5, "rate")]
    assert len({point_settings(BASE, point, load, 0).seed for point in points}) == len(points)


def test_a_single_tier_is_the_limit_of_goodput():
    assert goodput_limits({"slo": "ttft=500ms,ttft.p50=100ms,tpot=50ms"}) == SloLimits(ttft_ms=500.0, tpot_ms=50.0)
    assert goodput_limits({}) is None
    assert goodput_limits({"a": "ttft=1s", "b": "ttft=2s"}) is None


def test_a_point_in_process_is_a_run_that_says_what_it_is(recipes):
    config = resolve(recipes["inference_llama3.1"], RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small"))
    point = point_config(config, key(8, repeat=2), PointLoad(requests=16, limit_s=10.0))
    assert (point.workload.concurrency, point.workload.num_requests) == (8, 16)
    assert point.workload.seed == config.workload.seed + 1
    assert "_CON8_" in point.name
    assert {"concurrency=8", "num_requests=16"} <= set(run_settings(point).split())
    rated = point_config(config, key(2.0, "rate"), PointLoad(requests=16, limit_s=10.0))
    assert rated.workload.rate == 2.0
    assert rated.workload.concurrency == config.workload.concurrency


@pytest.mark.parametrize(
    ("pairs", "variants", "constant"),
    [
        ([], ("",), []),
        (["mbs=2"], ("",), ["mbs=2"]),
        (["a=1,2", "b=3"], ("a=1", "a=2"), ["b=3"]),
        (["max_num_tokens=2048..8192"], ("max_num_tokens=2048", "max_num_tokens=4096", "max_num_tokens=8192"), []),
        (["kv_fraction=0.5,0.9"], ("kv_fraction=0.5", "kv_fraction=0.9"), []),
        (["use_case=chat:128/128", "weights=a,b"], ("",), ["use_case=chat:128/128", "weights=a,b"]),
    ],
)
def test_one_numeric_setting_may_vary(pairs, variants, constant):
    assert split_settings(pairs) == (variants, constant)


def test_two_settings_may_not():
    with pytest.raises(ConfigError, match="one setting may vary"):
        split_settings(["a=1,2", "b=1..4"])


def test_the_server_gets_the_options_of_the_sweep(llmb_run):
    from llmb.cli.llmb_run import parser

    line = ["sweep", "-w", "inference_llama3.1", "-s", "8b", "--dtype", "fp8", "--scale", "1", "--proxy", "--force"]
    arguments = serve_arguments(parser().parse_args(line), ["max_num_tokens=64"])
    options = parser().parse_args(["serve", *arguments])
    assert (options.workload, options.size, options.dtype, options.scale) == ("inference_llama3.1", "8b", "fp8", "1")
    assert (options.proxy, options.set, options.force) == ("small", ["max_num_tokens=64"], True)


def test_names_of_folders_are_plain():
    assert sweep_name("meta-llama/Llama 3.1", None, "fp8") == "meta-llama-Llama-3.1_fp8"
    assert sweep_name("///") == "sweep"
