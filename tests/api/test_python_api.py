"""The Python API: docstring examples, the shipped examples, and what a Result gives, over one real run of a proxy."""

import doctest
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import llmb
from llmb.api.sample_rows import sample_rows
from llmb.api.stored_result import Result
from llmb.events import RequestDone

EXAMPLES = Path(__file__).parents[2] / "examples"
PROXY = {"size": "8b", "dtype": "fp32", "gpus": 1, "proxy": True}


def run_docstring(thing) -> doctest.TestResults:
    """Run the examples of one docstring and print what differs."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(recurse=False).find(thing, thing.__qualname__, globs={"llmb": llmb}):
        runner.run(test)
    return runner.summarize()


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The install folder of the run that the docstring of llmb.run starts."""
    install = tmp_path_factory.mktemp("install")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMB_INSTALL", str(install))
        done = run_docstring(llmb.run)
    assert (done.failed, done.attempted) == (0, 4)
    return install


@pytest.fixture
def stored(first_run, monkeypatch):
    monkeypatch.setenv("LLMB_INSTALL", str(first_run))


@pytest.mark.parametrize("function", [llmb.resolve, llmb.predict])
def test_docstrings_without_a_run(function):
    done = run_docstring(function)
    assert done.failed == 0
    assert done.attempted > 0


@pytest.mark.slow
@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("thing", [llmb.runs, llmb.load, llmb.Result, llmb.Result.report, llmb.compare])
def test_docstrings_over_a_run(thing):
    done = run_docstring(thing)
    assert done.failed == 0
    assert done.attempted > 0


@pytest.mark.slow
@pytest.mark.usefixtures("stored")
class TestResult:
    def test_shows_itself_in_a_terminal_and_in_a_notebook(self):
        result = llmb.load(llmb.runs()[0])
        assert repr(result).startswith("<llmb.Result L1: pretrain_llama3.1_8b_fp32")
        assert "tokens of a step over its median time" in str(result)
        html = result._repr_html_()
        assert "<td>throughput</td>" in html
        assert "PROXY: a proxy of the model" in html

    def test_is_what_the_command_stores_and_finds_by_folder(self, llmb_run):
        result = llmb.load("L1")
        code, out, _ = llmb_run("jobs", "show", "L1", "--json")
        assert code == 0
        assert json.loads(out)["tokens_per_s"] == result.tokens_per_s
        assert llmb.load(result.folder) == result

    def test_to_frame_takes_rows_where_pandas_is_installed_and_says_so_where_not(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
        rows = llmb.load("L1").to_frame()
        assert [row["step"] for row in rows] == [1, 2, 3]
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(llmb.ConfigError, match=r"^to_frame\(\) needs pandas"):
            llmb.load("L1").to_frame()

    def test_its_page_is_a_file_and_a_frame(self, tmp_path):
        page = llmb.load("L1").report(tmp_path / "page.html")
        assert page.path.read_text().lower().startswith("<!doctype html")
        assert page._repr_html_().startswith('<iframe srcdoc="&lt;!')
        with pytest.raises(llmb.ConfigError, match="there is no folder"):
            llmb.load("L1").report(tmp_path / "missing" / "page.html")

    def test_compare_of_several_runs_has_an_entry_for_each(self):
        result = llmb.load("L1")
        compared = llmb.compare(result, "L1", result.folder)
        assert compared.runs == (result, result)
        assert compared.speedups == (1.0, 1.0)
        assert len(compared.intervals) == len(compared.verdicts) == 2
        assert "<td>tokens_per_s</td>" in compared._repr_html_()
        assert str(compared).count("same configuration") == 1
        assert compared.to_markdown().count("|") > 10


def test_rows_of_requests_carry_latencies_in_ms():
    request = RequestDone(
        request=1, arrival=1.0, first_token=1.5, token_times=(1.5, 2.0, 2.5), end=2.5, input_tokens=4, output_tokens=3
    )
    failed = replace(request, error="timeout after 9 s")
    ok, bad = sample_rows([request, failed])
    assert (ok["ttft_ms"], ok["tpot_ms"], ok["e2e_ms"]) == (500.0, 500.0, 1500.0)
    assert (bad["ttft_ms"], bad["error"]) == (None, "timeout after 9 s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stps": 3}, r"unknown field .* 'stps' \(did you mean steps\?\)"),
        ({"steps": "ten"}, "steps: expected a whole number, got 'ten'"),
        ({"steps": 2.5}, "expected a whole number, got 2.5"),
        ({"gpus": 0}, "gpus: expected a number of GPUs such as 8, got 0"),
        ({"proxy": "tiny"}, "unknown proxy 'tiny'; choices are: True, small, true-width"),
        ({"dtype": None}, "runs match; name one by size, dtype and gpus: 8b"),
        ({"one_rank": "first"}, "one_rank: expected True or the number of a rank, from 0, got 'first'"),
        ({"one_rank": -1}, "one_rank: expected True or the number of a rank, from 0, got -1"),
        ({"one_rank": True}, "the layout has one rank"),
        ({"size": "9b"}, "unknown size of pretrain_llama3.1 '9b'"),
    ],
)
def test_a_wrong_request_is_one_line_with_the_choices(arguments, message):
    with pytest.raises(llmb.ConfigError, match=message) as error:
        llmb.resolve("pretrain_llama3.1", **(PROXY | arguments))
    assert "\n" not in str(error.value)


