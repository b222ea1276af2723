"""Ranks on several nodes of a real Slurm compute the same as a local run, for every architecture."""

import json

import pytest
from slurm_test_runs import DEEPSEEK, GROK, LLAMA, NEMOTRON, allocated_nodes, computed_values, wait_for_result

from llmb.config.serialization import read_json
from llmb.events import RunStarted, read
from llmb.launch.run_folder import RunFolder

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        ([*LLAMA, "--set", "steps=3"], 2),
        pytest.param([*LLAMA, "--set", "steps=3"], 4, marks=pytest.mark.nightly),
        pytest.param([*GROK, "--set", "steps=3"], 2, marks=pytest.mark.nightly),
        pytest.param([*GROK, "--set", "steps=3"], 4, marks=pytest.mark.nightly),
        pytest.param([*NEMOTRON, "--set", "steps=3"], 2, marks=pytest.mark.nightly),
        pytest.param([*NEMOTRON, "--set", "steps=3"], 4, marks=pytest.mark.nightly),
        pytest.param([*DEEPSEEK, "--set", "num_requests=4"], 2, marks=pytest.mark.nightly),
    ],
    ids=["llama-2", "llama-4", "grok-2", "grok-4", "nemotron-2", "nemotron-4", "deepseek-2"],
)
def test_multi_node_run_equals_the_local_run(slurm, submit, llmb_run, run, ranks):
    arguments = [*run, "--scale", str(ranks)]
    job, slurm_run = submit(*arguments, "--env", "ODD=a 'b' $c\n`d`")
    result = wait_for_result(slurm, job, slurm_run)
    assert result["status"] == "ok", result
    code, out, err = llmb_run("submit", *arguments, "--on", "local", "--json")
    assert code == 0, err
    [local_run] = [folder for folder in RunFolder.find_all(slurm_run.install) if folder.job_id == "L1"]
    assert computed_values(slurm_run, ranks) == computed_values(local_run, ranks) != []
    events = [event for rank in range(ranks) for event in read(slurm_run.events(rank))]
    hosts = {event.host for event in events if isinstance(event, RunStarted)}
    assert None not in hosts
    allocation = read_json(slurm_run.allocation)
    assert (allocation["job_id"], allocation["restarts"]) == (job, 0)
    assert allocated_nodes(slurm, job) == (ranks, allocation["nodes"])
    assert slurm_run.record(job).exists()
    assert json.loads(out)["status"] == "ok"
