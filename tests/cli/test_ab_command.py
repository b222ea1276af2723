"""llmb-run ab: what the two sides are, runs in turns, the verdict; with simulated runs, and once for real."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmb.cli import submit
from llmb.config.serialization import to_json
from llmb.events import RunEnded, StepDone
from llmb.results.derive import derive

ROOT = Path(__file__).parent.parent.parent
SHAPE = "layers=1 hidden=32 ffn=32 heads=2 kv_heads=1 head_dim=16 vocab=64"
TINY = " ".join(f"--set model.{setting}" for setting in SHAPE.split())
PROXY = f"-w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy {TINY} --seqlen 32 --set steps=12 --set window=3-12"


@pytest.fixture
def simulated_runs(monkeypatch):
    """Replaces real runs: gbs 8 costs 1.9 times as much as gbs 4, a variable SLOW 2 % more; returns the calls."""
    calls, chance = [], random.Random(3)

    def run_one(config, environment, as_json, location, python, **lineage):
        calls.append((config.workload.gbs, environment, python))
        seconds = {4: 1.0, 8: 1.9}[config.workload.gbs] * (1.02 if "SLOW" in environment else 1.0)
        seconds *= 1 + 0.003 * chance.gauss(0, 1)
        tokens = config.workload.gbs * config.workload.seqlen
        events = [StepDone(step=n, seconds=seconds, tokens=tokens) for n in range(1, config.workload.steps + 1)]
        status = "failed" if "FAIL" in environment else "ok"
        print("what a run prints")
        return 0, False, derive(config, [*events, RunEnded(status=status, reason="out of luck")])

    monkeypatch.setattr(submit, "run_one", run_one)
    return calls


def test_a_faster_configuration_is_found_by_tokens(llmb_run, simulated_runs):
    code, out, _ = llmb_run("ab", PROXY, f"{PROXY} --set gbs=8", "--repeats", "10")
    assert code == 0
    assert "verdict: B is faster, by 5." in out
    assert "workload.gbs: A 4, B 8" in out
    assert "what a run prints" not in out
    batches = [gbs for gbs, _, _ in simulated_runs]
    assert batches[:16] == [4] * 8 + [4, 8, 8, 4] * 2
    assert len(batches) < 28, "it ends early"


def test_environments_are_compared_and_equal_ones_do_not_differ(llmb_run, simulated_runs):
    out = llmb_run("ab", PROXY, PROXY, "--env-b", "SLOW=1")[1]
    assert re.search(r"B is slower, by (1\.[89]|2\.[0-2])", out)
    assert "_proxy (SLOW=1)" in out
    assert {environment.get("SLOW") for _, environment, _ in simulated_runs} == {None, "1"}
    output = json.loads(llmb_run("ab", PROXY, PROXY, "--json")[1])
    assert output["verdict"].startswith("no difference larger than 0.")
    assert output["outcome"] in ("same", "undecided")
    assert len(output["times_a"]) == output["looks"][-1]["pairs"]


def test_sides_come_from_files_with_their_own_interpreter_and_checkout(llmb_run, simulated_runs, tmp_path):
    from llmb.cli.compare.ab_sides import side_of

    file = tmp_path / "config.json"
    file.write_text(to_json(side_of(PROXY, [], None, None).config))
    code, _, _ = llmb_run("ab", file, file, "--checkout-b", ROOT, "--python-b", sys.executable)
    assert code == 0
    assert "PYTHONPATH" not in simulated_runs[0][1]
    assert simulated_runs[9][1:] == ({"PYTHONPATH": str(ROOT)}, sys.executable)


def test_ranks_of_another_checkout_do_not_import_this_one(recipes, tmp_path):
    from llmb.cli.compare.ab_sides import side_of
    from llmb.launch.command import engine_environment

    (tmp_path / "llmb").mkdir()
    (tmp_path / "llmb" / "__init__.py").write_text('print("the other one")')
    side = side_of(PROXY, [], None, tmp_path)
    settings = engine_environment(side.config, {}, side.environment)
    printed = subprocess.check_output([sys.executable, "-c", "import llmb"], env=settings, cwd=tmp_path, text=True)
    assert printed.strip() == "the other one"
    assert str(ROOT) in engine_environment(side.config, {}, {"PYTHONPATH": str(tmp_path / "empty")})["PYTHONPATH"]


def test_a_failed_run_ends_the_test(llmb_run, simulated_runs):
    code, _, err = llmb_run("ab", PROXY, PROXY, "--env-b", "FAIL=1")
    assert code == 2
    assert "ERROR: run 10 (B) is failed: out of luck" in err


def test_a_dry_run_says_how_many_runs_and_starts_none(llmb_run, simulated_runs):
    code, out, _ = llmb_run("ab", PROXY, PROXY, "--dry-run")
    assert (code, simulated_runs) == (0, [])
    assert "with looks after 4, 6, 8, 10 pairs: 16 to 28 runs\n" in out
    out = llmb_run("ab", PROXY, PROXY, "--dry-run", "--repeats", "4")[1]
    assert "with looks after 4 pairs: 16 runs\n" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PROXY, PROXY, "--repeats", "3"], "--repeats: expected 4 to 200 pairs of runs, got 3"),
        ([PROXY, PROXY.replace("--dtype fp32", "")], "selects 3 runs; name one size, dtype and scale"),
        ([PROXY, "L9"], "no job 'L9'"),
        ([PROXY, f"{PROXY} --set"], "expected one argument"),
        ([PROXY, PROXY, "--checkout-a", "/"], "/ is no checkout of llmb"),
        ([PROXY, PROXY, "--python-b", "/no/python"], "/no/python is no Python interpreter"),
        ([PROXY, PROXY, "--env-a", "x"], "expected NAME=VALUE, got 'x'"),
    ],
)
def test_wrong_requests_are_one_line(llmb_run, simulated_runs, arguments, message):
    code, _, err = llmb_run("ab", *arguments)
    assert (code, simulated_runs) == (1, [])
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.nightly
def test_real_runs_on_this_machine(llmb_run):
    """A proxy of sixteen times the layers is slower, whatever else the machine does."""
    code, out, err = llmb_run("ab", PROXY, PROXY.replace("layers=1", "layers=16"), "--repeats", "6")
    assert code == 0, err
    assert "verdict: B is slower" in out
