"""llmb-install as a command: without Slurm, with one that does not respond, without torch; its files and options."""

import json
import os
import stat
import sys

import pytest

from llmb.cli.install.cluster_choice import ClusterFacts
from llmb.cli.install.llmb_install import main
from llmb.launch.slurm.cluster_config import CLUSTER_FILE
from llmb.launch.slurm.cluster_facts import Partition


@pytest.fixture
def without_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def install(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_without_slurm_the_folder_is_created_and_runs_are_local(without_slurm, tmp_path, capsys):
    code, out, _ = install(capsys)
    assert code == 0
    assert "not found: runs are local" in out
    assert (tmp_path / "llmb" / ".llmb" / "jobs.sqlite3").exists()
    assert not (tmp_path / "llmb" / CLUSTER_FILE).exists()
    code, out, _ = install(capsys, "--json")
    assert json.loads(out)["cluster"] is None


def test_without_slurm_a_dry_run_creates_no_folder(without_slurm, tmp_path, capsys):
    assert install(capsys, "--dry-run")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [("--partition", "a"), ("--gpus-per-node", "8"), ("--record", "r.yaml")])
def test_without_slurm_cluster_options_are_refused(without_slurm, capsys, option):
    code, _, err = install(capsys, *option)
    assert (code, err.count("\n")) == (1, 1)
    assert "no Slurm on this machine" in err


def test_slurm_that_does_not_respond(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("sbatch", "scontrol", "sinfo", "sacctmgr"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'slurm_load: Unable to contact slurm controller' >&2\nexit 1\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    code, out, _ = install(capsys)
    assert code == 0
    assert "does not respond" in out
    code, _, err = install(capsys, "--partition", "a")
    assert (code, err.count("\n")) == (2, 1)


def test_dry_run_prints_what_slurm_reports_without_a_terminal(tmp_path, capsys, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    unnamed = Partition(name="batch", default=True, up=True, nodes=4, gres="gpu:8", max_time_s=None)
    reported = ClusterFacts(cluster="big", accounts=("lab",), partitions=(unnamed,), architecture=lambda _: "x86_64")
    monkeypatch.setattr("llmb.cli.install.llmb_install.query_cluster", lambda: reported)
    code, out, err = install(capsys, "--dry-run")
    assert (code, err.count("\n")) == (1, 1)  # the GPU type is open, and nobody can be asked
    assert "--gpu-type NAME, one of: " in err
    assert err.rstrip().endswith(", cpu")
    assert "cluster big, accounts lab" in out
    assert "gpu:8" in out
    code, out, _ = install(capsys, "--dry-run", "--gpu-type", "h100")
    assert code == 0
    assert "gpu:8" in out
    assert "would be written" in out


def test_record_never_overwrites_a_file(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("precious")
    code, _, err = install(capsys, "--record", str(tmp_path / "mine.yaml"))
    assert (code, (tmp_path / "mine.yaml").read_text()) == (1, "precious")
    assert "exists already" in err


def test_install_path_that_disagrees_with_llmb_install_is_refused(tmp_path, capsys):
    (tmp_path / "p.yaml").write_text("install_path: /elsewhere")
    code, _, err = install(capsys, "--play", str(tmp_path / "p.yaml"))
    assert code == 1
    assert "/elsewhere" in err
    assert os.environ["LLMB_INSTALL"] in err


def test_install_without_torch_prints_commands_that_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("llmb.cli.install.llmb_install.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    install = f"{sys.executable} -m pip install 'torch>=2.11' 'numpy>=2' "  # not llmb[engine]: no index has llmb
    assert any(line.startswith(f"runs need torch; install it where they run: {install}") for line in lines)
    assert lines[-1].endswith("--proxy --dry-run")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["help"], 0, "usage: llmb-install"),
        (["help", "verify"], 0, "usage: llmb-install verify"),
        (["verfy"], 1, "unknown command 'verfy' (did you mean verify?)"),
    ],
)
def test_help_and_misspelt_commands(capsys, arguments, code, text):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    assert text in "".join(capsys.readouterr())
