"""Containers: choice of the image, options for pyxis, and a missing image."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmb.errors import ConfigError
from llmb.launch.engines.containers import check_image, find_container, pyxis_options
from llmb.launch.engines.launch_spec import LaunchSpec
from llmb.launch.slurm.cluster_config import Cluster, Container

SPEC = LaunchSpec(command=("python3", "x.py"), folders=("/data/weights of R1", "/data/weights of R1/sub"))
CONTAINER = Container(image="registry#team/image:25.04.01", mounts=("/lustre:/data2:ro",))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HOME", raising=False)
    return tmp_path / "home"


def install_of(run_folder) -> Path:
    return run_folder.path.parents[5]


def test_no_container_without_an_image(run_folder):
    assert find_container(None, {}) is None
    assert find_container(Cluster(path=Path("c.yaml")), {"RUN_CONF_MOUNTS": "/a:/a"}) is None
    assert pyxis_options(None, SPEC, run_folder, install_of(run_folder), {}) == []


def test_environment_overrides_the_image_of_the_cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(path=Path("c.yaml"), container=CONTAINER)
    assert find_container(cluster, {}) == CONTAINER
    container = find_container(cluster, {"RUN_CONF_IMAGE": "mine.sqsh", "RUN_CONF_MOUNTS": "/a:/a, /b"})
    assert container == replace(
        CONTAINER, image=str(tmp_path / "mine.sqsh"), mounts=("/lustre:/data2:ro", "/a:/a", "/b")
    )


def test_pyxis_options(run_folder, home):
    (home / ".cache" / "huggingface").mkdir(parents=True)
    environment = {"HF_TOKEN": "hf_secret", "NCCL_DEBUG": "INFO", "PATH": "/bin", "LD_LIBRARY_PATH": "/lib"}
    install, cache = install_of(run_folder), home / ".cache" / "huggingface"
    mounts = f"{install}:{install},{cache}:{cache},/data/weights of R1:/data/weights of R1,/lustre:/data2:ro"
    assert pyxis_options(CONTAINER, SPEC, run_folder, install, environment) == [
        "--container-image=registry#team/image:25.04.01",
        f"--container-mounts={mounts}",
        "--no-container-mount-home",
        "--container-writable",
        "--container-env=HF_TOKEN,NCCL_DEBUG,PYTHONPATH",  # names only: values are in the environment
    ]
    assert "--container-mount-home" in pyxis_options(replace(CONTAINER, mount_home=True), SPEC, run_folder, install, {})


def test_hf_home_is_mounted(run_folder, tmp_path):
    cache = tmp_path / "shared cache"
    cache.mkdir()
    options = pyxis_options(CONTAINER, SPEC, run_folder, install_of(run_folder), {"HF_HOME": str(cache)})
    assert f",{cache}:{cache}," in options[1]


def test_missing_image_is_refused_before_submission(tmp_path):
    image = tmp_path / "nvidia+nemo+25.04.01.sqsh"
    with pytest.raises(ConfigError, match=r"nvidia\+nemo\+25.04.01.sqsh is missing; create it with `enroot import"):
        check_image(Container(image=str(image)))
    image.touch()
    check_image(Container(image=str(image)))
    check_image(CONTAINER)  # fetched from its registry when the job starts
    check_image(None)


@pytest.mark.parametrize("folder", ["/a,b", "/a:b", "/line\nbreak"])
def test_folder_with_a_mount_separator_is_refused(run_folder, folder):
    spec = replace(SPEC, folders=(folder,))
    with pytest.raises(ConfigError, match="cannot be mounted in a container"):
        pyxis_options(CONTAINER, spec, run_folder, install_of(run_folder), {})
