"""Comparison of several runs with the first, as text, csv and Markdown, and from the command line."""

import csv
import json
import random
from dataclasses import replace
from io import StringIO

import pytest

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import to_json
from llmb.errors import ConfigError
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.report.compare.compare_export import set_csv, set_markdown
from llmb.report.compare.compare_text import set_text
from llmb.report.compare.run_set import ComparedRun, compare_runs, run_labels
from llmb.results.derive import derive
from llmb.results.result import GpuTelemetry


@pytest.fixture
def run(recipes):
    def make(seconds, gpu_name="this CPU", folder=None, **changes):
        overrides = tuple(Setting(field=k, value=v, source="--set") for k, v in changes.items())
        request = RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small", settings=overrides)
        config = resolve(recipes["pretrain_llama3.1"], request)
        tokens = config.workload.gbs * config.workload.seqlen
        chance = random.Random(7)
        events = [RunStarted(time=1.0, gpu_name=gpu_name)]
        events += [
            StepDone(step=n, seconds=seconds * (1 + 0.002 * chance.gauss(0, 1)), tokens=tokens)
            for n in range(1, config.workload.steps + 1)
        ]
        events.append(RunEnded(status="ok"))
        if folder is not None:
            folder.mkdir()
            (folder / "config.json").write_text(to_json(config))
            for event in events:
                append(folder / "events.rank0.jsonl", event)
        return ComparedRun(config=config, result=derive(config, events))

    return make


def test_every_run_is_judged_against_the_first_by_tokens(run):
    compared = compare_runs([run(1.0), run(1.95, gbs="8"), run(1.05), run(1.0, gpu_name="other CPU")])
    verdicts = [c["verdict"] for c in compared["comparisons"]]
    assert verdicts == [
        "B is faster, by 2.6 % in tokens/s",
        "C is slower, by 4.8 % in tokens/s",
        "no difference seen in tokens/s",
    ]
    assert compared["differing"]["workload.gbs"] == [4, 8, 4, 4]
    figures = {figure["figure"]: figure for figure in compared["figures"]}
    assert figures["step_time_s"]["ratios"][0] is None, "steps of different batches have no ratio"
    assert figures["step_time_s"]["ratios"][1] == pytest.approx(1.05)
    for name in ("time_per_token_us", "time_per_sample_ms"):
        assert figures[name]["ratios"][0] == pytest.approx(1.95 / 2)
    assert figures["time_per_sample_ms"]["values"][0] == pytest.approx(250, rel=0.01)
    printed = set_text(compared)
    assert "they ran on other hardware: A on 1 x this CPU, D on 1 x other CPU" in printed
    assert "bootstrap over blocks of steps" in printed
    assert (
        printed.index("workload.gbs") < printed.index("time_per_token_us") < printed.index("verdict on B: B is faster")
    )


def test_what_speaks_against_the_baseline_is_said_once(run):
    baseline = run(1.0)
    partial = replace(baseline, result=replace(baseline.result, status="incomplete", reason="20 of 40 steps"))
    printed = set_text(compare_runs([partial, run(1.0), run(1.0)]))
    assert printed.count("A is incomplete: 20 of 40 steps") == 1


def sampled(run, clock, limit=700.0, **reasons):
    """The run with samples of its GPU."""
    telemetry = GpuTelemetry(
        samples=20, gpus=1, power_w={"mean": 650.0}, power_limit_w=limit, sm_clock_mhz={"p50": clock, "p5": clock},
        temperature_c=None, throttled_fraction=0.5, sampling_cpu_fraction=None,
        throttle_reasons={name.replace("_", " "): fraction for name, fraction in reasons.items()},
    )  # fmt: skip
    return replace(run, result=replace(run.result, telemetry=telemetry))


