"""Table of jobs: columns, narrow terminals, filters, JSON, times."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmb.cli.jobs.job_table import elapsed_s, shorten, table, waited_s
from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, StepDone
from llmb.report.terminal.clock_time import format_duration
from llmb.results.derive import derive
from llmb.results.job_store import Store
from llmb.results.run_settings import run_settings


@pytest.fixture
def store(tmp_path, recipes):
    """Store with one successful local run and one failed Slurm job, none active."""
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    steps = [StepDone(step=n, seconds=2.0, tokens=1000) for n in range(1, config.workload.steps + 1)]
    with Store(tmp_path / "llmb" / ".llmb" / "jobs.sqlite3") as store:
        store.finish(store.add(config, Path("/a")), derive(config, [*steps, RunEnded(status="ok")]))
        temporary = store.add(replace(config, target="other"), Path("/b"), launcher="slurm", status="submitting")
        times = {"submitted_at": 1000.0, "started_at": 1060.0, "ended_at": 4783.0}
        result = derive(config, [RunEnded(status="failed", reason="node n2 failed")])
        job = store.submitted(temporary, "4711")
        store.finish(job, result, slurm_state="NODE_FAIL", nodes="n[1-2]", **times)
        yield store


def test_table_has_every_column_that_has_a_value(store):
    lines = table(store.jobs()).splitlines()
    assert lines[0].split("  ")[0] == "job"
    for title in ("Slurm state", "nodes", "waited", "elapsed", "s/step", "tokens/s/gpu"):
        assert title in lines[0]
    assert "MFU %" not in lines[0]
    assert "TTFT" not in lines[0]
    assert lines[2].split()[:5] == ["L1", "pretrain_llama3.1", "8b", "fp32", "x1*"]
    for word in ("4711", "other", "failed", "NODE_FAIL", "n[1-2]", "0:01:00", "1:02:03"):
        assert word in lines[3]
    assert lines[-1].startswith("* a proxy")
    assert "nodes" not in table(store.jobs(launcher="local"))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_narrow_terminal_drops_columns_not_lines(store, width):
    lines = table(store.jobs(), width).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= width
    assert "status" in lines[0]


@pytest.fixture
def serving_jobs(tmp_path, recipes):
    """Four finished serving runs of one workload, which differ in use case and batch size."""
    recipe = recipes["inference_deepseek-r1"]
    with Store(tmp_path / "jobs.sqlite3") as store:
        for use_case, batch in (("chat", 8), ("chat", 4), ("generation", 8), ("reasoning", 8)):
            settings = [Setting(field="use_case", value=use_case, source="environment USE_CASE")]
            settings.append(Setting(field="max_batch_size", value=batch, source="--set"))
            request = RunRequest(size="671b", dtype="fp8", gpus=1, proxy="small", settings=tuple(settings))
            config = resolve(recipe, request)
            job = store.add(config, Path(f"/{use_case}{batch}"))
            latencies = {"ttft_ms": {"mean": 7541.9}, "tpot_ms": {"mean": 21.5}}
            figures = {"status": "ok", "output_tokens_per_s": 123456.0, **latencies}
            store.finish(job, replace(derive(config, [RunEnded(status="ok")]), **figures))
        yield store.jobs()


@pytest.mark.parametrize("width", [90, 100, None])
def test_serving_runs_show_speed_and_what_tells_them_apart(serving_jobs, width):
    lines = table(serving_jobs, width).splitlines()
    assert lines[0].split()[-6:] == ["out", "tok/s", "TTFT", "ms", "TPOT", "ms"]
    assert all(line.split()[-3:] == ["123,456", "7,542", "21.5"] for line in lines[2:6])
    assert len({line.partition(" ")[2] for line in lines[2:6]}) == 4
    assert "s/step" not in lines[0]
    assert max(map(len, lines)) <= (width or 1000)


def test_settings_name_what_the_user_chose_and_nothing_that_follows_from_it(serving_jobs):
    assert serving_jobs[1].settings == "chat 32/32 max_throughput max_batch_size=4"
    assert shorten(["gbs=4", "steps=20"], 8) == "gbs=4..."
    assert shorten(["gbs=4", "steps=20"], 9) == "gbs=4 ..."
    assert shorten(["gbs=4", "steps=20"], 14) == "gbs=4 steps=20"


def test_settings_of_training_runs(recipes):
    settings = [
        Setting(field="gbs", value=8, source="--set"),
        Setting(field="data", value="/tmp/a b.bin", source="--set"),
    ]
    settings.append(Setting(field="profile", value=True, source="-p"))
    request = RunRequest(
        size="8b", dtype="fp32", gpus=4, proxy="small", settings=tuple(settings), environment={"NCCL_ALGO": "Ring"}
    )
    words = run_settings(resolve(recipes["pretrain_llama3.1"], request)).split()
    assert [word for word in words if word[:2] not in ("tp", "pp", "cp")] == [
        "profile",
        "gbs=8",
        "data=a_b.bin",
        "NCCL_ALGO=Ring",
    ]


def test_filters_and_json(llmb_run, store):
    assert [json.loads(line)["job_id"] for line in llmb_run("jobs", "--json")[1].splitlines()] == ["L1", "4711"]
    assert "4711" not in llmb_run("jobs", "--on", "local")[1]
    assert "L1 " not in llmb_run("jobs", "--status", "failed,lost")[1]
    assert "L1 " not in llmb_run("jobs", "list", "--workload", "other")[1]
    assert "4711" in llmb_run("jobs", "--since", "1h")[1]
    text = "no run with --since 2999-01-01 is stored; runs in all: 1 ok, 1 failed\n"
    assert llmb_run("jobs", "--since", "2999-01-01")[1] == text
    text = "no run is running or pending; runs in all: 1 ok, 1 failed\n"
    assert llmb_run("jobs", "--status", "running,pending")[1] == text
    assert llmb_run("jobs", "--status", "running", "--watch")[1].strip() == text.replace(" or pending", "").strip()
    assert llmb_run("jobs", "-n", "1", "--json")[1].count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs", "--status", "runing"], "did you mean running?"),
        (["jobs", "--since", "yesterday"], "write 90m, 2h, 3d"),
        (["jobs", "--watch", "--json"], "leave out --json"),
        (["jobs", "cancel"], "which jobs?"),
        (["jobs", "cancel", "L1", "--all"], "not both"),
        (["jobs", "cancel", "L9"], "no job 'L9'"),
        (["jobs", "retry", "L9"], "no job 'L9'"),
    ],
)
def test_invalid_jobs_request_is_one_line(llmb_run, store, arguments, message):
    code, _, err = llmb_run(*arguments)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1


def test_ended_jobs_are_not_cancelled(llmb_run, store):
    code, out, err = llmb_run("jobs", "cancel", "L1", "4711")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["4711: has ended already", "L1: has ended already"]


def test_watch_ends_when_no_job_is_active(llmb_run, store):
    code, out, _ = llmb_run("jobs", "--watch")
    assert code == 0
    assert "4711 other 8b fp32 x1*: failed (node n2 failed)" in out
    assert "Slurm state" in out


def test_waited_and_elapsed_times(store):
    job, now = store.job("4711"), time.time()
    assert (waited_s(job, now), elapsed_s(job, now)) == (60.0, 3723.0)
    pending = replace(job, status="pending", started_at=None, ended_at=None)
    assert (waited_s(pending, 1090.0), elapsed_s(pending, 1090.0)) == (90.0, None)
    assert elapsed_s(replace(job, status="running", ended_at=None), 1070.0) == 10.0
    skewed = replace(job, launcher="local", created_at=1000.0, updated_at=990.0)
    assert elapsed_s(skewed, 1070.0) == 0.0, "clocks of two machines differ"
    durations = [format_duration(s) for s in (None, 7.9, 65, 3600, 200000)]
    assert durations == [None, "0:00:07", "0:01:05", "1:00:00", "2-07:33:20"]
