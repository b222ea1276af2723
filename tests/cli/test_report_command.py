"""`llmb-run report` and `jobs --html`: where pages are written, what they link, refusals in one line."""

import re
from datetime import datetime

import pytest

from llmb.cli.jobs.jobs import open_store
from llmb.cli.report.page_writer import write_report
from llmb.cli.stored_runs import write_result
from llmb.config.overrides import from_arguments
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.launch.run_folder import RunFolder
from llmb.report.page import chart_library

TOKEN = "hf_" + "a" * 30


@pytest.fixture
def run(recipes, tmp_path, monkeypatch):
    """A failed run in the store, with a trace; its command line and its last lines hold a token."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "llmb"))
    settings = tuple(from_arguments(["steps=7", "window=3-7", "gbs=6", "mbs=2"]))
    config = resolve(
        recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="bf16", gpus=1, gpu="h200", settings=settings)
    )
    run = RunFolder.create(tmp_path / "llmb", config, datetime.now())
    environ = {"GPU_TYPE": "h200", "MAX_STEPS": "7", "USE_CASE": "", "PATH": "/bin"}
    environ["ADDITIONAL_SLURM_PARAMS"] = "qos=low;nice=5"
    run.write_command_line(["/usr/bin/llmb-run", "submit", "--env", f"HF_TOKEN={TOKEN}"], environ)
    tokens = config.workload.gbs * config.workload.seqlen
    steps = [StepDone(step=n, steps=7, seconds=4.2, tokens=tokens, time=float(n)) for n in range(1, 8)]
    end = RunEnded(time=9.0, status="failed", reason=f"login with {TOKEN}", failed_rank=0, last_lines=(TOKEN,))
    for event in (RunStarted(time=0.0, gpu_name="NVIDIA H200"), *steps, end):
        append(run.events(0), event)
    run.profile.mkdir()
    (run.profile / "trace.rank0.json.gz").write_bytes(b"")
    with open_store() as store:
        store.finish(store.add(config, run.path), write_result(run, config))
    return run


def test_a_run_writes_its_page_and_says_where(run):
    assert write_report(run) == f"report: {run.report_page}"
    page = run.report_page.read_text()
    assert 'href="profile/trace.rank0.json.gz"' in page
    assert "llmb-run submit --env HF_TOKEN=***" in page
    assert TOKEN not in page


def test_report_writes_where_it_is_told(llmb_run, run, tmp_path):
    code, out, _ = llmb_run("report", "L1")
    assert (code, out.strip()) == (0, str(run.report_page))
    assert llmb_run("jobs", "show", "L1")[1].splitlines()[-1] == f"report: {run.report_page}"
    page = tmp_path / "page.html"
    assert llmb_run("report", run.path, "L1", "-o", page)[:2] == (0, f"{page}\n")
    links = re.findall(r'href="([^"]*report\.html)"', page.read_text())
    assert [(page.parent / link).resolve() for link in links] == [run.report_page] * 2


def test_a_run_without_the_library_says_how_to_get_the_page(run, monkeypatch):
    monkeypatch.setattr(chart_library, "find_spec", lambda _: None)
    line = write_report(run)
    assert "-m pip install plotly" in line
    assert "\n" not in line
    assert not run.report_page.exists()


def test_a_page_that_cannot_be_written_does_not_fail_the_run(run):
    run.report_page.mkdir()
    assert write_report(run).startswith("report: none was written: ")


def test_the_index_links_the_pages_of_runs(llmb_run, run, tmp_path):
    write_report(run)
    index = tmp_path / "runs.html"
    code, out, _ = llmb_run("jobs", "--html", "-o", index)
    assert (code, out) == (0, f"{index}\n")
    (link,) = re.findall(r'href="([^"]*report\.html)"', index.read_text())
    assert (index.parent / link).resolve() == run.report_page
    assert TOKEN not in index.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "L99"], "no job 'L99'"),
        (["report", "L1", "-o", "/nonexistent/page.html"], "cannot write"),
        (["jobs", "-o", "runs.html"], "add --html"),
        (["jobs", "--html", "--json"], "leave out --watch and --json"),
    ],
)
def test_mistakes_are_one_line(llmb_run, run, arguments, message):
    code, _, err = llmb_run(*arguments)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1


def test_command_has_the_variables_that_choose_and_override_the_row(run):
    command = run.command_line.read_text().strip()
    assert command.startswith(
        "GPU_TYPE=h200 MAX_STEPS=7 ADDITIONAL_SLURM_PARAMS='qos=low;nice=5' llmb-run submit --env HF_TOKEN="
    )
    assert TOKEN not in command
