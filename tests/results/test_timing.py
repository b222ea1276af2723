"""The step-time tables, in every format, against the rows that the published documents show."""

import csv
import io
import json
import math
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from llmb.cli.stored_runs import read_timed_run
from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError, UnknownName
from llmb.events import RunEnded, StepDone, append
from llmb.launch.run_folder import RunFolder
from llmb.report.step_timing import FORMATS, check_request, timing_table
from llmb.results.timed_run import find_logs, short_name

LOGS = Path(__file__).parent.parent / "golden" / "logs"
LLAMA = "pretrain_llama31_405b_fp8_cs_gpus128_tp2_pp1_cp1_vpNone_ep1_mbs1_gbs64_658572"
CSV_HEADER = {
    style: f"filename,status,{times},tflops_per_gpu_mean,tflops_per_gpu_std_dev,max_iteration,job_id,iterations,notes"
    for style, times in {
        "nemo": "time_mean_seconds,time_std_dev_seconds",
        "megatron_bridge": "time_mean_ms,time_std_dev_ms",
    }.items()
}
WINDOWS = {"pretrain_llama3.1": (35, 44), "pretrain_nemotronh": (11, 44), "pretrain_grok1": (11, 44)}


def timing_report(folder, style, format="table", full_names=False, window=None):
    """Return the report on a folder, and whether any run succeeded, as `llmb-run timing` does."""
    table_style = check_request(style, format, window)
    runs = [run for run in map(read_timed_run, find_logs(folder, table_style.files)) if run is not None]
    table = timing_table(runs, table_style, folder, WINDOWS, window, full_names)
    return FORMATS[format](table), any(row.status == "Success" for row in table.rows)


def nemo_log(iterations: int, seconds=lambda i: 12.0, tflops=lambda i: 500.0, total: int | None = None) -> str:
    lines = []
    for i in range(iterations):
        line = f"Training epoch 0, iteration {i}/{(total or iterations) - 1} | train_step_timing in s: {seconds(i)}"
        lines.append(line + (f" | TFLOPS_per_GPU: {tflops(i)}" if tflops(i) else ""))
    return "\n".join(lines) + "\n"


def report(folder: Path, style: str, **options):
    text, good = timing_report(folder, style, **options)
    return text.splitlines(), good


@pytest.fixture
def published(tmp_path):
    """The Llama 3.1 405B run that the documents show."""
    run = tmp_path / "experiments" / "run"
    run.mkdir(parents=True)
    shutil.copy(LOGS / "megatron_bridge.out", run / f"log-account-llama.{LLAMA}_0.out")
    return tmp_path / "experiments"


def test_the_published_row(published):
    lines, good = report(published, "megatron_bridge")
    assert good
    assert lines[0] == "Elapsed Time (ms) and TFLOPS/GPU Analysis (iterations 35-44)"
    assert lines[1] == "=" * 80
    printed = "  Status Time Mean (ms) Time Std (ms) TFLOPS_per_GPU Mean TFLOPS_per_GPU Std"
    assert lines[2] == f"{'Experiment':<90} {printed}"
    assert lines[4].split() == [LLAMA, "Success", "5741.470", "68.670", "1636.80", "20.89"]
    assert len({len(line) for line in lines[2:5]}) == 1, "columns stand under their headings"
    assert lines[5:] == [
        "",
        "Summary:",
        "  Success experiments: 1",
        "  Failed experiments: 0",
        "  Success rate: 100%",
    ]


def test_the_published_row_as_csv_and_json(published):
    text, _ = timing_report(published, "megatron_bridge", "csv")
    assert text.splitlines() == [
        CSV_HEADER["megatron_bridge"],
        f"{LLAMA},Success,5741.470,68.670,1636.80,20.89,,,35-44,",
    ]
    text, _ = timing_report(published, "megatron_bridge", "json")
    assert json.loads(text) == {
        "analysis": {"min_iteration": 35, "max_iteration": 44, "experiments_directory": str(published)},
        "results": [
            {
                "filename": LLAMA,
                "job_id": None,
                "status": "Success",
                "time_mean_ms": 5741.47,
                "time_std_ms": 68.67,
                "tflops_mean": 1636.8,
                "tflops_std": 20.89,
                "window": [35, 44],
                "notes": [],
            }
        ],
        "summary": {
            "success_experiments": 1,
            "failed_experiments": 0,
            "invalid_grad_norm_experiments": 0,
            "success_rate": 100,
        },
    }


