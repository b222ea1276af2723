"""The desk side alone: installed as a package, without torch, from any folder."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_make_run_says_what_it_does_before_it_takes_minutes():
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "run"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (install,) = [number for number, line in enumerate(lines) if "pip install" in line]
    assert "--quiet" not in lines[install]  # pip shows its progress
    assert lines[install - 1].startswith('echo "Installing llmb and torch into .venv, once: 1 to 5 minutes')
    assert lines[-2].startswith('echo "Training a proxy of Llama 3.1 8B')


def test_an_installed_package_has_every_data_file():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {path for pattern in settings["package-data"]["llmb"] for path in (ROOT / "llmb").glob(pattern)}
    files = {path for path in (ROOT / "llmb").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - packaged == {path for path in files if path.suffix == ".py"}


@pytest.mark.nightly
def test_a_login_node_needs_no_torch(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    source = tmp_path / "source"  # a build writes into its folder
    shutil.copytree(ROOT / "llmb", source / "llmb", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", source]
    subprocess.run(install, check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def llmb(*arguments):
        command = [tmp_path / "venv" / "bin" / "llmb-run", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    missing = subprocess.run([python, "-c", "import torch"], capture_output=True)
    assert missing.returncode != 0
    assert "pretrain_grok1" in llmb("list").stdout
    printed = llmb("show", "-w", "pretrain_llama3.1", "-s", "405b", "--dtype", "fp8", "--scale", "128")
    assert "405,853,388,800" in printed.stdout, printed.stderr
    serving = ("--task", "serve", "--engine", "vllm", "--gpu-type", "h200", "--isl", "1024", "--osl", "1024")
    predicted = llmb("predict", "--model", "llama3.1-8b", *serving, "--concurrency", "64", "--json")
    assert predicted.returncode == 0, predicted.stderr
    scripts = python.parent.parent / "lib" / f"python3.{sys.version_info.minor}" / "site-packages/llmb/recipes"
    assert (scripts / "pretrain_grok1" / "launch.sh").exists()
    refused = llmb("submit", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--scale", "1", "--proxy")
    assert refused.returncode == 1
    assert f"{python} -m pip install 'torch>=2.11' " in refused.stderr
