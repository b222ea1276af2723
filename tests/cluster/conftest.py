"""Slurm labs for the tests of this folder: a test that asks for one finds it in its environment, and whole.

`slurm` is plain, as on a cluster without accounting; `slurm_with_accounting` also answers sacct and sacctmgr. Each is
started once per test process, so job numbers go on counting and jobs of earlier tests, all over, may still be listed.
"""

import json
import os
from pathlib import Path

import pytest
from slurm_test_runs import CLUSTER, HOSTILE
from slurm_lab import SlurmLab, unavailable_reason

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
    """Slurm's programs reach the lab that the test asks for; afterwards all is mended, and no job is left."""
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
    """An installation whose runs go to the lab, one rank a node."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "cluster_config.yaml").write_text(CLUSTER)
    monkeypatch.setenv("LLMB_INSTALL", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


@pytest.fixture
def submit(install, llmb_run):
    """Sends one run to Slurm; gives its job and its folder."""

    def call(*arguments: str) -> tuple[str, RunFolder]:
        code, out, err = llmb_run("submit", *arguments, "--json")
        assert code == 0, err
        sent = json.loads(out)
        return sent["job_id"], RunFolder.open(Path(sent["run_dir"]))

    return call