def test_nemo_iterations_keep_their_own_numbers_and_the_deviation_is_the_samples(tmp_path):
    (tmp_path / "a.out").write_text(nemo_log(50, seconds=lambda i: 100 if i not in range(35, 45) else i))
    lines, _ = report(tmp_path, "nemo", window=(35, 44))
    assert lines[0] == "Train Step Timing and TFLOPS Analysis (iterations 35-44)"
    expected = math.sqrt(sum((i - 39.5) ** 2 for i in range(35, 45)) / 9)
    assert lines[4].split() == ["a", "Success", "39.500", f"{expected:.3f}", "500.00", "0.00"]
    assert lines[4] == f"{'a':<90} {'Success':>8} {'39.500':>13} {expected:>12.3f} {'500.00':>19} {'0.00':>18}"


def test_the_window_is_that_of_the_documents_unless_the_name_is_of_another_workload(tmp_path):
    (tmp_path / "a.out").write_text(nemo_log(50, seconds=lambda i: 1 if 11 <= i <= 44 else 9))
    lines, _ = report(tmp_path, "nemo")
    assert "(iterations 11-44)" in lines[0]
    assert lines[4].split()[2:4] == ["1.000", "0.000"]
    (tmp_path / "a.out").rename(tmp_path / "pretrain_llama31_8b_bf16_7.out")
    lines, _ = report(tmp_path, "nemo")
    assert "(iterations 35-44)" in lines[0]
    lines, _ = report(tmp_path, "nemo", window=(20, 30))
    assert "(iterations 20-30)" in lines[0]


@pytest.fixture
def troubled(tmp_path):
    """One good run and everything that can be wrong with one."""
    logs = {
        "a_good.out": nemo_log(50, tflops=lambda i: None),
        "b_short.out": nemo_log(20),
        "c_stopped_in_window.out": nemo_log(40, total=50),
        "d_no_steps.out": "building the model ...\nkilled\n",
        "e_nan.out": nemo_log(3, total=50) + "iteration 3/49 | reduced_train_loss: nan | train_step_timing in s: 1\n",
        "f_a,comma.out": nemo_log(60, total=100),
        "g_one_sample.out": "iteration 44/49 | train_step_timing in s: 2.5 | TFLOPS_per_GPU: 7\n",
        "sbatch_h.out": "starting the model\n",
        "vboost_i.out": "training\n",
        "j_unrelated.out": "nothing to see\n",
        "k_nccltrace.out": nemo_log(50),
        "l_import_ckpt_exp.out": nemo_log(50),
        "m.log": nemo_log(50),
        "n_empty.out": "",
    }
    for name, text in logs.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "o_folder.out").mkdir()
    return tmp_path


def test_every_failure_is_listed_with_what_is_known(troubled):
    lines, good = report(troubled, "nemo")
    assert good
    rows = [line.split() for line in lines[4:11]]
    assert rows == [
        ["a_good", "Success", "12.000", "0.000", "-", "-"],
        ["b_short", "Success", "12.000", "0.000", "500.00", "0.00"],
        ["c_stopped_in_window", "Failed", "(39", "iterations)"],
        ["d_no_steps", "Failed", "-", "-", "-", "-"],
        ["e_nan", "Invalid", "loss=nan", "iter", "3", "-", "-"],
        ["f_a,comma", "Success", "12.000", "0.000", "500.00", "0.00"],
        ["g_one_sample", "Success", "2.500", "-", "7.00", "-"],
    ]
    assert lines[11:] == [
        "",
        "Notes:",
        "  b_short: iterations 10-19 instead of 11-44: the run has 20",
        "  c_stopped_in_window: the log stops after step 40 of 50",
        "  d_no_steps: no timing lines",
        "  f_a,comma: the log stops after step 60 of 100",
        "  g_one_sample: the log stops after step 45 of 50",
        "",
        "Summary:",
        "  Success experiments: 4",
        "  Failed experiments: 3",
        "  Invalid grad norm experiments: 1",
        "  Success rate: 57%",
    ]
    assert f"{'c_stopped_in_window':<90} {'Failed':>8} {'(39 iterations)':>30}" in lines


def test_csv_rows_all_have_as_many_fields_as_the_header(troubled):
    text, _ = timing_report(troubled, "nemo", "csv")
    rows = text.splitlines()
    assert rows[0] == CSV_HEADER["nemo"]
    parsed = list(csv.reader(rows))
    assert {len(row) for row in parsed} == {10}
    by_name = {row[0]: row[1:] for row in parsed}
    assert by_name["a_good"] == ["Success", "12.000", "0.000", "", "", "", "", "11-44", ""]
    assert by_name["b_short"][6:] == ["", "10-19", "iterations 10-19 instead of 11-44: the run has 20"]
    assert by_name["c_stopped_in_window"][:6] == ["Failed", "", "", "", "", "39"]
    assert by_name["e_nan"][:6] == ["Invalid", "", "", "", "", "loss=nan@iteration_3"]
    assert by_name["f_a,comma"][0] == "Success"


