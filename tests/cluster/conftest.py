"""Slurm labs for the tests of this folder: a test that requests one finds it in its environment, in working order.

`slurm` has no accounting; `slurm_with_accounting` also serves sacct and sacctmgr. Each is started once per test
process, so job ids keep counting, and ended jobs of earlier tests may still be listed.
"""

import json
import os
from pathlib import Path

import pytest
from slurm_lab import SlurmLab, unavailable_reason
from slurm_test_runs import CLUSTER, HOSTILE

from llmb.launch.run_folder import RunFolder

LABS = ("slurm", "slurm_with_accounting")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if reason := unavailable_reason():
        pytest.skip(reason)
    with SlurmLab(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


@pytest.fixture(scope="session")
def slurm_with_accounting(tmp_path_factory):
    if reason := unavailable_reason(accounting=True):
        pytest.skip(reason)
    with SlurmLab(tmp_path_factory.mktemp("accounting"), accounting=True) as lab:
        yield lab


@pytest.fixture(autouse=True)
def slurm_environment(request, monkeypatch, clean_environment):
    """Point Slurm's programs at the lab that the test requests; afterwards repair it and cancel all jobs."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_"))]:
        monkeypatch.delenv(name)
    labs = [request.getfixturevalue(name) for name in LABS if name in request.fixturenames]
    for lab in labs:
        for name, value in lab.environment.items():
            monkeypatch.setenv(name, value)
    yield
    for lab in labs:
        lab.heal()
        lab.cancel_all()


@pytest.fixture
def install(slurm, tmp_path, monkeypatch) -> Path:
    """Install folder whose runs go to the lab, one rank per node."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "cluster_config.yaml").write_text(CLUSTER)
    monkeypatch.setenv("LLMB_INSTALL", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


@pytest.fixture
def submit(install, llmb_run):
    """Return a function that submits one run to Slurm and returns its job id and folder."""

    def call(*arguments: str) -> tuple[str, RunFolder]:
        code, out, err = llmb_run("submit", *arguments, "--json")
        assert code == 0, err
        submitted = json.loads(out)
        return submitted["job_id"], RunFolder.open(Path(submitted["run_dir"]))

    return call
