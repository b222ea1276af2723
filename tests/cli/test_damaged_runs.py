"""One damaged run folder never stops a command over all of them: it is named, listed as damaged, and skipped."""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from llmb.cli.llmb_run import main
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, StepDone, append
from llmb.launch.run_folder import RunFolder, store_path


@pytest.fixture
def runs(tmp_path, monkeypatch, recipes):
    """Three ended runs, of which the second is damaged by each test."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    folders = [RunFolder.create(tmp_path, config, datetime(2026, 1, day)) for day in (1, 2, 3)]
    for number, run in enumerate(folders, 1):
        for step in range(1, config.workload.steps + 1):
            append(run.events(0), StepDone(step=step, seconds=0.5, tokens=4096, loss=2.0))
        append(run.events(0), RunEnded(status="ok"))
        run.write_record(config, f"L{number}")
    return folders


def wrong_type(run):
    with run.events(0).open("a") as events:
        events.write('{"event": "StepDone", "step": "7"}\n')


def deep_nesting(run):
    with run.events(0).open("a") as events:
        events.write("[" * 100_000 + "\n")


def superscript_restart(run):
    (run.path / "restart-²").mkdir()


def superscript_rank(run):
    (run.path / "events.rank².jsonl").touch()


def hole_in_events(run):
    with run.events(0).open("a") as events:
        events.truncate(2**41)
    append(run.events(0), RunEnded(status="ok"))


@pytest.mark.parametrize("damage", [wrong_type, deep_nesting, superscript_restart, superscript_rank, hole_in_events])
def test_damage_that_leaves_the_run_readable(runs, damage, capsys):
    damage(runs[1])
    assert main(["jobs", "rebuild"]) == 0
    assert capsys.readouterr().out == "3 runs found\n"
    assert main(["jobs", "--json"]) == 0
    assert [json.loads(line)["status"] for line in capsys.readouterr().out.splitlines()] == ["ok"] * 3


def fifo_events(run):
    run.events(0).unlink()
    os.mkfifo(run.events(0))


def folder_as_events(run):
    run.events(0).unlink()
    run.events(0).mkdir()


def listed_config(run):
    run.config.write_text("[]")


def nested_config(run):
    run.config.write_text("[" * 100_000)


def wrong_result(run):
    run.result.write_text('{"status": 7}')


def wrong_origin(run):
    run.origin.write_text("{}")


def fifo_config(run):
    run.config.unlink()
    os.mkfifo(run.config)


def lost_config(run):
    run.config.unlink()
    run.config.symlink_to("/nonexistent/config.json")


def deleted_config(run):
    run.config.unlink()


def huge_scale(run):
    run.config.write_text(run.config.read_text().replace('"gpus": 1', f'"gpus": {10**30}'))


def half_a_surrogate_pair(run):
    run.config.write_text(run.config.read_text().replace('"name": "', '"name": "\\ud800', 1))


def hole_in(path):
    """Leave two TiB of nothing in the middle of a file: read, they would take minutes and all memory."""
    content = path.read_bytes() if path.exists() else b"first\nlast\n"
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.seek(2**41, os.SEEK_CUR)
        file.write(content[len(content) // 2 :])


def hole_in_config(run):
    hole_in(run.config)


DAMAGES = [
    *(huge_scale, half_a_surrogate_pair, hole_in_config),
    *(fifo_events, folder_as_events, listed_config, nested_config, wrong_result, wrong_origin),
    *(fifo_config, lost_config, deleted_config),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_named_and_listed_and_the_others_come_back(runs, damage, capsys):
    damage(runs[1])
    assert main(["jobs", "rebuild"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "3 runs found, 1 of them damaged\n"
    assert f"{runs[1].path} is damaged: " in printed.err
    assert "internal error" not in printed.err
    assert main(["jobs", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["run_dir"], row["status"]) for row in rows] == [
        (str(run.path), status) for run, status in zip(runs, ["ok", "damaged", "ok"], strict=True)
    ]
    assert rows[1]["reason"]
    assert main(["jobs", "--status", "damaged"]) == 0
    assert rows[1]["job_id"] in capsys.readouterr().out
    main(["jobs", "show", rows[1]["job_id"]])
    assert "internal error" not in capsys.readouterr().err


def test_reason_is_not_cut_off_behind_a_long_path(tmp_path, monkeypatch, recipes, capsys):
    name = "a long name of a folder" * 6
    install = tmp_path.joinpath(name, name, name[: 400 - len(str(tmp_path / name / name))])  # SQLite opens 511 at most
    monkeypatch.setenv("LLMB_INSTALL", str(install))
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    run = RunFolder.create(install, config, datetime(2026, 1, 1))
    os.mkfifo(run.events(0))
    assert main(["jobs", "rebuild"]) == 0
    assert capsys.readouterr().err.endswith(
        f"{run.path} is damaged: cannot read {run.events(0).name}: it is not a regular file\n"
    )


def test_rebuilding_twice_gives_the_same_table(runs, capsys):
    wrong_result(runs[1])
    tables = []
    for _ in range(2):
        assert main(["jobs", "rebuild"]) == 0
        capsys.readouterr()
        assert main(["jobs", "--json"]) == 0
        tables.append(capsys.readouterr().out)
        store_path(runs[0].install).unlink()
    assert tables[0] == tables[1]


@pytest.mark.parametrize("damage", [fifo_events, wrong_origin, fifo_config, lost_config, deleted_config])
def test_archive_of_everything_leaves_a_damaged_run_out_by_name(runs, damage, capsys, tmp_path):
    damage(runs[1])
    assert main(["archive", "--output", str(tmp_path / "all.tar.zst")]) == 0
    printed = capsys.readouterr()
    assert "2 runs" in printed.out
    assert str(runs[1].path) in printed.err


@pytest.mark.parametrize("name", ["events", "log", "command_line", "result"])
def test_every_command_passes_over_a_hole(runs, name, capsys, tmp_path):
    assert main(["jobs", "rebuild"]) == 0
    run = runs[1]
    path = run.events(0) if name == "events" else getattr(run, name)
    hole_in(path)
    commands = [
        ["jobs", "show", "L2"], ["jobs", "log", "L2"], ["report", "L2", "-o", str(tmp_path / "page.html")],
        ["compare", "L1", "L2"], ["explain", "L2"], ["read", str(run.log)], ["jobs", "rebuild"],
        ["archive", "--output", str(tmp_path / "all.tar.zst")],
    ]  # fmt: skip
    if not run.log.exists():
        run.log.write_text("step 1\n")
    for command in commands:
        assert main(command) in (0, 1, 2)
        printed = capsys.readouterr()
        assert "internal error" not in printed.err, command
        assert len(printed.out) < 100_000
    assert printed.err.count(str(path)) == 1  # the archive says that it is not in it


def test_last_lines_of_a_log_before_a_hole_are_printed(runs, capsys):
    assert main(["jobs", "rebuild"]) == 0
    runs[0].log.write_text("".join(f"line {n}\n" for n in range(1000)))
    with runs[0].log.open("a") as log:
        log.truncate(2**41)
    capsys.readouterr()
    assert main(["jobs", "log", "L1", "--tail", "3"]) == 0
    assert "line 998\nline 999\n" in capsys.readouterr().out


def test_log_that_is_a_fifo_is_not_waited_for(runs, capsys):
    os.mkfifo(runs[0].log)
    assert main(["jobs", "rebuild"]) == 0
    assert main(["jobs", "log", "L1"]) == 1
    assert "it is not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fifo", "no text"])
def test_command_line_that_cannot_be_read_is_left_out_of_the_page(runs, kind, tmp_path):
    if kind == "fifo":
        os.mkfifo(runs[0].command_line)
    else:
        runs[0].command_line.write_bytes(b"llmb-run \xff\xfe\n")
    assert main(["jobs", "rebuild"]) == 0
    assert main(["report", "L1", "-o", str(tmp_path / "page.html")]) == 0


def test_record_that_is_a_fifo_is_not_waited_for(runs, capsys, tmp_path):
    runs[1].record("L2").unlink()
    os.mkfifo(runs[1].record("L2"))
    assert main(["archive", "--output", str(tmp_path / "all.tar.zst")]) == 0
    assert "3 runs" in capsys.readouterr().out


def test_import_beside_a_damaged_run_brings_the_others(runs, capsys, tmp_path, monkeypatch):
    archive = tmp_path / "all.tar.zst"
    assert main(["archive", "--output", str(archive)]) == 0
    for run in runs:
        wrong_origin(run)
    assert main(["import", str(archive)]) == 0
    assert "3 runs imported" in capsys.readouterr().out


def test_active_row_whose_folder_is_damaged_does_not_hide_the_others(runs, capsys):
    assert main(["jobs", "rebuild"]) == 0
    wrong_result(runs[1])
    from llmb.cli.jobs.jobs import open_store

    with open_store() as store:
        store.note("L2", status="running")
    assert main(["jobs", "--json"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["status"] for line in printed.out.splitlines()[1:]] == ["ok", "damaged", "ok"]
    assert str(runs[1].path) in printed.err


@pytest.mark.parametrize("level", range(4), ids=["run", "date", "experiment", "experiments"])
def test_runs_in_a_folder_that_cannot_be_read_are_kept(runs, level, capsys, monkeypatch):
    """Of a run whose folder another user closed, the table knows what it knew."""
    assert main(["jobs", "rebuild"]) == 0
    closed = [runs[1].path, *runs[1].path.parents][level]
    access, glob = os.access, Path.glob

    def hidden(path):
        return closed in Path(path).parents

    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    monkeypatch.setattr(os.path, "lexists", lambda path, lexists=os.path.lexists: not hidden(path) and lexists(path))
    monkeypatch.setattr(Path, "glob", lambda folder, level: (path for path in glob(folder, level) if not hidden(path)))
    capsys.readouterr()
    assert main(["jobs", "rebuild"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "3 runs found\n"
    assert f"cannot read {closed}: {3 if level > 1 else 1} known runs are kept" in printed.err
    assert main(["jobs", "--json"]) == 0
    assert [json.loads(line)["status"] for line in capsys.readouterr().out.splitlines()] == ["ok"] * 3
