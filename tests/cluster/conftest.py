"""Slurm labs for the tests of this folder: a test that asks for one finds it in its environment, and whole.

`slurm` is plain, as on a cluster without accounting; `slurm_with_accounting` also answers sacct and sacctmgr. Each is
started once per test process, so job numbers go on counting and jobs of earlier tests, all over, may still be listed.
"""

import os

import pytest
from slurm_lab import SlurmLab, missing

LABS = ("slurm", "slurm_with_accounting")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    with SlurmLab(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


@pytest.fixture(scope="session")
def slurm_with_accounting(tmp_path_factory):
    if why := missing(accounting=True):
        pytest.skip(why)
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
