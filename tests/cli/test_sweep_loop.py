"""The sweep loop on a scripted server: every point once, tiers, repeats, and the same result after a kill anywhere."""

import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.cli.sweep.sweep_loop import Measurement, run_sweep
from llmb.config.serialization import build, read_json, to_json
from llmb.errors import ConfigError
from llmb.loadgen.sweep.sweep_folder import SweepFolder, read_plan
from llmb.loadgen.sweep.sweep_plan import SweepPlan
from llmb.results.result import Result
from llmb.results.sweep.sweep_result import SweepResult


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


class ScriptedServer:
    """Saturates at 64 requests at once; TTFT grows with the load, a little with the repeat."""

    def __init__(self, lives=None, late_at=()):
        self.measured, self.lives, self.late_at = [], lives, late_at

    def prepare(self, key):
        pass

    def measure(self, key, load, folder):
        (folder / "events.rank0.jsonl").write_text("{}\n")
        if self.lives is not None and len(self.measured) >= self.lives:
            raise Killed
        self.measured.append((key, load))
        users = key.load * (1.2 if "fast" in key.variant else 1.0)
        rate = 1000 * users / (users + 64) * (1 + 0.01 * key.repeat)
        ttft = 10.0 * users + key.repeat
        latencies = {
            "ttft_ms": {"mean": ttft, "p50": ttft, "p99": 2 * ttft},
            "tpot_ms": {"p99": 1000 * key.load / rate},
        }
        result = Result(
            name=key.name, status="ok", requests=load.requests, requests_failed=0, request_throughput=rate / 100,
            output_tokens_per_s=rate, output_tokens_per_s_per_gpu=rate, output_tokens_per_s_per_user=rate / key.load,
            **latencies, e2e_ms={"p50": 100 * 1000 * key.load / rate},
        )  # fmt: skip
        return Measurement(result=result, client_refusal="late by 9 ms" if key.load in self.late_at else None)


