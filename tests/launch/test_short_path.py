"""Short paths of run folders: runs/<job>-<what>, links to the long paths of the recipe documents."""

from dataclasses import replace
from datetime import datetime

import pytest

from llmb.launch.run_files.short_path import short_paths
from llmb.launch.run_folder import RunFolder

NOON = datetime(2026, 1, 2, 12, 0, 0)


@pytest.fixture
def new_run(tmp_path, config):
    """Creates the folder of a changed configuration, with the record of a job id."""

    def create(job_id, **changes):
        changed = replace(config, target="pretrain_llama3.1", size="8b", **changes)
        run = RunFolder.create(tmp_path, changed, NOON)
        run.write_record(changed, job_id)
        return run

    return create


@pytest.mark.parametrize(
    ("job_id", "gpus", "changes", "name"),
    [
        ("L12", 1, {"proxy": None}, "L12-llama3.1-8b-bf16"),
        ("L3", 1, {"proxy": "4 of 32 layers"}, "L3-llama3.1-8b-bf16-proxy"),
        ("4711-2", 128, {"proxy": None}, "4711-2-llama3.1-8b-bf16-gpus128"),
        ("L1@eos", 1, {"proxy": None}, "L1@eos-llama3.1-8b-bf16"),
    ],
)
def test_names(new_run, config, job_id, gpus, changes, name):
    run = new_run(job_id.partition("-")[0].partition("@")[0], machine=replace(config.machine, gpus=gpus), **changes)
    assert run.short_path == run.path
    run.add_short_path(job_id)
    assert run.short_path == short_paths(run.install) / name
    assert run.short_path_of(run.report_page) == short_paths(run.install) / name / "report.html"


def test_both_paths_open_the_same_folder(new_run):
    run = new_run("L1")
    run.add_short_path("L1")
    assert RunFolder.open(run.short_path) == RunFolder.open(run.path) == run
    log = run.short_path / run.log.name
    log.touch()
    assert RunFolder.of_log(log) == run
    assert list(RunFolder.find_all(run.install)) == [run], "a link is no second run"


def test_links_survive_a_moved_installation(new_run, tmp_path):
    run = new_run("L1")
    run.add_short_path("L1")
    moved = tmp_path.with_name("moved")
    tmp_path.rename(moved)
    short = moved / run.short_path.relative_to(tmp_path)
    assert RunFolder.open(short).path == moved / run.path.relative_to(tmp_path)


def test_an_id_given_again_links_the_newer_run(new_run):
    first, second = new_run("L1"), new_run("L1")
    first.add_short_path("L1")
    second.add_short_path("L1")
    assert (first.short_path, second.short_path) == (first.path, short_paths(first.install) / "L1-llama3.1-8b-bf16")


def test_a_run_without_links_shows_its_long_path(new_run):
    run = new_run("L1")
    short_paths(run.install).touch()  # where links cannot be made
    run.add_short_path("L1")
    assert run.short_path == run.path
