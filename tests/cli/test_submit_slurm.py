"""Where `llmb-run submit` runs a job, and its job script, without Slurm."""

from pathlib import Path

import pytest

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
