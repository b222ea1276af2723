"""Where `llmb-run submit` runs a job, and its job script, without Slurm."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmb.cli.jobs.lost_submissions import recover_submission
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import store_path
from llmb.results.job_store import Store

PROXY = ["submit", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--scale", "2", "--proxy"]
H100 = ["submit", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp8", "--scale", "16", "--gpu-type", "h100"]
CLUSTER = """
schema_version: 2
gpu_type: h100
environment: {NCCL_NET: IB, HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz}
slurm: {common: {account: us}, gpu: {partition: batch, gres: 8}, cpu: {partition: cpu}}
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "llmb"
    folder.mkdir()
    (folder / "cluster_config.yaml").write_text(CLUSTER)
    return folder


def sbatch_options(out: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in out.splitlines() if line.startswith("#SBATCH")]


def test_on_dry_prints_the_job_script_without_any_file(llmb_run):
    code, out, _ = llmb_run(*H100, "--on", "dry", "--nice", "7", "--env", "ODD=a b")
    assert code == 0
    assert {"--nodes=2", "--ntasks=16", "--gpus-per-node=8", "--nice=7", "--time=00:33:00"} <= set(sbatch_options(out))
    assert "export ODD='a b'" in out
    assert "-m llmb.cli.job_runner" in out


@pytest.mark.slow
def test_dry_run_prints_the_job_script_where_a_cluster_is_configured(llmb_run, cluster):
    code, out, _ = llmb_run(*H100[:-2], "--dry-run")
    assert code == 0
    assert {"--partition=batch", "--account=us", "--gpus-per-node=8"} <= set(sbatch_options(out))
    assert "export NCCL_NET=IB" in out
    assert "hf_abc" not in out
    assert "# Secret, taken from your environment: HF_TOKEN" in out
    code, out, _ = llmb_run(*H100[:-2], "--dry-run", "--on", "local", "--gpu-type", "h100")
    assert (code, sbatch_options(out)) == (0, [])


def test_settings_in_the_environment_of_the_cluster_file_reach_the_run(llmb_run, cluster):
    """Recipes read them from launch.sh's environment; ranks have no use for them."""
    site = "NCCL_NET: IB, MAX_STEPS: 100, CONCURRENCY: 7, RUN_CONF_PROFILE_STOP_STEP: 48"
    workload = "{environment: {TP: 2, TIME_LIMIT: '00:45:00'}}"
    (cluster / "cluster_config.yaml").write_text(
        f"{{schema_version: 2, gpu_type: h100, environment: {{{site}}}, slurm: {{gpu: {{gres: 8}}}}, "
        f"workloads: {{config: {{pretrain_llama3.1: {workload}}}}}}}"
    )
    code, out, err = llmb_run(*H100[:-2], "--dry-run", "--set", "steps=60")
    assert (code, err) == (0, "")
    assert "--time=00:48:00" in sbatch_options(out)
    assert "gpus16_tp2_pp1" in out
    assert "tp = 2 instead of 1 (cluster_config.yaml TP)" in out
    assert "steps = 60 instead of 100 (--set)" in out
    assert "concurrency" not in out, "of serving"
    assert "profile_stop" not in out, "without profiling"
    out = llmb_run(*H100, "--dry-run", "--on", "local")[1]
    assert "cluster_config.yaml" not in out


def test_cpu_ranks_are_spread_over_nodes_like_gpu_ranks(llmb_run, cluster):
    code, out, _ = llmb_run(*PROXY[:7], "--scale", "16", "--proxy", "--gpu-type", "cpu", "--dry-run")
    assert code == 0
    assert {"--nodes=2", "--ntasks-per-node=8", "--partition=cpu", "--cpus-per-task=1"} <= set(sbatch_options(out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nice", "3"], "--nice has no effect on a run that is not submitted"),
        (["--slurm-arg", "qos=x"], "--slurm-arg has no effect on a run that is not submitted"),
        (["--retries", "2"], "--retries has no effect on a run that is not submitted"),
        (["--on", "dry", "--segment", "0"], "--segment: expected a number of nodes, 1 or more"),
        (["--on", "dry", "--slurm-arg", "--qos=x"], "expected"),
        (["--on", "dry", "--slurm-arg", "nodes=3"], "--slurm-arg nodes: is set by each run; leave it out"),
        (["--on", "moon"], "unknown value of --on: 'moon'"),
    ],
)
def test_invalid_sbatch_option_is_one_line(llmb_run, options, message):
    code, _, err = llmb_run(*PROXY, *options)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1


def test_segment_from_the_environment(llmb_run, monkeypatch):
    monkeypatch.setenv("SBATCH_SEGMENT_SIZE", "4")
    gb200 = [*H100[:-1], "gb200"]
    assert "--segment=4" in sbatch_options(llmb_run(*gb200, "--on", "dry")[1])
    assert "--segment=2" in sbatch_options(llmb_run(*gb200, "--on", "dry", "--segment", "2")[1])


def test_allocation_that_is_too_small_is_refused(llmb_run, monkeypatch):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = llmb_run(*H100)
    assert code == 1
    assert "2 nodes of 8 ranks are needed, this allocation has 1; sbatch -N 2" in err


def test_submit_while_the_controller_is_down_says_so_now_and_later(llmb_run, tmp_path, monkeypatch):
    down = "Unable to contact slurm controller (connect failure)"
    for name in ("sbatch", "squeue", "sacct"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{name}: error: {down}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, _, err = llmb_run(*PROXY, "--gpu-type", "cpu", "--on", "slurm")
    assert code == 2
    first, second = err.splitlines()
    assert first.endswith(f": Slurm does not respond: {down}")
    assert second == "ERROR: Slurm does not say whether it took 1 of 1 jobs; once it responds, llmb-run jobs does"
    with Store(store_path(install_root(os.environ))) as store:
        (job,) = store.jobs()
        assert (job.status, job.reason) == ("submitting", f"Slurm does not respond: {down}")
        monkeypatch.setattr("llmb.launch.slurm.slurm_jobs.find_by_comment", lambda comment: None)  # it responds again
        job = recover_submission(store, replace(job, created_at=0.0))
        assert (job.status, job.reason) == ("failed", f"never submitted: Slurm does not respond: {down}")