def test_json_is_valid_and_what_is_missing_is_null(troubled):
    text, _ = timing_report(troubled, "nemo", "json")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(text, parse_constant=refuse)
    by_name = {entry["filename"]: entry for entry in data["results"]}
    nothing = dict.fromkeys(("time_mean", "time_std_dev", "tflops_per_gpu_mean", "tflops_per_gpu_std_dev"))
    nothing |= {"job_id": None, "window": [11, 44], "notes": []}
    assert by_name["a_good"] == {"filename": "a_good", "status": "Success"} | nothing | {
        "time_mean": 12.0,
        "time_std_dev": 0.0,
    }
    assert by_name["c_stopped_in_window"] == {
        "filename": "c_stopped_in_window",
        "status": "Failed",
        "max_iteration": 39,
        **nothing,
        "notes": ["the log stops after step 40 of 50"],
    }
    assert by_name["e_nan"] == {
        "filename": "e_nan",
        "status": "Invalid",
        "reason": "loss=nan",
        "invalid_iteration": 3,
        **nothing,
    }
    assert data["summary"] == {
        "success_experiments": 4,
        "failed_experiments": 3,
        "invalid_grad_norm_experiments": 1,
        "success_rate": 57,
    }


def test_a_bad_gradient_norm_is_shown_as_before(tmp_path):
    shutil.copy(LOGS / "megatron_bridge_nan.out", tmp_path / "log-nan.out")
    lines, good = report(tmp_path, "megatron_bridge")
    assert not good
    assert lines[4].split() == ["log-nan", "Invalid", "grad_norm=nan", "iter", "6", "-", "-"]
    text, _ = timing_report(tmp_path, "megatron_bridge", "csv")
    assert "log-nan,Invalid,,,,,grad_norm=nan@iteration_6" in text


def test_where_no_log_is_an_experiment_there_is_no_rate(tmp_path):
    (tmp_path / "x.out").write_text("nothing to see\n")
    text, good = timing_report(tmp_path, "nemo")
    assert not good
    assert text.endswith("  Success rate: N/A")
    assert json.loads(timing_report(tmp_path, "nemo", "json")[0])["summary"]["success_rate"] is None


@pytest.fixture
def native_run(recipes, tmp_path):
    """A run folder of our own engine with steps of half a second."""

    def make(workload, size, job, recorded=None, ending=None, **changes):
        settings = tuple(Setting(field=k, value=v, source="--set") for k, v in changes.items())
        request = RunRequest(size=size, dtype="bf16", gpus=1, proxy="small", settings=settings)
        config = resolve(recipes[workload], request)
        run = RunFolder.create(tmp_path, config, datetime.now())
        run.write_record(config, job)
        run.log.write_text("training\n")
        if hasattr(config.workload, "steps"):
            tokens = config.workload.gbs * config.workload.seqlen
            for step in range(1, (recorded or config.workload.steps) + 1):
                append(run.events(0), StepDone(step=step, seconds=0.5, tokens=tokens, loss=8.0))
            append(run.events(0), ending or RunEnded(status="ok"))
        return config.name

    return make


@pytest.mark.parametrize("style", ["nemo", "megatron_bridge"])
def test_runs_of_our_own_engine_have_rows_with_their_window_and_job_id(native_run, tmp_path, style):
    grok = native_run("pretrain_grok1", "314b", "L1")
    nemotron = native_run("pretrain_nemotronh", "56b", "L2", recorded=17)
    longer = native_run("pretrain_llama3.1", "8b", "L3", steps="60")
    native_run("inference_llama3.1", "8b", "L4")
    lines, good = report(tmp_path / "workloads", style)
    assert good
    assert "(iterations 11-40)" in lines[0]
    mean = "0.500" if style == "nemo" else "500.000"
    rows = {line.split()[0]: line.split()[1:] for line in lines[4:7]}
    assert rows[f"{grok}_L1"][:3] == ["Success", mean, "0.000"]
    assert float(rows[f"{grok}_L1"][3]) > 0, "TFLOP/s by our count of model FLOPs"
    assert rows[f"{nemotron}_L2"] == ["Failed", "(17", "iterations)"]
    assert rows[f"{longer}_L3"][0] == "Success"
    assert f"  {nemotron}_L2: incomplete: 17 of 40 steps are recorded" in lines
    assert f"  {longer}_L3: iterations 11-60, the window of this run" in lines
    assert "  Failed experiments: 1" in lines, "the serving run has no row"