def test_environment_variables_change_no_configuration(monkeypatch):
    monkeypatch.setenv("MAX_STEPS", "7")
    assert llmb.resolve("pretrain_llama3.1", **PROXY).workload.steps == 40


def test_lengths_of_a_use_case_and_fields_of_the_model_are_settings():
    config = llmb.resolve("inference_llama3.1", size="8b", dtype="fp8", gpus=1, proxy=True, use_case="chat:16/8")
    assert (config.workload.isl, config.workload.osl) == (16, 8)
    assert llmb.resolve("pretrain_llama3.1", **PROXY, **{"model.layers": 2}).model.layers == 2


def test_one_rank_of_a_layout_is_a_configuration():
    layout = {"size": "70b", "dtype": "fp8", "gpus": 64, "gpu": "h100"}
    assert llmb.resolve("pretrain_llama3.1", **layout).one_rank is None
    busiest = llmb.resolve("pretrain_llama3.1", **layout, one_rank=True)
    assert busiest.pipeline_rank == busiest.parallel.pp - 1, "it has the LM head"
    assert llmb.resolve("pretrain_llama3.1", **layout, one_rank=5).one_rank.rank == 5


def test_serving_is_predicted_with_its_latencies():
    served = llmb.predict(llmb.resolve("inference_llama3.1", size="8b", dtype="fp8", gpus=1, gpu="h200"))
    assert served.metric == "output_tokens_per_s"
    assert served.ttft_ms > served.tpot_ms > 0
    trained = llmb.predict(llmb.resolve("pretrain_llama3.1", size="8b", dtype="fp8", gpus=8, gpu="h100"))
    assert (trained.ttft_ms, trained.tpot_ms) == (None, None)


def test_a_run_that_this_machine_cannot_do_is_refused(monkeypatch):
    monkeypatch.setattr("llmb.launch.local_machine.gpu_names", lambda: [])
    config = llmb.resolve("pretrain_llama3.1", size="8b", dtype="fp8", gpus=16, gpu="h100")
    with pytest.raises(llmb.ConfigError, match=r"^16 x h100 requested, this machine has no GPU"):
        llmb.run(config)
    assert llmb.runs() == []


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.nightly  # the notebook and the gate run the same API
def test_the_sweep_runs_each_value_and_says_which_cannot(capsys):
    assert example("sweep_setting").main(["--field", "seqlen", "--values", "32", "64", "0", "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("seqlen=0: ") for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["seqlen", "32", "64"]
    assert lines[-1].startswith("fastest: seqlen=")
    assert [job.status for job in llmb.runs()] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.usefixtures("stored")
def test_the_gate_passes_the_same_speed_and_fails_a_slower_one(monkeypatch, tmp_path, capsys):
    result = llmb.load("L1")
    measured: list[Result] = [result]
    monkeypatch.setattr(llmb, "run", lambda config, progress: measured[-1])
    gate, baseline = example("gate_regression").main, str(tmp_path / "baseline.json")
    assert gate([baseline, "--write"]) == 0
    assert gate([baseline]) == 0
    measured.append(replace(result, tokens_per_s=0.9 * result.tokens_per_s))
    assert gate([baseline]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: -10.0 % tokens/s against the baseline, -5.0 % allowed"
    assert gate([baseline, "--max-slowdown", "11"]) == 0
    measured.append(replace(result, gpu_name="another device"))
    assert gate([baseline]) == 1
    measured.append(replace(result, status="failed", reason="out of memory"))
    assert gate([baseline]) == 1


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom():
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for cell in cells:
        exec(cell.replace("steps=8", "steps=3, seqlen=32"), names)
    assert names["result"].status == "ok"
    assert all(not cell.get("outputs") for cell in notebook["cells"])  # nothing of one machine is kept
