"""llmb-install with real Slurm daemons: facts, questions at a terminal, and kills that lose nothing."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmb.launch.slurm.cluster_config import CLUSTER_FILE, find_cluster, read_cluster

pytestmark = pytest.mark.slurm

PROGRAM = [sys.executable, "-m", "llmb.cli.install.llmb_install"]
LIMIT_S = 120.0
TOKEN = "hf_" + "b" * 30


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path / "llmb"


@pytest.fixture
def two_partitions(slurm):
    """Two partitions with GPUs, none of them the default."""
    slurm.call("scontrol", "update", "PartitionName=main", "Default=NO")
    slurm.call("scontrol", "create", "PartitionName=extra", "Nodes=n[1-2]")
    yield
    slurm.call("scontrol", "delete", "PartitionName=extra")
    slurm.call("scontrol", "update", "PartitionName=main", "Default=YES")


def install(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )


def cluster_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["cluster"]


class Terminal:
    """llmb-install on a pseudo-terminal."""

    def __init__(self, *arguments: str):
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen([*PROGRAM, *arguments], stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.output = ""

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + LIMIT_S
        while text not in self.output:
            assert time.monotonic() < end, self.output
            if select.select([self._master], [], [], 0.1)[0]:
                self.output += os.read(self._master, 4096).decode()

    def type(self, text: str) -> None:
        self.output = ""
        os.write(self._master, text.encode())

    def close(self) -> int:
        code = self.process.wait(LIMIT_S)
        os.close(self._master)
        return code


def everything_in(folder: Path) -> str:
    return "".join(path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_facts_from_slurm_and_the_gpu_type_that_it_does_not_report(slurm, root):
    done = install()  # the GPUs of this lab have no type
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "--gpu-type NAME, one of: " in done.stderr
    assert not (root / CLUSTER_FILE).exists()
    answers = cluster_of(install("--gpu-type", "h100", "--json"))
    assert answers | {"file": None} == {
        "file": None,
        "state": "written",
        "account": None,
        "gpu_partition": "main",
        "cpu_partition": "main",
        "gpus_per_node": slurm.gpus,
        "cpu_gpus_per_node": None,
        "gpu_type": "h100",
        "architecture": os.uname().machine,
    }
    cluster = find_cluster(Path.cwd(), root)
    assert cluster.name == "lab"
    assert cluster.sbatch == {"partition": "main", "gpus-per-node": str(slurm.gpus)}
    assert TOKEN not in everything_in(root)


def test_slurm_accepts_the_options_of_the_file(slurm, root):
    assert install("--gpu-type", "h100").returncode == 0
    options = read_cluster(root / CLUSTER_FILE).sbatch
    arguments = [f"--{name}={value}" for name, value in options.items()]
    job = slurm.call("sbatch", "--parsable", "--output=/dev/null", "--mem=1", *arguments, "--wrap", "true").strip()
    fields = slurm.call("scontrol", "show", "job", job, "-o")
    assert "Partition=main" in fields
    assert f"gpu:{slurm.gpus}" in fields


def test_second_setup_keeps_the_file_and_a_dry_run_writes_none(slurm, root):
    dry = install("--gpu-type", "h100", "--dry-run")
    assert "partition: main" in dry.stdout
    assert not root.exists()
    assert cluster_of(install("--gpu-type", "h100", "--json"))["state"] == "written"
    edited = "# mine\n" + (root / CLUSTER_FILE).read_text()
    (root / CLUSTER_FILE).write_text(edited)
    assert cluster_of(install("--json"))["state"] == "kept"
    assert (root / CLUSTER_FILE).read_text() == edited


def test_recorded_answers_are_played_in_another_folder(slurm, root, tmp_path, monkeypatch):
    assert install("--gpu-type", "gb200", "--gpus-per-node", "4", "--record", "answers.yaml").returncode == 0
    text = (tmp_path / "answers.yaml").read_text()
    assert TOKEN not in text
    elsewhere = tmp_path / "it's elsewhere"
    (tmp_path / "answers.yaml").write_text(text.replace(str(root), str(elsewhere)))
    monkeypatch.delenv("LLMB_INSTALL")
    done = install("--play", "answers.yaml")
    assert done.returncode == 0, done.stderr
    assert "export LLMB_INSTALL=" in done.stdout
    first, second = read_cluster(root / CLUSTER_FILE), read_cluster(elsewhere / CLUSTER_FILE)
    assert second.gpu_type == "gb200"
    assert (first.sbatch, first.cpu_sbatch, first.architecture) == (
        second.sbatch,
        second.cpu_sbatch,
        second.architecture,
    )
    wrong = install("--play", "answers.yaml", "--partition", "none")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "choices are: main" in wrong.stderr


def test_killed_setup_resumes_where_it_was(slurm, root, two_partitions):
    first = Terminal()
    first.wait_for("--partition")
    first.type("nonsense\n")
    first.wait_for("--partition")
    first.type("extra\n")
    first.wait_for("--gpu-type")
    first.process.kill()
    first.close()
    assert not (root / CLUSTER_FILE).exists()
    second = Terminal()
    second.wait_for("--gpu-type")
    assert "--partition" not in second.output
    second.type("h200\n")
    second.wait_for("next: ")
    assert second.close() == 0
    cluster = read_cluster(root / CLUSTER_FILE)
    assert (cluster.sbatch["partition"], cluster.gpu_type) == ("extra", "h200")
    assert not (root / ".llmb" / "answers.json").exists()


def test_default_account(slurm_with_accounting, root):
    slurm_with_accounting.give_accounts("research", "students")
    answers = cluster_of(install("--gpu-type", "h100", "--json"))
    assert answers["account"] == "research"
    changed = cluster_of(install("--account", "students", "--json"))
    assert (changed["state"], changed["account"]) == ("written", "students")
    assert read_cluster(root / CLUSTER_FILE).sbatch["account"] == "students"
    assert read_cluster(root / f"{CLUSTER_FILE}.1").sbatch["account"] == "research"


def test_kill_at_any_time_leaves_complete_files(slurm, root):
    assert install("--gpu-type", "h100").returncode == 0
    for number in range(1, 9):
        process = subprocess.Popen([*PROGRAM, "--gpus-per-node", str(number)], stdout=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.04 * number + 0.1)  # it takes some 0.3 s
        process.kill()
        process.wait()
        files = [path for path in root.iterdir() if path.name.startswith(CLUSTER_FILE)]
        counts = {read_cluster(path).gpus_per_node for path in files}
        assert counts <= {slurm.gpus, *range(1, number + 1)}
        assert slurm.gpus in counts  # the first file or its backup still exists
    assert cluster_of(install("--gpus-per-node", "3", "--json"))["gpus_per_node"] == 3


@pytest.mark.nightly
def test_slurm_unavailable(slurm, root):
    assert install("--gpu-type", "h100").returncode == 0
    before = (root / CLUSTER_FILE).read_text()
    slurm.kill_controller()
    done = install("--partition", "main")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = install()
    assert done.returncode == 0
    assert "does not respond" in done.stdout
    assert (root / CLUSTER_FILE).read_text() == before


def test_documented_sbatch_line_runs_the_launch_script_in_its_allocation(slurm, root, monkeypatch):
    monkeypatch.setenv("LLMB_INSTALL", str(root))
    assert install("--gpu-type", "h100").returncode == 0
    folder = root / "llmb_repo" / "deepseek_r1" / "inference" / "trtllm"
    line = "sbatch --wait --output=%x.out -p main GPU_TYPE=h100 ./launch.sh --dry-run"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    output = (folder / "GPU_TYPE=h100.out").read_text()
    assert done.returncode == 0, f"{done.stderr}\n{output}"
    assert "DeepSeek-R1_max_throughput_TP8_EP8_PP2_CON3072_reasoning" in output