@pytest.mark.parametrize("status", ["failed", "oom", "timeout"])
def test_a_run_that_fails_after_its_last_step_is_no_success(native_run, tmp_path, status):
    name = native_run("pretrain_grok1", "314b", "L1", ending=RunEnded(status=status, reason="the disk is full"))
    lines, good = report(tmp_path / "workloads", "nemo")
    assert not good
    assert lines[4].split()[1:] == ["Failed", "(40", "iterations)"]
    assert f"  {name}_L1: {status}: the disk is full" in lines


def test_a_log_with_an_error_after_its_window_is_no_success(tmp_path):
    (tmp_path / "a.out").write_text(nemo_log(46, total=50) + "torch.OutOfMemoryError: CUDA out of memory.\n")
    lines, good = report(tmp_path, "nemo")
    assert not good
    assert lines[4].split()[1:] == ["Failed", "(45", "iterations)"]
    (tmp_path / "a.out").write_text(nemo_log(50) + "torch.OutOfMemoryError: CUDA out of memory.\n")
    assert report(tmp_path, "nemo")[1], "an error of the shutdown, once all steps are done, is no failure"


def test_a_short_run_of_ours_is_measured_over_a_shorter_window_with_a_note(native_run, tmp_path):
    name = native_run("pretrain_nemotronh", "56b", "L1", steps="16")
    lines, good = report(tmp_path, "nemo")
    assert good
    assert "(iterations 11-40)" in lines[0]
    assert f"  {name}_L1: iterations 9-16 instead of 11-40: the run has 16" in lines


def test_full_names_of_our_own_runs_keep_the_job_id(native_run, tmp_path):
    name = native_run("pretrain_grok1", "314b", "L1")
    lines, _ = report(tmp_path, "nemo", full_names=True)
    assert lines[4].startswith(f"log-{name}.out (L1) ")
    rows = list(csv.DictReader(io.StringIO(timing_report(tmp_path, "nemo", "csv", full_names=True)[0])))
    assert (rows[0]["filename"], rows[0]["job_id"]) == (f"log-{name}.out", "L1")


def test_logs_of_several_engines_share_a_table(native_run, tmp_path):
    native_run("pretrain_grok1", "314b", "L1")
    for kind in ("megatron_bridge", "nemo"):
        shutil.copy(LOGS / f"{kind}.out", tmp_path / f"log-{kind}.out")
    lines, _ = report(tmp_path, "megatron_bridge")
    assert "  Success experiments: 3" in lines


def test_an_older_start_of_a_requeued_job_has_no_row(native_run, tmp_path):
    native_run("pretrain_grok1", "314b", "7")
    run = next(RunFolder.find_all(tmp_path))
    run.allocation.write_text("{}")
    restarted = run.for_new_start()
    restarted.log.write_text("training\n")
    assert report(tmp_path, "nemo")[0][4].split()[1:] == ["Failed", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        (f"log-account-llama.{LLAMA}_0.out", LLAMA),
        ("log-coreai-exp.pretrain_grok1_314b_bf16_256_388660_0.out", "pretrain_grok1_314b_bf16_256_388660"),
        ("log-pretrain_llama3.1_8b_fp8_gpus8.out", "log-pretrain_llama3.1_8b_fp8_gpus8"),
        ("log-acct-llama3.1_8b.pretrain_llama3.1_8b_7_0.out", "pretrain_llama3.1_8b_7"),
        ("plain.out", "plain"),
    ],
)
def test_names_are_shortened_to_the_experiment(file_name, name):
    assert short_name(file_name) == name


def test_full_names(published):
    text, _ = timing_report(published, "megatron_bridge", "csv", full_names=True)
    assert next(csv.reader(io.StringIO(text.splitlines()[1])))[0] == f"log-account-llama.{LLAMA}_0.out"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"style": "nemoo"}, UnknownName, "unknown style 'nemoo'"),
        ({"format": "xml"}, UnknownName, "unknown format 'xml'; choices are: table, csv, json"),
        ({"window": (44, 35)}, ConfigError, "the window 44-35 is empty"),
        ({"folder": Path("missing")}, ConfigError, "there is no folder missing"),
        ({}, ConfigError, r"no \*\.out files below "),
    ],
)
def test_a_wrong_request_is_one_clear_line(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        timing_report(**({"folder": tmp_path, "style": "nemo"} | options))
