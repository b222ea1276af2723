"""The step-time tables, in every format, against the rows that the published documents show."""

import csv
import io
import json
import math
import shutil
from pathlib import Path

import pytest

from llmb.errors import ConfigError, UnknownName
from llmb.report.step_timing import short_name, timing_report

LOGS = Path(__file__).parent.parent / "golden" / "logs"
LLAMA = "pretrain_llama31_405b_fp8_cs_gpus128_tp2_pp1_cp1_vpNone_ep1_mbs1_gbs64_658572"
CSV_HEADER = {
    style: f"filename,status,{times},tflops_per_gpu_mean,tflops_per_gpu_std_dev,max_iteration"
    for style, times in {
        "nemo": "time_mean_seconds,time_std_dev_seconds",
        "megatron_bridge": "time_mean_ms,time_std_dev_ms",
    }.items()
}


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
    assert lines[0] == "Elapsed Time (ms) and MODEL_TFLOPS/GPU Analysis (iterations 35-44)"
    assert lines[1] == "=" * 80
    headings = ["Experiment", "Status", "Time Mean (ms)", "Time Std (ms)"]
    headings += ["MODEL_TFLOPS_per_GPU Mean", "MODEL_TFLOPS_per_GPU Std"]
    assert " ".join(lines[2].split()) == " ".join(headings)
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
        f"{LLAMA},Success,5741.470,68.670,1636.80,20.89,",
        "# Summary: 1 success, 0 failed, 1 total",
    ]
    text, _ = timing_report(published, "megatron_bridge", "json")
    assert json.loads(text) == {
        "analysis": {"min_iteration": 35, "max_iteration": 44, "experiments_directory": str(published)},
        "results": [
            {
                "filename": LLAMA,
                "status": "Success",
                "time_mean_ms": 5741.47,
                "time_std_ms": 68.67,
                "tflops_mean": 1636.8,
                "tflops_std": 20.89,
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
    lines, _ = report(tmp_path, "nemo")
    assert lines[0] == "Train Step Timing and TFLOPS Analysis (iterations 35-44)"
    expected = math.sqrt(sum((i - 39.5) ** 2 for i in range(35, 45)) / 9)
    assert lines[4].split() == ["a", "Success", "39.500", f"{expected:.3f}", "500.00", "0.00"]
    assert lines[4] == f"{'a':<90} {'Success':>8} {'39.500':>13} {expected:>12.3f} {'500.00':>19} {'0.00':>18}"


def test_the_window_can_be_moved(tmp_path):
    (tmp_path / "a.out").write_text(nemo_log(50, seconds=lambda i: 1 if 11 <= i <= 44 else 9))
    lines, _ = report(tmp_path, "nemo", window=(11, 44))
    assert "(iterations 11-44)" in lines[0]
    assert lines[4].split()[2:4] == ["1.000", "0.000"]


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
    rows = [line.split() for line in lines[4:-6]]
    assert rows == [
        ["a_good", "Success", "12.000", "0.000", "-", "-"],
        ["b_short", "Failed", "(19", "iterations)"],
        ["c_stopped_in_window", "Failed", "(39", "iterations)"],
        ["d_no_steps", "Failed", "-", "-", "-", "-"],
        ["e_nan", "Invalid", "loss=nan", "iter", "3", "-", "-"],
        ["f_a,comma", "Success", "12.000", "0.000", "500.00", "0.00"],
        ["g_one_sample", "Success", "2.500", "-", "7.00", "-"],
    ]
    assert lines[-5:] == [
        "Summary:",
        "  Success experiments: 3",
        "  Failed experiments: 4",
        "  Invalid grad norm experiments: 1",
        "  Success rate: 42%",
    ]
    assert f"{'b_short':<90} {'Failed':>8} {'(19 iterations)':>30}" in lines


def test_csv_rows_all_have_as_many_fields_as_the_header(troubled):
    text, _ = timing_report(troubled, "nemo", "csv")
    *rows, summary = text.splitlines()
    assert rows[0] == CSV_HEADER["nemo"]
    parsed = list(csv.reader(rows))
    assert {len(row) for row in parsed} == {7}
    by_name = {row[0]: row[1:] for row in parsed}
    assert by_name["a_good"] == ["Success", "12.000", "0.000", "", "", ""]
    assert by_name["b_short"] == ["Failed", "", "", "", "", "19"]
    assert by_name["e_nan"] == ["Invalid", "", "", "", "", "loss=nan@iteration_3"]
    assert by_name["f_a,comma"][0] == "Success"
    assert summary == "# Summary: 3 success, 4 failed, 7 total"


def test_json_is_valid_and_what_is_missing_is_null(troubled):
    text, _ = timing_report(troubled, "nemo", "json")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(text, parse_constant=refuse)
    by_name = {entry["filename"]: entry for entry in data["results"]}
    nothing = dict.fromkeys(("time_mean", "time_std_dev", "tflops_per_gpu_mean", "tflops_per_gpu_std_dev"))
    assert by_name["a_good"] == {"filename": "a_good", "status": "Success"} | nothing | {
        "time_mean": 12.0,
        "time_std_dev": 0.0,
    }
    assert by_name["c_stopped_in_window"] == {
        "filename": "c_stopped_in_window",
        "status": "Failed",
        "max_iteration": 39,
        **nothing,
    }
    assert by_name["e_nan"] == {
        "filename": "e_nan",
        "status": "Invalid",
        "reason": "loss=nan",
        "invalid_iteration": 3,
        **nothing,
    }
    assert data["summary"] == {
        "success_experiments": 3,
        "failed_experiments": 4,
        "invalid_grad_norm_experiments": 1,
        "success_rate": 42,
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
