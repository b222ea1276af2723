"""launch.sh of every recipe: defaults, the message for a missing variable, any folder, links, odd arguments."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from llmb.config.overrides import SELECTOR_VARIABLES, VARIABLES
from llmb.config.recipe import load_all, shipped

RECIPES = load_all([shipped()])
NEEDS_A_SCALE = ["pretrain_llama3.1", "pretrain_nemotronh", "pretrain_grok1"]


@pytest.fixture
def launch(tmp_path: Path):
    """Runs a launch.sh through a link, from another folder, with an llmb-run that prints its arguments."""
    fake_command = tmp_path / "bin" / "llmb-run"
    fake_command.parent.mkdir()
    fake_command.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    fake_command.chmod(0o755)
    other_folder = tmp_path / "a folder"
    other_folder.mkdir()

    def run(workload: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        link = other_folder / "start here.sh"
        link.unlink(missing_ok=True)
        link.symlink_to(shipped() / workload / "launch.sh")
        environ = {"PATH": f"{fake_command.parent}{os.pathsep}{os.environ['PATH']}", **variables}
        return subprocess.run(
            [link, *arguments], cwd=other_folder, env=environ, capture_output=True, text=True, check=False
        )

    return run


def submit(workload: str, size: str, dtype: str, scale: str, *more: str) -> list[str]:
    return ["submit", "-w", workload, "-s", size, "--dtype", dtype, "--scale", scale, *more]


@pytest.mark.parametrize("workload", RECIPES)
def test_launch_script_uses_the_recipe_defaults(launch, workload: str) -> None:
    recipe = RECIPES[workload]
    done = launch(workload, JOB_TOTAL_GPUS="32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == submit(workload, recipe.default_size, recipe.default_dtype, "32")


@pytest.mark.parametrize("workload", RECIPES)
def test_variables_and_arguments_are_passed_unchanged(launch, workload: str) -> None:
    done = launch(workload, "--set", "a b=*", "", MODEL_SIZE="7b", DTYPE="bf16", JOB_TOTAL_GPUS="2")
    assert done.stdout.splitlines() == submit(workload, "7b", "bf16", "2", "--set", "a b=*", "")


@pytest.mark.parametrize("workload", NEEDS_A_SCALE)
@pytest.mark.parametrize("variables", [{}, {"JOB_TOTAL_GPUS": ""}])
def test_missing_scale_gives_a_one_line_error_with_an_example(launch, workload: str, variables: dict[str, str]) -> None:
    done = launch(workload, **variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "JOB_TOTAL_GPUS: set the number of GPUs: JOB_TOTAL_GPUS=" in done.stderr


@pytest.mark.parametrize(
    ("gpu", "dtype", "scale"),
    [("", "nvfp4", "4"), ("gb200", "nvfp4", "4"), ("h100", "fp8", "16"), ("H100", "fp8", "16")],
)
def test_deepseek_takes_what_the_gpu_can_hold(launch, gpu: str, dtype: str, scale: str) -> None:
    done = launch("inference_deepseek-r1", GPU_TYPE=gpu)
    assert done.stdout.splitlines() == submit("inference_deepseek-r1", "671b", dtype, scale)


def test_out_of_core_defaults_to_one_gpu(launch) -> None:
    done = launch("outofcore_llama3")
    assert done.stdout.splitlines() == submit("outofcore_llama3", "8b", "bf16", "1")


@pytest.mark.parametrize("workload", RECIPES)
def test_readme_lists_only_existing_variables(workload: str) -> None:
    readme = (shipped() / workload / "README.md").read_text()
    table = readme.partition("## Variables")[2].partition("##")[0]
    named = set(re.findall(r"`([A-Z_]+)`", table))
    assert {"JOB_TOTAL_GPUS", "GPU_TYPE", "MODEL_SIZE", "DTYPE", "LLMB_INSTALL"} <= named
    assert named - {"LLMB_INSTALL"} <= {*VARIABLES, *SELECTOR_VARIABLES}
