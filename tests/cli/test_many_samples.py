"""A run with very many steps or requests is derived, shown, compared and drawn in bounded time and memory."""

import json
import os

import pytest
from many_samples import TOKENS, cost_of, sample_costs, write_run

from llmb.cli.stored_runs import load_events, load_requests, write_result
from llmb.launch.run_folder import RunFolder
from llmb.results.request_file import read_request_times

MOST_CPU_S, MOST_GIB = 30.0, 1.0


def _written(path, text):
    path.write_text(text)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["steps", "requests"])
def test_a_million_samples_take_half_a_minute_and_a_gibibyte(tmp_path, recipes, kind):
    costs = sample_costs(tmp_path, recipes, kind, 1_000_000)
    assert {command: cost.code for command, cost in costs.items()} == dict.fromkeys(costs, 0)
    over = {name: cost for name, cost in costs.items() if cost.cpu_s > MOST_CPU_S or cost.peak_gib > MOST_GIB}
    assert not over, over
    assert (tmp_path / "page.html").stat().st_size < 8_000_000


def test_the_memory_of_a_command_is_not_that_of_the_process_that_measures_it():
    resident = bytearray(os.urandom(1) * (256 << 20))
    small = cost_of("-c", "raise SystemExit(3)")
    assert (small.code, len(resident)) == (3, 256 << 20)
    assert small.peak_gib < 0.1


@pytest.mark.parametrize("kind", ["steps", "requests"])
def test_twenty_thousand_samples_are_compared(tmp_path, recipes, llmb_run, kind):
    folder = write_run(tmp_path / "run", recipes, kind, 20_000, 1)
    result = write_result(run := RunFolder.open(folder), run.read_config())
    assert (result.requests if kind == "requests" else result.steps_done) == 20_000
    code, out, _ = llmb_run("compare", str(folder), str(folder))  # writing a second run would take longer
    assert code == 0
    assert "no difference seen in" in out


def test_requests_are_read_without_the_times_of_tokens(tmp_path, recipes):
    run = RunFolder.open(write_run(tmp_path / "run", recipes, "requests", 50, 1))
    config = run.read_config()
    kinds = {"warmup": True, "error": "timeout", "arrival": "7", "end": None, "request": 9}  # only the last counts
    line = {"event": "RequestDone", "arrival": 0.0, "end": 1.0, "input_tokens": 1, "output_tokens": 1}
    damaged = "".join(json.dumps(line | {name: value}) + "\n" for name, value in kinds.items())
    assert [r.end for r in read_request_times([_written(tmp_path / "damaged", damaged + '[1]\n{"RequestDone"')])] == [
        1.0
    ]
    slim = load_requests(run, config)
    whole = [event for event in load_events(run, config) if hasattr(event, "token_times")]
    assert [(r.arrival, r.first_token, r.end, r.output_tokens) for r in slim] == [
        (r.arrival, r.first_token, r.end, r.output_tokens) for r in whole
    ]
    assert {len(r.token_times) for r in slim} == {0}
    assert {len(r.token_times) for r in whole} == {TOKENS}
