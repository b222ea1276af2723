"""Command of an engine, its environment, and job.sh as text and as a program."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import llmb
from llmb import events
from llmb.config.spec import Inference, Machine, Profile
from llmb.errors import ConfigError, UnknownName
from llmb.launch import command
from llmb.launch.command import engine_command, engine_environment, format_engine_command, job_script
from llmb.launch.run_folder import RunFolder

GOLDEN = r"""#!/usr/bin/env bash
# Repeats this run in a new folder beside it.
# Secret, taken from your environment: HF_TOKEN
set -euo pipefail
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
again="${here%/*/*}"/'it'"'"'s $HOME'_"$(date +%Y%m%d-%H%M%S)"
mkdir -- "$again" "$again"/'it'"'"'s $HOME'
cp -- "$here/config.json" "$again"/'it'"'"'s $HOME'
cd -- "$again"/'it'"'"'s $HOME'
echo "repeating in $PWD"
export PLAIN='two words'
export LINES='a
b'
exec python -m llmb.train config.json
"""


@pytest.fixture
def installed(monkeypatch):
    """Set which modules can be found."""

    def only(*names: str) -> None:
        def find_spec(name):
            return ModuleSpec(name, None, origin=f"{name}.py") if name in names else None

        monkeypatch.setattr(command, "find_spec", find_spec)

    return only


def test_one_process_per_gpu(config, run_folder, installed):
    installed("llmb.train", "torch")
    assert engine_command(config, run_folder, "/py") == ["/py", "-m", "llmb.train", "config.json"]
    assert format_engine_command(config) == "python -m llmb.train config.json"
    eight = replace(config, machine=Machine(gpu="h100", gpus=8, gpus_per_node=8))
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 8"
    assert engine_command(eight, run_folder, "/py") == f"/py {torchrun} -m llmb.train config.json".split()


def test_missing_engine_is_refused(config, run_folder, installed):
    serving = replace(
        config,
        workload=Inference(
            mode="max_throughput", use_case="chat", isl=8, osl=8, max_batch_size=1, concurrency=1, max_num_tokens=8,
            kv_fraction=0.5, num_requests=1,
        ),
    )  # fmt: skip
    installed("llmb.train", "llmb.offload", "torch")
    with pytest.raises(
        ConfigError, match="for inference is not part of this version; there is one for: training, outofcore"
    ):
        engine_command(serving, run_folder, "/py")
    installed("llmb.train")
    with pytest.raises(ConfigError, match=r"torch, which is not installed: .*-m pip install 'torch>="):
        engine_command(config, run_folder, "/py")
    with pytest.raises(UnknownName, match=r"tensorflow.*native, trtllm, megatron_bridge"):
        engine_command(replace(config, engine="tensorflow"), run_folder, "/py")


def test_looking_for_an_engine_imports_nothing():
    program = "import sys; from llmb.launch.command import _is_runnable as f; f('llmb.train'); f('llmb.no_such')"
    program += "; assert not {'torch', 'llmb.train'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(llmb.__file__).parents[1])


def test_package_without_main_is_not_runnable():
    assert command._is_runnable("llmb.report") is False
    assert command._is_runnable("llmb.launch.command") is True
    assert command._is_runnable("llmb.no_such_engine") is False


def test_environment(config):
    root = str(Path(llmb.__file__).parents[1])
    settings = engine_environment(config, {"PYTHONPATH": "lib", "OTHER": "x"}, {"A": "1"})
    cores = len(os.sched_getaffinity(0))
    assert settings == {
        "A": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(cores),
        "PYTHONPATH": os.pathsep.join([root, os.path.abspath("lib")]),
    }
    many = replace(config, machine=Machine(gpu="h100", gpus=8 * cores, gpus_per_node=8))
    assert engine_environment(many, {}, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in engine_environment(config, {"OMP_NUM_THREADS": "3"}, {})
    assert engine_environment(config, {}, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_nccl_trace_does_not_override_user_variables(config):
    traced = replace(config, profile=Profile(nccl_trace=True))
    assert "NCCL_DEBUG" not in engine_environment(config, {}, {})
    settings = engine_environment(traced, {}, {})
    assert (settings["NCCL_DEBUG"], settings["NCCL_DEBUG_SUBSYS"]) == ("INFO", "COLL")
    settings = engine_environment(traced, {"NCCL_DEBUG": "TRACE"}, {"NCCL_DEBUG_SUBSYS": "ALL"})
    assert (settings.get("NCCL_DEBUG"), settings["NCCL_DEBUG_SUBSYS"]) == (None, "ALL")


@pytest.mark.parametrize("environment", [{"a b": "1"}, {"1A": "1"}, {"": "1"}, {"A;touch x": "1"}, {"A": "nul\0"}])
def test_invalid_variable_is_refused(config, run_folder, environment):
    with pytest.raises(ConfigError, match="environment variable"):
        engine_environment(config, {}, environment)
    with pytest.raises(ConfigError, match="environment variable"):
        job_script(["true"], environment, run_folder)


def test_job_script_as_text(tmp_path):
    environment = {"PLAIN": "two words", "HF_TOKEN": "hf_secret", "LINES": "a\nb"}
    text = job_script(["python", "-m", "llmb.train", "config.json"], environment, RunFolder(tmp_path / "it's $HOME"))
    assert text == GOLDEN


@pytest.mark.parametrize(
    "install", ["plain", "sp ace", "q'u\"o", "line\nbreak", "$(touch pwned)`touch pwned`", "-n *", "%d"]
)
def test_job_script_repeats_the_run_in_a_new_folder(tmp_path, config, engine, install):
    config = replace(config, name="it's $(touch pwned) *")
    run = RunFolder.create(tmp_path / install, config, datetime(2020, 1, 1))
    program = engine("""
        import json
        Path("seen.json").write_text(json.dumps([sys.argv[1:], os.environ["ODD"], os.environ["HF_TOKEN"]]))
        write(RunEnded(status="ok"))
    """)
    odd = "a 'b' \"c\" $HOME `id` \\ \n end"
    environment = engine_environment(config, os.environ, {"ODD": odd, "HF_TOKEN": "not for paper"})
    run.write_job_script(job_script([*program, "config.json", odd], environment, run))
    assert "not for paper" not in run.job_script.read_text()

    environ = {**os.environ, "HF_TOKEN": "from the shell", "CDPATH": "/tmp"}
    process = subprocess.run([run.job_script], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    first, repeated = RunFolder.find_all(tmp_path / install)
    assert first == run
    assert not first.events(0).exists()
    assert repeated.read_config() == config
    assert json.loads((repeated.path / "seen.json").read_text()) == [["config.json", odd], odd, "from the shell"]
    assert [event.status for event in events.read(repeated.events(0))] == ["ok"]
    assert not list(tmp_path.rglob("pwned"))
