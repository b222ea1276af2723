"""Several Slurm jobs need the name of what is meant, their totals shown, and a yes."""

import io

import pytest

from llmb.cli import batch_confirmation
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError


@pytest.fixture
def runs(recipes):
    """One run of 128 GPUs for at most 2 hours, and two of 64 GPUs for at most half an hour."""
    large = resolve(recipes["pretrain_llama3.1"], RunRequest(size="405b", dtype="fp8", gpus=128, gpu="gb200"))
    small = resolve(recipes["pretrain_llama3.1"], RunRequest(size="70b", dtype="fp8", gpus=64, gpu="gb200"))
    return [(large, 1), (small, 2)]


@pytest.fixture
def terminal(monkeypatch):
    """Set what the user at the terminal types."""

    def type_in(answer: str) -> None:
        monkeypatch.setattr(batch_confirmation, "_has_terminal", lambda: True)
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))

    return type_in


def test_totals_of_all_jobs(runs):
    text = batch_confirmation.describe_totals(runs)
    assert text == "3 jobs, 256 GPUs in all (at most 128 in one), up to 320 GPU-hours by their time limits"


def test_script_needs_yes(runs, capsys):
    with pytest.raises(
        ConfigError, match=r"3 jobs, 256 GPUs in all .*; add --yes to submit them, or --dry-run to list"
    ):
        batch_confirmation.confirm(runs, yes=False)
    batch_confirmation.confirm(runs, yes=True)
    assert "3 jobs, 256 GPUs in all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "agrees"), [("y\n", True), ("YES\n", True), ("\n", False), ("", False), ("no\n", False)]
)
def test_terminal_is_asked(runs, terminal, capsys, answer, agrees):
    terminal(answer)
    if agrees:
        batch_confirmation.confirm(runs, yes=False)
    else:
        with pytest.raises(ConfigError, match="nothing was submitted"):
            batch_confirmation.confirm(runs, yes=False)
    assert capsys.readouterr().err.endswith("by their time limits\nsubmit them? [y/N] ")


def test_one_job_is_submitted_without_a_question(runs):
    batch_confirmation.confirm(runs[:1], yes=False)


def test_more_jobs_than_one_command_submits(runs):
    with pytest.raises(ConfigError, match=r"1,000,000,000 jobs: one command submits at most 10,000"):
        batch_confirmation.confirm([(runs[0][0], 10**9)], yes=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no workload is named; give -w WORKLOAD (see llmb-run list), a bulk file with -f, or --all"),
        (["-w", ""], "no workload is named"),
        (["--dry-run"], "no workload is named"),
        (["--all", "-w", "pretrain_grok1"], "--all and -w exclude each other"),
        (["--all", "-f", "runs.yaml"], "-f names the workloads; leave out -w, -s and --all"),
        (["--all", "--gpu-type", "gb200", "--on", "slurm"], "; add --yes to submit them, or --dry-run to list them"),
        (
            ["-w", "pretrain_grok1", "--gpu-type", "gb200", "--on", "slurm"],
            "6 jobs, 1,792 GPUs in all (at most 512 in one)",
        ),
        (["-w", "pretrain_grok1", "--scale", "1" + 20 * "0"], "a scale of more than 1,000,000 GPUs is not possible"),
        (["-w", "pretrain_grok1", "--scale", "9" * 5000], "a scale of more than 1,000,000 GPUs is not possible"),
        (["-w", "pretrain_grok1", "--max-scale", "2000000"], "a scale of more than 1,000,000 GPUs is not possible"),
    ],
)
def test_nothing_is_submitted_without_name_and_yes(llmb_run, tmp_path, options, message):
    code, out, err = llmb_run("submit", *options)
    assert (code, err.count("\n")) == (1, 1)
    assert "run folder" not in out
    assert message in err
    assert not (tmp_path / "llmb").exists()


def test_dry_run_of_everything_needs_no_yes(llmb_run):
    code, out, err = llmb_run("submit", "--all", "--gpu-type", "gb200", "--min-scale", "--on", "slurm", "--dry-run")
    assert (code, err) == (0, "")
    assert "5 jobs, 456 GPUs in all (at most 128 in one), up to" in out
    assert "pretrain_grok1" in out
    assert "pretrain_llama3.1" in out
