"""Command line end to end: list, show, invalid input, real runs, jobs, comparisons."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmb.cli.list_show import _recipe_table
from llmb.cli.llmb_run import guarded
from llmb.config.recipe import load_all, shipped

EIGHT_B = ["submit", "-w", "pretrain_llama3.1", "-s", "8b"]
PROXY = [*EIGHT_B, "--dtype", "fp32", "--scale", "1", "--proxy"]
SHAPE = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
TINY = [f"--set=model.{field}={value}" for field, value in SHAPE.items()]
SMALL = [*PROXY, *TINY, "--seqlen", "32", "--set", "steps=4"]


def shell(*arguments, **environment):
    """Run the installed command in a separate process."""
    command = [str(Path(sys.executable).parent / "llmb-run"), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def test_list_names_every_workload(llmb_run):
    code, out, _ = llmb_run("list")
    assert code == 0
    for word in (
        "pretrain_llama3.1",
        "pretrain_nemotronh",
        "pretrain_grok1",
        "inference_deepseek-r1",
        "outofcore_llama3",
    ):
        assert word in out
    code, out, _ = llmb_run("list", "-w", "pretrain_grok1")
    assert code == 0
    assert all(word in out for word in ("gb200", "h100", "128-512", "GPUs*2", "13.43", "proxies"))
    code, out, _ = llmb_run("list", "-w", "pretrain_grok1", "--json")
    assert len(json.loads(out)["references"]) == 8


def test_show_gives_flops_parameters_memory_and_the_command(llmb_run):
    code, out, _ = llmb_run(
        "show", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp8", "--scale", "16", "--gpu-type", "h100"
    )
    assert code == 0
    for word in ("8,030,261,248", "51.47", "memory estimate: total", "llmb.train config.json", "estimate:"):
        assert word in out
    code, out, _ = llmb_run("show", "-w", "pretrain_grok1", "-s", "314b", "--dtype", "bf16", "--scale", "128", "--json")
    assert json.loads(out)["reference"]["step_time_s"] == 7.325


@pytest.mark.slow
def test_show_skips_invalid_scales_and_reports_them_on_stderr(llmb_run):
    code, out, err = llmb_run("show", *EIGHT_B[1:], "-d", "fp8", "--scale", "16,12", "--json")
    assert (code, json.loads(out)["machine"]["gpus"]) == (1, 16)
    assert err.startswith("ERROR: skipped: scale 12 is not listed")


LOG = str(Path(__file__).parents[1] / "golden" / "logs" / "nemo.out")
WRONG = [
    (["submit", "-w", "nothing"], "unknown workload 'nothing'; choices are: inference_deepseek-r1"),
    (["submit", "-w", "pretrain_llama3.1", "-s", "9b"], "unknown size of pretrain_llama3.1 '9b'"),
    ([*EIGHT_B, "-d", "fp9", "--scale", "8"], "unknown dtype of pretrain_llama3.1 8b 'fp9'"),
    ([*EIGHT_B, "-d", "fp8", "--scale", "12"], "scale 12 is not listed"),
    ([*EIGHT_B, "-d", "fp8", "--scale", "0"], "--scale: expected GPU counts"),
    (["submit", "-w", "pretrain_grok1", "--gpu-type", "v100"], "unknown GPU type 'v100'; choices are: gb300"),
    ([*PROXY, "--gpu-type", "mi325x"], "; name a GPU that is not among them as unlisted:mi325x"),
    (["submit", "-w", "pretrain_grok1", "--gpu-type", "b200"], "(did you mean gb200?); choices are: gb200, h100"),
    ([*PROXY, "--set", "paralel=4"], "unknown field (--set) for pretrain_llama3.1: 'paralel'"),
    ([*PROXY, "--set", "mbs=3"], "gbs could be"),
    ([*PROXY, "--set", "stall_limit_s=-1"], "stall_limit_s (--set): -1.0 is out of range; it must be more than 0"),
    ([*PROXY, "--set", "vp=2"], "vp 2 has no effect without pipeline parallelism; raise pp or set vp=none"),
    ([*PROXY, "--layout", "nonsense"], "unknown layout of pretrain_llama3.1 8b 'nonsense'; choices are: gb300"),
    ([*EIGHT_B, "-d", "fp8", "--scale", "16", "--layout", "h100"], "--layout has no effect here"),
    ([*EIGHT_B, "-d", "fp32", "--scale", "1000000", "--proxy"], "of host memory for 1000000 ranks; "),
    ([*PROXY, "--set", "model.heads=3"], "model.heads=3 is not a multiple of model.kv_heads=2"),
    ([*PROXY, "--set", "model.layers=-1"], "model.layers (--set): -1 is out of range; it must be at least 1"),
    ([*PROXY, "--set", "model.head_dim=31"], "model.head_dim=31 is odd"),
    ([*PROXY, "--set", "lr=inf"], "inf is out of range; it must be more than 0 and at most 1,000,000,000,000,000"),
    ([*PROXY, "--set", "data=missing.bin"], "missing.bin: No such file or directory"),
    ([*PROXY, "--set", f"data={LOG}"], "is not a token file; llmb-run tokenize makes one from text"),
    (["submit", "-w", "inference_llama3.1", "--proxy", "--set", "num_requests=99999999"], "at most 10,000,000"),
    (["submit", "--all", "--max-scale", "0"], "--max-scale: 0 is not possible; at least 1 is needed"),
    (["read", LOG, "--window", "90-99"], "no step time in iterations 90-99 of "),
    ([*PROXY, "--env", "nonsense"], "--env: expected NAME=VALUE"),
    ([*PROXY, "-f", "x.yaml"], "-f names the workloads"),
    (["submit", "-f", "missing.yaml"], "cannot read missing.yaml"),
    (["submit", "--scal", "8"], "arguments: --scal 8 (did you mean --scale?) (see llmb-run submit --help)"),
    (["jobs", "show", "L1", "--jsn"], "--jsn (did you mean --json?) (see llmb-run jobs show --help)"),
    (["load", "--rate", "fast"], "--rate: expected a number, got 'fast' (see llmb-run load --help)"),
    (["load", "-n", "1.5"], "-n/--requests: expected a whole number, got '1.5'"),
    (["compare", "L1"], "the following arguments are required: B"),
    ([*EIGHT_B, "-d", "bf16", "--scale", "1", "--gpu-type", "h200"], "this machine has no GPU"),
    (["submit", "-w", "outofcore_llama3", "--proxy", "--device-gb", "0"], "(--device-gb): 0.0 is out of range"),
    (["read", "missing.log"], "missing.log"),
    (["timing", "missing"], "missing"),
    (["timing", "--window", "9"], "--window: expected FIRST-LAST"),
    (["compare", "L1", "L2"], "no job 'L1'"),
    (["jobs", "show", "L1"], "no job 'L1'; the newest are: none yet"),
    (["nothing"], "unknown command 'nothing'; choices are: submit"),
    (["sumbit"], "unknown command 'sumbit' (did you mean submit?)"),
    (["help", "sumbit"], "unknown command 'sumbit' (did you mean submit?)"),
    (["submit", "--on", "lcal"], "unknown value of --on: 'lcal' (did you mean local?); choices are: local, slurm, dry"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=range(len(WRONG)))
def test_invalid_request_is_one_line_and_exit_1(llmb_run, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = llmb_run(*arguments)
    assert code == 1
    assert message in err
    assert err.startswith("ERROR: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err + out
    assert not list((tmp_path / "llmb").glob("workloads/*/experiments/*/*")), "a refused run must leave no folder"


def test_contradicting_environment_and_flags_are_refused(llmb_run, monkeypatch):
    monkeypatch.setenv("DTYPE", "bf16")
    code, _, err = llmb_run(*PROXY)
    assert (code, "--dtype fp32 and DTYPE=bf16 disagree" in err) == (1, True)
    monkeypatch.delenv("DTYPE")
    monkeypatch.setenv("USE_CASE", "chat")
    code, _, err = llmb_run(*PROXY)
    assert (code, "USE_CASE is set but has no effect on pretrain_llama3.1" in err) == (1, True)


def test_additional_slurm_params_are_refused_for_a_local_run(llmb_run, monkeypatch):
    monkeypatch.setenv("ADDITIONAL_SLURM_PARAMS", "exclusive")
    code, _, err = llmb_run(*PROXY)
    assert (code, "no effect on a local run" in err) == (1, True)


@pytest.mark.slow
def test_one_invalid_task_does_not_stop_the_others(llmb_run):
    code, out, err = llmb_run(
        "submit", "-w", "pretrain_grok1", "-d", "fp8,bf16", "--scale", "128,130", "--gpu-type", "gb200", "--dry-run"
    )
    assert code == 1
    assert [line.split()[:4] for line in out.splitlines() if "gpus128" in line][:2] == [
        ["1", "pretrain_grok1", "314b", "fp8"],
        ["2", "pretrain_grok1", "314b", "bf16"],
    ]
    assert "skipped: scale 130" in err


@pytest.mark.slow
def test_real_run_writes_a_result_that_jobs_and_compare_can_read(llmb_run, tmp_path):
    code, out, err = llmb_run(
        *SMALL, "--json", "-r", "2", "--env", "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz", "--env", "NOTE=seen"
    )
    assert code == 0, err
    assert "95 % interval" in err
    lines = out.strip().splitlines()
    result = json.loads(lines[-1])
    assert (result["status"], result["steps_done"], result["window"]) == ("ok", 4, [3, 4])
    assert result["proxy"]
    assert result["reference"] is None
    assert result["tokens_per_s"] > 0
    runs = sorted((tmp_path / "llmb").glob("workloads/*/experiments/*/*/*"))
    assert len(runs) == 2
    assert (runs[-1] / "result.json").read_text().strip() == lines[-1]
    assert {p.name.split("_")[0].split("-")[0] for p in runs[-1].iterdir()} >= {
        "config.json",
        "job.sh",
        "events.rank0.jsonl",
        "log",
        "result.json",
        "llmb",
    }
    config = json.loads((runs[-1] / "config.json").read_text())
    assert config["environment"]["NOTE"] == "seen"
    assert config["predicted"]["note"] == "the speed of a CPU is not predicted"
    short = tmp_path / "llmb" / "runs" / "L2-llama3.1-8b-fp32-proxy"
    assert f"report: {short / 'report.html'}" in err.splitlines()
    assert (runs[-1] / "report.html").is_file()
    for path in (tmp_path / "llmb").rglob("*"):
        assert path.is_dir() or b"hf_abcdef" not in path.read_bytes()

    assert "ok" in llmb_run("jobs")[1]
    assert "tokens/s" in llmb_run("jobs", "show", "L1")[1]
    assert "iteration" in llmb_run("jobs", "log", "L2", "--tail", "5")[1]
    assert llmb_run("jobs", "log", "L2", "--dir")[1].strip() == str(runs[-1])
    assert "verdict:" in llmb_run("compare", "L1", "L2")[1]
    assert json.loads(llmb_run("compare", short.name, str(short), "--json")[1])["figures"]
    assert "Success experiments: 1" in llmb_run("timing", str(short))[1]
    assert llmb_run("jobs", "refresh", "L1")[1].startswith("L1: ok")

    before = [json.loads(line) for line in llmb_run("jobs", "--json")[1].splitlines()]
    os.remove(tmp_path / "llmb" / ".llmb" / "jobs.sqlite3")
    short.rename(short.with_name("L9-llama3.1-8b-fp32-proxy"))
    assert llmb_run("jobs", "rebuild")[1].startswith("2 runs found")
    assert sorted(os.listdir(short.parent)) == ["L1-llama3.1-8b-fp32-proxy", short.name]
    after = [json.loads(line) for line in llmb_run("jobs", "--json")[1].splitlines()]
    stamps = ("created_at", "updated_at")
    assert [{k: v for k, v in j.items() if k not in stamps} for j in before] == [
        {k: v for k, v in j.items() if k not in stamps} for j in after
    ]

    log = next(runs[0].glob("log-*.out"))
    read = json.loads(llmb_run("read", str(log), "--json")[1])
    assert (read["status"], read["steps_done"]) == ("ok", 4)
    recorded = json.loads((runs[0] / "result.json").read_text())["step_time_s"]
    assert read["step_time_s"]["samples"] == pytest.approx(recorded["samples"], abs=1e-4)  # the log has 0.1 ms


@pytest.mark.slow
def test_engine_that_refuses_exits_1_and_one_that_fails_exits_2(llmb_run):
    code, out, _ = llmb_run(
        "submit", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--scale", "1", "--proxy", *TINY,
        "--set", "resume=no-such-folder",
    )  # fmt: skip
    assert code == 1
    assert "failed" in out
    assert Path(out.splitlines()[-1].removeprefix("report: ")).is_file()
    code, out, _ = llmb_run(*SMALL, "--set", "lr=1e9", "--no-report")
    assert code == 2
    assert "diverged" in out
    assert "report" not in out.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_leaves_a_readable_incomplete_run(tmp_path):
    command = [str(Path(sys.executable).parent / "llmb-run"), *PROXY, *TINY, "--seqlen", "32", "--set", "steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "llmb").rglob("events.rank0.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "incomplete (interrupted by SIGINT" in out
    assert "incomplete" in shell("jobs").stdout


@pytest.mark.slow
def test_timeout_is_reported(llmb_run):
    code, out, _ = llmb_run(*PROXY, *TINY, "--seqlen", "32", "--set", "steps=100000", "--timeout", "3")
    assert code == 2
    assert "timeout" in out


def test_help_has_examples_and_completion_prints_a_script(llmb_run):
    for arguments in (
        ["--help"],
        ["submit", "--help"],
        ["show", "--help"],
        ["jobs", "--help"],
        ["compare", "--help"],
        ["timing", "--help"],
    ):
        code, out, _ = llmb_run(*arguments)
        assert code == 0
        assert "example" in out
    for verb in ("submit", "show"):
        out = llmb_run(verb, "--help")[1]
        assert "--proxy --layout h100" in out
        assert "--scale 64 --gpu-type gb200 --memory" in out
    for name in ("bash", "zsh", "fish"):
        assert "llmb-run" in llmb_run("completion", name)[1]


@pytest.mark.parametrize(
    ("words", "offered"), [("llmb-run sub", "submit"), ("llmb-run show -w pretrain_g", "pretrain_grok1")]
)
def test_completion_offers_commands_and_workloads(tmp_path, words, offered):
    completions = tmp_path / "completions"
    variables = {"COMP_LINE": words, "COMP_POINT": str(len(words)), "_ARGCOMPLETE_STDOUT_FILENAME": str(completions)}
    shell(_ARGCOMPLETE="1", _ARGCOMPLETE_IFS="|", _ARGCOMPLETE_SUPPRESS_SPACE="1", **variables)
    assert completions.read_text() == offered


def test_closed_pipe_is_not_an_error():
    done = subprocess.run(
        ["bash", "-c", "set -o pipefail; llmb-run list -w pretrain_llama3.1 | head -1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_install_prints_the_install_folder(tmp_path):
    done = subprocess.run(["llmb-install", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(tmp_path / "llmb")


@pytest.mark.slow
def test_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    done = shell(*SMALL, LLMB_INSTALL=str(tmp_path / "file" / "below"))
    assert done.returncode == 1
    assert "LLMB_INSTALL" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_inside_an_import_is_an_interruption_too(capsys):
    """Python then raises another error with the KeyboardInterrupt as its cause."""

    def action():
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    assert guarded(action, verbose=False) == 130
    assert capsys.readouterr().err == "ERROR: interrupted\n"


def test_without_a_command_help_is_printed(llmb_run):
    code, out, err = llmb_run()
    assert (code, err) == (0, "")
    assert all(word in out for word in ("submit", "examples", "exit codes"))
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [[], ["submit"], ["jobs", "show"]])
def test_help_command_prints_what_the_option_prints(llmb_run, arguments):
    code, out, _ = llmb_run("help", *arguments)
    assert (code, out) == llmb_run(*arguments, "--help")[:2]
    assert (code, out.split()[:2]) == (0, ["usage:", "llmb-run"])


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        (
            "llmb/recipes/mine/recipe.yaml",
            ["show", "-w", "mine"],
            "recipe.yaml is empty; expected a recipe: workload, kind",
        ),
        ("runs.yaml", ["submit", "-f", "runs.yaml"], "runs.yaml is empty; expected sections named like"),
        ("cluster_config.yaml", PROXY, "cluster_config.yaml is empty; expected at least `schema_version: 2`"),
    ],
)
def test_empty_file_is_named_as_such(llmb_run, monkeypatch, tmp_path, path, arguments, message):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("")
    monkeypatch.chdir(tmp_path)
    code, _, err = llmb_run(*arguments)
    assert (code, err.count("\n")) == (1, 1 if "recipes" not in path else 2)  # then: mine is no workload
    assert message in err


@pytest.mark.parametrize("columns", [None, "100", "250"])
def test_list_fits_the_terminal_and_loses_nothing(llmb_run, monkeypatch, recipes, columns):
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    served = recipes["inference_deepseek-r1"].rows
    for arguments, words in (
        (["list"], [word for workload, recipe in recipes.items() for word in (workload, *recipe.sizes)]),
        (["list", "-w", "inference_deepseek-r1"], [str(row[k]) for row in served for k in ("use_case", "isl", "tp")]),
    ):
        code, out, _ = llmb_run(*arguments)
        assert code == 0
        assert max(map(len, out.splitlines())) <= int(columns or 80)
        assert set(words) <= set(out.split())


@pytest.mark.parametrize("workload", load_all([shipped()]))
def test_every_recipe_table_fits_80_columns(recipes, workload):
    for rows in (recipes[workload].rows, recipes[workload].references):
        text = _recipe_table(list(rows), 80) if rows else ""
        assert max(map(len, text.splitlines()), default=0) <= 80
