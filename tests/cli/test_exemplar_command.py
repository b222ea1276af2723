"""llmb-run exemplar: suites, pass and fail, junit and json, runs that are done, what is refused."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from llmb.cli import submit
from llmb.config.serialization import to_json
from llmb.events import RequestDone, RunEnded, StepDone, append
from llmb.results.derive import derive

ROOT = Path(__file__).parent.parent.parent
SUITES = sorted((ROOT / "examples" / "suites").glob("*.yaml"))
PROXY = "-w pretrain_llama3.1 -s 8b --dtype fp32 --proxy"


def events_of(config, status="ok"):
    """1000 tokens/s, or a request per second."""
    work = config.workload
    if work.kind == "inference":
        done = [
            RequestDone(request=n, arrival=n, first_token=n + 0.5, end=n + 1.0, input_tokens=8, output_tokens=work.osl)
            for n in range(work.num_requests)
        ]
        return [*done, RunEnded(status=status)]
    tokens = work.gbs * work.seqlen
    steps = [StepDone(step=n, seconds=tokens / 1000, tokens=tokens, loss=5.0) for n in range(1, work.steps + 1)]
    return [*steps, RunEnded(status=status, reason=None if status == "ok" else "out of luck")]


@pytest.fixture
def simulated_runs(monkeypatch):
    """Replaces real runs; those with gbs 8 fail. Returns the configurations that ran."""
    configs = []

    def run_one(config, environment, as_json, location, python, **lineage):
        configs.append(config)
        failed = getattr(config.workload, "gbs", None) == 8
        return 0, False, derive(config, events_of(config, "failed" if failed else "ok"))

    monkeypatch.setattr(submit, "run_one", run_one)
    return configs


@pytest.fixture
def suite(tmp_path):
    def write(*rows, **fields):
        file = tmp_path / "suite.yaml"
        file.write_text(yaml.safe_dump({"suite": "mine", "scale": 1, "rows": list(rows), **fields}))
        return file

    return write


def row(minimum=None, maximum=None, figure="tokens_per_s", options="", **fields):
    limits = {key: value for key, value in (("min", minimum), ("max", maximum)) if value is not None}
    return {"submit": f"{PROXY} {options}", "thresholds": {figure: limits}, **fields}


def test_rows_pass_or_fail_by_their_thresholds(llmb_run, suite, simulated_runs, tmp_path):
    file = suite(
        row(900, name="fast enough"),
        row(1100, name="too slow"),
        row(1, options="--set gbs=8", name="broken"),
        row(0.9, figure="predicted", name="not predicted"),
        row(None, 4.2, figure="step_time_s.median", options="--set gbs=16", name="median"),
    )
    junit = tmp_path / "report.xml"
    code, out, _ = llmb_run("exemplar", file, "--junit", junit)
    assert code == 1
    assert "too slow" in out
    assert "tokens_per_s 1,000, at least 1,100" in out
    assert "failed: out of luck" in out
    assert "predicted is unknown, at least 0.9" in out
    assert "mine: 2 of 5 rows pass" in out
    assert len(simulated_runs) == 5
    cases = ElementTree.parse(junit).findall("./testsuite/testcase")
    assert [case.find("failure") is None for case in cases] == [True, False, False, False, True]
    assert ElementTree.parse(junit).find("./testsuite").get("failures") == "3"


def test_all_rows_pass_with_exit_code_0_and_json(llmb_run, suite, simulated_runs):
    code, out, _ = llmb_run("exemplar", suite(row(900)), "--json")
    output = json.loads(out)
    assert (code, output["passed"]) == (0, True)
    assert output["rows"][0]["checks"] == [
        {"figure": "tokens_per_s", "measured": pytest.approx(1000), "min": 900.0, "max": None, "holds": True}
    ]


def test_a_dry_run_shows_cost_and_starts_nothing(llmb_run, suite, simulated_runs):
    code, out, _ = llmb_run("exemplar", suite(row(900), row(900, options="--set gbs=8")), "--dry-run")
    assert (code, simulated_runs) == (0, [])
    assert "2 jobs, 2 ranks on CPUs in all" in out
    assert "tokens_per_s >= 900" in out


def test_runs_that_are_done_are_judged_by_name(llmb_run, suite, simulated_runs, tmp_path):
    from llmb.cli.compare.ab_sides import side_of

    config, folder = side_of(f"{PROXY} --scale 1", [], None, None).config, tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(to_json(config))
    for event in events_of(config):
        append(folder / "events.rank0.jsonl", event)
    code, out, _ = llmb_run("exemplar", suite(row(900), row(900, options="--set gbs=8")), "--runs", folder)
    assert (code, simulated_runs) == (1, [])
    assert "mine: 1 of 2 rows pass" in out
    assert "no run of this configuration" in out


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([row(1, figure="tokens")], {}, "unknown threshold in"),
        ([row()], {}, "tokens_per_s: give min or max"),
        ([{"submit": PROXY}], {}, "row 1: no thresholds"),
        ([], {}, "at least one row"),
        ([row(1, typo=2)], {}, "unknown field"),
        ([row(0.9, figure="reference")], {}, "needs a published result, a proxy has none"),
        ([row(1, options="--dtype fp9")], {}, "fp9"),
        ([row(1)], {"scales": 8}, "unknown field"),
    ],
)
def test_wrong_suites_are_refused_before_anything_runs(llmb_run, suite, simulated_runs, rows, fields, message):
    code, _, err = llmb_run("exemplar", suite(*rows, **fields))
    assert (code, simulated_runs) == (1, [])
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("file", SUITES, ids=lambda file: file.stem)
def test_shipped_suites_resolve(llmb_run, file):
    code, out, err = llmb_run("exemplar", file, "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith(yaml.safe_load(file.read_text())["suite"])


def test_the_suite_of_proxies_runs_training_and_serving(llmb_run, simulated_runs):
    file = next(file for file in SUITES if file.stem == "cpu_proxies")
    code, out, _ = llmb_run("exemplar", file)
    assert code == 0, out
    assert {config.workload.kind for config in simulated_runs} == {"training", "inference"}


@pytest.mark.nightly
def test_the_suite_of_proxies_passes_for_real(llmb_run):
    file = next(file for file in SUITES if file.stem == "cpu_proxies")
    code, out, err = llmb_run("exemplar", file)
    assert code == 0, out + err
