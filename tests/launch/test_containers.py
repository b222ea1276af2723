"""Containers: where an image comes from, what srun is told of it, and an image that is missing."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmb.errors import ConfigError
from llmb.launch.engines.containers import check_image, find_container, srun_flags
from llmb.launch.engines.launch_spec import EngineOrder
from llmb.launch.slurm.cluster_config import Cluster, Container

ORDER = EngineOrder(command=("python3", "x.py"), folders=("/data/weights of R1", "/data/weights of R1/sub"))
NAMED = Container(image="registry#team/image:25.04.01", mounts=("/lustre:/data2:ro",))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HOME", raising=False)
    return tmp_path / "home"


def install_of(rundir) -> Path:
    return rundir.path.parents[5]


def test_without_an_image_ranks_run_as_they_are(rundir):
    assert find_container(None, {}) is None
    assert find_container(Cluster(path=Path("c.yaml")), {"RUN_CONF_MOUNTS": "/a:/a"}) is None
    assert srun_flags(None, ORDER, rundir, install_of(rundir), {}) == []


def test_the_environment_names_an_image_over_the_clusters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(path=Path("c.yaml"), container=NAMED)
    assert find_container(cluster, {}) == NAMED
    found = find_container(cluster, {"RUN_CONF_IMAGE": "mine.sqsh", "RUN_CONF_MOUNTS": "/a:/a, /b"})
    assert found == replace(NAMED, image=str(tmp_path / "mine.sqsh"), mounts=("/lustre:/data2:ro", "/a:/a", "/b"))


def test_what_srun_is_told(rundir, own_home):
    (own_home / ".cache" / "huggingface").mkdir(parents=True)
    environment = {"HF_TOKEN": "hf_secret", "NCCL_DEBUG": "INFO", "PATH": "/bin", "LD_LIBRARY_PATH": "/lib"}
    install, cache = install_of(rundir), own_home / ".cache" / "huggingface"
    mounts = f"{install}:{install},{cache}:{cache},/data/weights of R1:/data/weights of R1,/lustre:/data2:ro"
    assert srun_flags(NAMED, ORDER, rundir, install, environment) == [
        "--container-image=registry#team/image:25.04.01",
        f"--container-mounts={mounts}",
        "--no-container-mount-home",
        "--container-writable",
        "--container-env=HF_TOKEN,NCCL_DEBUG,PYTHONPATH",  # names only: values travel in the environment
    ]
    assert "--container-mount-home" in srun_flags(replace(NAMED, mount_home=True), ORDER, rundir, install, {})


def test_the_cache_is_where_the_user_says(rundir, tmp_path):
    cache = tmp_path / "shared cache"
    cache.mkdir()
    flags = srun_flags(NAMED, ORDER, rundir, install_of(rundir), {"HF_HOME": str(cache)})
    assert f",{cache}:{cache}," in flags[1]


def test_an_image_file_that_is_missing_is_named_before_submission(tmp_path):
    there = tmp_path / "nvidia+nemo+25.04.01.sqsh"
    with pytest.raises(ConfigError, match=r"nvidia\+nemo\+25.04.01.sqsh is not there; make it with `enroot import"):
        check_image(Container(image=str(there)))
    there.touch()
    check_image(Container(image=str(there)))
    check_image(NAMED)  # fetched from its registry when the job starts
    check_image(None)


@pytest.mark.parametrize("folder", ["/a,b", "/a:b", "/line\nbreak"])
def test_a_folder_that_pyxis_cannot_name_is_refused(rundir, folder):
    order = replace(ORDER, folders=(folder,))
    with pytest.raises(ConfigError, match="cannot be shown to a container"):
        srun_flags(NAMED, order, rundir, install_of(rundir), {})