def test_clocks_power_limits_and_throttling_are_reasons_for_doubt(run):
    baseline = sampled(run(1.0), 1980.0)
    slower = set_text(compare_runs([baseline, sampled(run(1.1), 1755.0, limit=500.0)]))
    assert "A ran at 1,980 MHz median, B at 1,755: part of the difference is the clock" in slower
    assert "their power limits differ: A 700 W, B 500 W" in slower
    faster = set_text(compare_runs([baseline, sampled(run(0.9), 1755.0)]))
    assert "B at 1,755: at equal clocks the difference would be larger" in faster
    hot = sampled(run(1.0), 1965.0, power_cap=0.9, hardware_thermal_slowdown=0.35, power_brake=0.01)
    text = set_text(compare_runs([baseline, hot]))
    assert "B was throttled: hardware thermal slowdown in 35 % of samples" in text
    assert "sm_clock_mhz (p50)" in text
    assert not any(word in text for word in ("MHz median", "power limits", "power cap", "power brake"))


def test_other_power_is_a_reason_for_doubt(run):
    runs = [run(1.0), run(1.0)]
    watts = [replace(r, result=replace(r.result, mean_power_w=w)) for r, w in zip(runs, (690.0, 500.0), strict=True)]
    assert "their GPUs drew different power: A 690 W, B 500 W" in set_text(compare_runs(watts))


def test_csv_has_a_row_per_run_and_figure_with_intervals(run):
    rows = list(csv.DictReader(StringIO(set_csv(compare_runs([run(1.0), run(0.5)])))))
    speed = next(row for row in rows if (row["run"], row["figure"]) == ("B", "tokens_per_s"))
    assert float(speed["ratio"]) == pytest.approx(2.0)
    assert float(speed["ratio_low"]) < 2.0 < float(speed["ratio_high"])
    assert {row["run"] for row in rows} == {"A", "B"}


def test_markdown_begins_with_the_verdict_and_has_tables(run):
    lines = set_markdown(compare_runs([run(1.0), run(0.5), run(1.0)])).splitlines()
    assert lines[0] == "- B against A: **B is faster, by 100.0 % in tokens/s**"
    header = next(line for line in lines if line.startswith("| figure |"))
    assert header == "| figure | A | B | C | B/A | C/A |"
    assert all(line.count("|") == header.count("|") for line in lines if line.startswith("| tokens_per_s"))


def test_repeats_add_the_noise_between_runs_to_the_interval(llmb_run, run, tmp_path):
    """Runs of one configuration differ by 4 %, their steps by 0.2 %: 3 % is no difference."""
    for name, seconds in zip("abcdef", (1.0, 1.04, 0.96, 0.97, 1.01, 0.93), strict=True):
        run(seconds, folder=tmp_path / name)
    assert "B is faster, by 3.1 %" in llmb_run("compare", tmp_path / "a", tmp_path / "d")[1]
    sides = [",".join(str(tmp_path / name) for name in names) for names in ("abc", "def")]
    out = llmb_run("compare", *sides)[1]
    assert "verdict: no difference seen in tokens/s" in out
    assert "(mean of 3 runs)" in out
    assert "Student's distribution over repeats" in out
    run(1.0, folder=tmp_path / "g", gbs="8")
    code, _, error = llmb_run("compare", sides[0], f"{tmp_path / 'd'},{tmp_path / 'g'}")
    assert (code, "not repeats of one configuration: workload.ga is" in error) == (1, True)


def test_labels_go_on_after_z_and_one_run_is_refused(run):
    assert run_labels(28)[24:] == ["Y", "Z", "AA", "AB"]
    with pytest.raises(ConfigError, match="two runs or more"):
        compare_runs([run(1.0)])


def test_the_command_prints_each_format(llmb_run, run, tmp_path):
    for name, seconds in (("a", 1.0), ("b", 0.9), ("c", 1.1)):
        run(seconds, folder=tmp_path / name)
    folders = [tmp_path / name for name in "abc"]
    assert "verdict: B is faster" in llmb_run("compare", *folders[:2])[1]
    assert json.loads(llmb_run("compare", *folders[:2], "--json")[1])["verdict"].startswith("B is faster")
    assert len(json.loads(llmb_run("compare", *folders, "--json")[1])["comparisons"]) == 2
    assert llmb_run("compare", *folders, "--csv")[1].startswith("run,name,status,figure")
    assert llmb_run("compare", *folders, "--markdown")[1].startswith("- B against A: **B is faster")
    code, _, error = llmb_run("compare", *folders, "--csv", "--json")
    assert (code, error.count("\n")) == (1, 1)