def plan(**changes):
    fields = {"name": "s", "mode": "url", "load_kind": "concurrency", "ladder": (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    return SweepPlan(**{**fields, "gpus": 1, **changes})


@pytest.fixture
def folder(tmp_path):
    return lambda plan: SweepFolder.create(tmp_path, "s", plan, datetime(2026, 1, 2, 3, 4, 5))


def test_a_ladder_is_measured_once_and_reported(folder):
    server, ladder = ScriptedServer(), plan()
    sweep = folder(ladder)
    result = run_sweep(ladder, sweep, server)
    assert [key.load for key, _ in server.measured] == list(ladder.ladder)
    assert [row.load for row in result.rows] == list(ladder.ladder)
    assert result.finished
    assert len(result.pareto) == 9
    assert build(SweepResult, read_json(sweep.result)) == result
    assert len(sweep.csv.read_text().splitlines()) == 10
    assert sweep.svg.read_text().startswith("<svg")
    assert all((sweep.path / point["folder"] / "events.rank0.jsonl").exists() for point in sweep.read_points())
    assert build(SweepPlan, read_json(sweep.plan)) == ladder


def test_points_last_long_enough_and_fill_the_server(folder):
    """Ten seconds at the rate of the load before it, or two requests per user where that is more."""
    server = ScriptedServer()
    run_sweep(plan(point_s=100.0, ramp=0.5), folder(plan()), server)
    requests = {key.load: load.requests for key, load in server.measured}
    assert server.measured[0][1].for_s == 100.0  # nothing is known yet
    assert requests[1] == 4
    assert requests[2] == round(100 * 1.01 * 1000 / 65 / 100 * 1.25 + 0.5)
    assert requests[256] >= 512
    ramps = {key.load: load.ramp_s for key, load in server.measured}
    assert ramps[1] == 0
    assert ramps[128] == pytest.approx(0.5 * 100 * 64 / (1010 * 64 / 128), abs=0.01)  # half of the E2E at 64


@given(st.integers(0, 25), st.integers(1, 3), st.booleans())
@settings(deadline=None, max_examples=4)
def test_a_sweep_killed_anywhere_gives_the_same_result(kill_after, repeats, search):
    tiers = {"tight": "ttft=400ms", "loose": "ttft.p50=900ms,tpot=400ms"} if search else {}
    spec = plan(repeats=repeats, search=search, tiers=tiers, variants=("", "fast=1"))
    with TemporaryDirectory() as root:
        whole = SweepFolder.create(Path(root), "whole", spec, datetime(2026, 1, 1))
        killed = SweepFolder.create(Path(root), "killed", spec, datetime(2026, 1, 1))
        server = ScriptedServer()
        expected = run_sweep(spec, whole, server)
        first, second = ScriptedServer(lives=kill_after), ScriptedServer()
        try:
            run_sweep(spec, killed, first)
        except Killed:
            with killed.points.open("ab") as points:
                points.write(b'{"key": {"load_ki')  # a line that the kill cut short
        resumed = run_sweep(spec, killed, second)
        assert [key for key, _ in first.measured + second.measured] == [key for key, _ in server.measured]
        assert len({key for key, _ in server.measured}) == len(server.measured)
        without_times = [replace(r, wall_s=0.0, rows=tuple(replace(row, wall_s=0.0) for row in r.rows))
                         for r in (expected, resumed)]  # fmt: skip
        assert without_times[0] == without_times[1]


def test_a_search_finds_the_highest_load_of_every_tier(folder):
    """p99 is 20 x load + 2: 400 ms holds up to 19; p50 is 10 x load + 1: 900 ms up to 89."""
    server = ScriptedServer()
    search = plan(search=True, tiers={"tight": "ttft=400ms", "loose": "ttft.p50=900ms"}, ladder=(1, 1024))
    result = run_sweep(search, folder(search), server)
    answers = {answer.tier: answer for answer in result.tiers}
    assert (answers["tight"].load, answers["tight"].fails_at) == (19, 20)
    assert (answers["loose"].load, answers["loose"].fails_at) == (89, 90)
    assert answers["tight"].broken == ("ttft p99 402 ms > 400 ms",)
    loads = [key.load for key, _ in server.measured]
    assert len(loads) == len(set(loads)) <= search.most_points


def test_an_unreachable_tier_has_no_answer_and_an_easy_one_the_highest_load(folder):
    search = plan(search=True, tiers={"none": "ttft=1ms", "all": "ttft=1000s"}, ladder=(1, 64))
    none, everything = run_sweep(search, folder(search), ScriptedServer()).tiers
    assert (none.load, none.fails_at) == (None, 1)
    assert (everything.load, everything.fails_at) == (64, None)


def test_a_point_whose_client_was_late_is_marked_and_not_used(folder):
    ladder = plan()
    result = run_sweep(ladder, folder(ladder), ScriptedServer(late_at=(256,)))
    assert result.rows[-1].excluded == "client: late by 9 ms"
    assert 8 not in result.pareto
    assert result.knee != 8


def test_a_search_measures_a_point_again_whose_client_was_late(folder):
    server = ScriptedServer(late_at=(2,))
    search = plan(search=True, tiers={"loose": "ttft=900ms"}, ladder=(1, 8))
    (answer,) = run_sweep(search, folder(search), server).tiers
    assert [key.load for key, _ in server.measured] == [1, 2, 2]
    assert (answer.load, answer.fails_at, answer.broken) == (1, 2, ("client: late by 9 ms",))


def test_repeats_state_the_noise(folder):
    ladder = plan(repeats=3, ladder=(1, 2))
    row = run_sweep(ladder, folder(ladder), ScriptedServer()).rows[0]
    assert row.repeats == 3
    assert row.noise.n == 3
    assert row.output_tokens_per_s == pytest.approx(1000 / 65 * 1.02)  # the median
    assert row.noise.low < row.output_tokens_per_s < row.noise.high


def test_an_unfinished_point_is_set_aside_not_overwritten(folder):
    ladder = plan(ladder=(1,))
    sweep = folder(ladder)
    with pytest.raises(Killed):
        run_sweep(ladder, sweep, ScriptedServer(lives=0))
    run_sweep(ladder, sweep, ScriptedServer())
    assert sorted(path.name for path in (sweep.path / "points").iterdir()) == [
        "concurrency1_r1",
        "concurrency1_r1.unfinished1",
    ]


def test_a_sweep_is_opened_by_name_or_path_and_runs_once(folder, tmp_path):
    sweep = folder(plan())
    assert SweepFolder.open(tmp_path, sweep.path.name).path == sweep.path
    assert SweepFolder.open(tmp_path, str(sweep.path)).path == sweep.path
    with pytest.raises(ConfigError, match=f"no sweep 'x'; the newest are: {sweep.path.name}"):
        SweepFolder.open(tmp_path, "x")
    with sweep.locked(), pytest.raises(ConfigError, match="is running in another process"), sweep.locked():
        pass


def test_a_damaged_line_is_named(folder):
    sweep = folder(plan())
    for line in ("no json", "[" * 100_000, "\\ud800 \\ud800"):
        sweep.points.write_text(line + "\n" + to_json({"key": 1}) + "\n")
        with pytest.raises(ConfigError, match=r"points\.jsonl: a line is no JSON"):
            sweep.read_points()
    os.truncate(sweep.points, 2**41)
    with pytest.raises(ConfigError, match="bytes are more than"):
        sweep.read_points()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"configs": {}}, "load is missing"), ({"mode": "in_process"}, "run is missing"), ({"ladder": []}, "a ladder")],
)
def test_a_damaged_plan_is_named(folder, change, message):
    sweep = folder(plan())
    data = json.loads(to_json(plan())) | {"mode": "url", "configs": {"": {"load": {"isl": 1}}}} | change
    sweep.plan.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        read_plan(sweep)
